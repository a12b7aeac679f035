"""norm_ on every backend against float64: exact sums, exact maxima."""

import math

import pytest
import torch

from accumkernels.ops import reference
from tests.support.backends import (
    FLOATS,
    SIZES,
    assert_close_sum,
    assert_same_bits,
    compared,
    every_dtype,
    on_every_backend,
    place,
    random,
    scalar,
)


def norm(backend, tensors, ord=2.0, before=0.0, shift=0):
    """What norm_ makes of `before`."""
    out = scalar(before).to(backend.device)
    backend.module.norm_(out, [place(t, backend.device, shift) for t in tensors], ord=ord)
    return out.cpu()


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("ord", [2.0, math.inf])
@every_dtype
@on_every_backend
def test_sizes(backend, dtype, ord, shift):
    """Against the exact sum or maximum in float64, for sizes around every width; twice the same bits."""
    tensors = [random(n, dtype, seed=n) for n in [*SIZES, 0]]
    values = torch.cat(tensors).double()
    actual = norm(backend, tensors, ord, shift=shift)
    if ord == 2:
        assert_close_sum(actual, scalar(math.fsum((values**2).tolist())))
    else:
        assert actual.item() == values.abs().max().item()
    assert torch.equal(actual, norm(backend, tensors, ord, shift=shift))


@pytest.mark.parametrize("size", [1, 5000])
@pytest.mark.parametrize("ord", [2.0, math.inf])
@every_dtype
@compared
def test_overflow(backend, dtype, ord, size):
    """An infinity gives inf, and a NaN before or behind it gives NaN."""
    for bad in [(math.inf,), (-math.inf,), (math.nan,), (math.nan, math.inf), (math.inf, math.nan)]:
        tensors = [torch.ones(size, dtype=dtype) for _ in range(3)]
        for i, value in enumerate(bad):
            tensors[i][-1] = value
        expected = scalar(0.0)
        reference.norm_(expected, tensors, ord=ord)
        assert_same_bits(norm(backend, tensors, ord), expected, str(bad))


@pytest.mark.parametrize(
    ("ord", "before", "expected"),
    [(2.0, 3.0, 28.0), (math.inf, 3.0, 4.0), (math.inf, 6.0, 6.0), (math.inf, math.nan, math.nan)],
)
@on_every_backend
def test_out_is_added_to(backend, ord, before, expected):
    """`out` goes on from what it holds: 3**2 + 4**2 more, or the larger one."""
    tensors = [torch.tensor([3.0]), torch.tensor([-4.0], dtype=torch.float64)]
    assert_same_bits(norm(backend, tensors, ord, before), scalar(expected))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("ord", [2.0, math.inf])
@on_every_backend
def test_empty(backend, ord, sizes):
    """Nothing changes nothing."""
    assert norm(backend, [torch.empty(n) for n in sizes], ord, 2.5).item() == 2.5


@pytest.mark.parametrize("ord", [2.0, math.inf])
@on_every_backend
def test_layouts_and_mixed_dtypes(backend, ord):
    """Dense layouts of any order, all dtypes in one list."""
    tensors = [random((2, 8, 3, 5), dtype, seed=i) for i, dtype in enumerate(FLOATS)]
    tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
    tensors[2] = tensors[2].permute(3, 1, 0, 2)
    values = torch.cat([t.double().flatten() for t in tensors])
    expected = math.fsum((values**2).tolist()) if ord == 2 else values.abs().max().item()
    assert_close_sum(norm(backend, tensors, ord), scalar(expected))


@on_every_backend
def test_wide_range(backend):
    """Squares of fp32 and bf16 numbers that fp32 cannot hold: 1e30**2 and 1e-30**2 are summed in fp64."""
    for value in (1e30, 1e-30):
        tensor = torch.full((100,), value)
        assert_close_sum(norm(backend, [tensor]), scalar(100 * tensor[0].double().item() ** 2))


@pytest.mark.parametrize("seed", range(3))
@compared
def test_large(backend, seed):
    """Some 1e5 to 1e6 elements, more than one block per thread."""
    tensors = [random(100_003 if backend.slow else 1_000_003, torch.bfloat16, seed)]
    expected = scalar(math.fsum((tensors[0].double() ** 2).tolist()))
    assert_close_sum(norm(backend, tensors), expected)
