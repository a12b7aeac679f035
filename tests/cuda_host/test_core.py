"""What the kernels are made of, csrc/core, and the probe: compiled for the host like `test_kernels.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cuda_host.build import compiler
from tests.support.backends import FLOATS, INTEGER_OF_SIZE, assert_same_bits, dtype_id

pytestmark = pytest.mark.cuda_host
__test__ = compiler() is not None

if __test__:
    from tests.cuda_host import ops

    kernels = ops.kernels

HALVES = (torch.float16, torch.bfloat16)
UNIT = 128  # elements, of csrc/cuda/units.h: 32 lanes of 16 bytes of fp32
WARPS = 8  # of a block
NO_IMAGE = 209  # cudaErrorNoKernelImageForDevice
OLD_DRIVER = 35  # cudaErrorInsufficientDriver


@pytest.fixture(autouse=True)
def _default_machine() -> Iterator[None]:
    kernels.reset()
    yield
    kernels.reset()


SIDES = pytest.mark.parametrize("side", ["", "_on_host"], ids=["device", "host"])  # csrc/core as compiled for either


def converted(values: torch.Tensor, dtype: torch.dtype, side: str) -> torch.Tensor:
    """`values` as `dtype`, by csrc/core/numeric.h."""
    convert = getattr(kernels, f"convert{side}")
    result = torch.empty(values.shape, dtype=dtype)
    convert(result.data_ptr(), ops.code(dtype), values.data_ptr(), ops.code(values.dtype), values.numel())
    return result


def finite(values: torch.Tensor, side: str) -> torch.Tensor:
    """`torch.isfinite`, by csrc/core/numeric.h."""
    is_finite = getattr(kernels, f"is_finite{side}")
    result = torch.empty(values.shape, dtype=torch.bool)
    is_finite(result.data_ptr(), values.data_ptr(), ops.code(values.dtype), values.numel())
    return result


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Random bits, and the neighbourhood of every value at which rounding to 16 bits may go wrong.

    Those are all 16-bit values and the midpoints between two of them, each with the numbers right below and above it.
    """
    bits = INTEGER_OF_SIZE[dtype.itemsize]
    exact = torch.cat([all_patterns(half).double().sort().values for half in HALVES])
    midpoints = (exact[1:] + exact[:-1]) / 2
    border = torch.cat([exact, midpoints]).to(dtype)
    around = torch.cat([border.view(bits) + step for step in (-1, 0, 1)]).view(dtype)
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(bits)
    noise = torch.randint(limits.min, limits.max, (200_000,), dtype=bits, generator=generator).view(dtype)
    return torch.cat([around, noise])


@SIDES
@pytest.mark.parametrize("to", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
def test_convert_all_16_bit_patterns(dtype, to, side):
    """Every fp16 and bf16 value becomes what torch makes of it."""
    values = all_patterns(dtype)
    assert_same_bits(converted(values, to, side), values.to(to))


@SIDES
@pytest.mark.parametrize("to", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_convert_rounds_as_torch(dtype, to, side):
    """Ties, subnormals, the border to infinity, infinities, NaN and random bits, as torch rounds them."""
    values = awkward(dtype)
    assert_same_bits(converted(values, to, side), values.to(to))


@SIDES
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_is_finite(dtype, side):
    """All 16-bit patterns, or the awkward ones of a wider type, against torch."""
    values = all_patterns(dtype) if dtype in HALVES else awkward(dtype)
    assert torch.equal(finite(values, side), torch.isfinite(values))


@given(numels=st.lists(st.integers(1, 3000), min_size=1, max_size=40, unique=True), processors=st.integers(1, 4))
def test_warps_take_every_unit_once(numels, processors):
    """Of each tensor, whatever the number of multiprocessors; all warps take as many units, but for one."""
    kernels.settings.processors = processors
    ((count, total, blocks),) = kernels.launches_of(numels)
    units = {numel: math.ceil(numel / UNIT) for numel in numels}
    assert (count, total) == (len(numels), sum(units.values()))
    assert blocks == min(math.ceil(total / WARPS), 4 * processors)
    taken = [
        [(numel, unit) for numel, *share in kernels.units(numels, block, warp) for unit in range(*share)]
        for block in range(blocks)
        for warp in range(WARPS)
    ]
    assert sorted(sum(taken, [])) == sorted((numel, unit) for numel in numels for unit in range(units[numel]))
    assert {len(share) for share in taken} <= {total // (blocks * WARPS), -(-total // (blocks * WARPS))}


@given(numels=st.lists(st.integers(1, 2**34), min_size=1, max_size=15, unique=True))
def test_units_of_large_tensors(numels):
    """Numbers past 2**31 elements: a warp finds each tensor that it has units of, at its first one there."""
    kernels.settings.processors = 132
    ((_, total, blocks),) = kernels.launches_of(numels)
    step = blocks * WARPS
    expected, begin = [], 0
    for numel in numels:
        end = begin + math.ceil(numel / UNIT)
        first = begin + (step // 2 - begin) % step  # of the warp in the middle, in the numbers of all units
        if first < end:
            expected.append((numel, first - begin, end - begin, step))
        begin = end
    assert begin == total
    assert kernels.units(numels, step // 2 // WARPS, step // 2 % WARPS) == expected


def test_launches_hold_as_many_tensors_as_fit():
    """Empty tensors do not count."""
    capacity = (32764 - 256) // 16
    kernels.settings.processors = 132

    def tensors(numels: list[int]) -> list[int]:
        return [count for count, *_ in kernels.launches_of(numels)]

    assert tensors([1, 0] * capacity) == [capacity]
    assert tensors([0, 1] * (2 * capacity + 3) + [0]) == [capacity, capacity, 3]
    assert tensors([0] * 9) == []


def test_blocks_are_as_many_as_run_at_once():
    """Four on each multiprocessor, at most as many as the workspace has two sums for."""
    for processors, blocks in ((1, 4), (132, 528), (1024, 4096), (2000, 4096)):
        kernels.settings.processors = processors
        assert kernels.launches_of([2**30]) == [(1, 2**30 // UNIT, blocks)]
        assert 2 * blocks <= kernels.workspace_size()


def test_a_list_of_a_terabyte_is_refused():
    """Its units cannot be numbered in 32 bits."""
    assert kernels.launches_of([2**37, 2**37]) == [(2, 2**31, 8)]
    assert kernels.launches_of([2**37, 2**37, 1]) == []


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (0, "no NVIDIA driver found; this build needs R580 or newer"),
        (12080, "the driver supports CUDA 12.8; this build needs 13.0 (driver R580 or newer)"),
    ],
)
def test_probe_old_driver(driver, message):
    """The message names the driver that is needed."""
    kernels.settings.driver_version = driver
    assert kernels.probe(0) == (OLD_DRIVER, message)


def test_probe_devices():
    """Each device is asked for itself, and the current one stays current."""
    kernels.settings.image_error = NO_IMAGE  # on device 1
    assert kernels.probe(0) == (0, "ok")
    assert kernels.probe(1) == (NO_IMAGE, "this build has no kernel image for sm_70 (cudaErrorNoKernelImageForDevice)")
    assert kernels.current_device() == 0
    error, _ = kernels.probe(2)
    assert error != 0


@pytest.mark.parametrize("device", [0, 1])
def test_probe_makes_no_context_elsewhere(device):
    """A context takes some 500 MB of a GPU: only the device that was asked about gets one."""
    assert kernels.probe(device) == (0, "ok")
    assert kernels.settings.contexts == 1 << device
