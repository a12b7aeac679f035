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
TILE = 4096  # kTile of csrc/cuda/blocks.h
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


@given(numels=st.lists(st.one_of(st.integers(1, 20_000), st.integers(1, 2**36)), min_size=1, max_size=20))
def test_blocks_cover_every_element_once(numels):
    """The first and last blocks of each tensor begin and end with it; pieces are whole tiles but at a tensor's end."""
    (blocks,) = kernels.blocks(numels)
    assert blocks <= 16384 + len(numels) <= kernels.workspace_size()
    per_block = math.ceil(math.ceil(sum(numels) / 16384) / TILE) * TILE
    block = 0
    for index, numel in enumerate(numels):
        last = block + -(-numel // per_block) - 1
        tail = (numel - 1) // per_block * per_block
        assert kernels.piece(numels, block) == (index, 0, min(numel, per_block))
        assert kernels.piece(numels, last) == (index, tail, numel - tail)
        block = last + 1
    assert block == blocks


def test_blocks_of_a_small_list():
    """Each block in turn, tensor by tensor."""
    pieces = [kernels.piece([1, 5000, 4096, 2], block) for block in range(5)]
    assert pieces == [(0, 0, 1), (1, 0, 4096), (1, 4096, 904), (2, 0, 4096), (3, 0, 2)]


def test_launches_hold_as_many_tensors_as_fit():
    """Empty tensors do not count; a launch of one-element tensors has a block for each."""
    capacity = (32764 - 256) // 16
    assert kernels.blocks([1, 0] * capacity) == [capacity]
    assert kernels.blocks([0, 1] * (2 * capacity + 3) + [0]) == [capacity, capacity, 3]
    assert kernels.blocks([0] * 9) == []


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
