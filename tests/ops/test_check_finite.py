"""check_finite_ on every backend against the plain-torch reference."""

import math

import pytest
import torch

from accumkernels.ops import reference
from tests.support.backends import (
    SIZES,
    compared,
    dtype_id,
    every_bad_value,
    every_dtype,
    every_pattern,
    on_every_backend,
    one_bad,
    place,
    random,
    scalar,
)


def check(backend, grads, segments, weight=None, found_inf=0.0, shift=0):
    """Compare with the reference. Returns found_inf and the flags, which are 3 before."""
    results = []
    for module, device in ((reference, torch.device("cpu")), (backend.module, backend.device)):
        found = scalar(found_inf).to(device)
        flags = torch.full((max(segments, default=0) + 2,), 3, dtype=torch.int32, device=device)
        placed = [place(grad, device, shift) for grad in grads]
        kwargs = {} if weight is None else {"weight_tensor": scalar(weight).to(device)}
        module.check_finite_(placed, segments, found, flags, tag=11, **kwargs)
        results.append((found.item(), flags.tolist()))
    assert results[1] == results[0]
    return results[1]


@pytest.mark.parametrize("position", [0, 4095, 4096, 5000], ids=str)
@every_bad_value
@every_dtype
@compared
def test_overflow_is_found(backend, dtype, bad, position):
    """One bad value anywhere is found and its segment named; the others' flags stay."""
    assert check(backend, one_bad(dtype, bad, position), [0, 3, 2]) == (1.0, [3, 3, 3, 11, 3])


@on_every_backend
def test_without_segments(backend):
    """Gradients are then those of the first segments, in order."""
    grads = [random(n, torch.float16) for n in (5, 70, 6)]
    grads[1][3] = math.inf
    found, flags = (torch.zeros(n, dtype=d, device=backend.device) for n, d in ((1, torch.float64), (4, torch.int32)))
    backend.module.check_finite_([place(grad, backend.device) for grad in grads], [], found, flags, tag=5)
    assert (found.item(), flags.tolist()) == (1.0, [0, 5, 0, 0])


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@every_dtype
@compared
def test_finite_values_are_not(backend, dtype, shift):
    """The largest and smallest numbers of a format are finite, in all sizes."""
    finfo = torch.finfo(dtype)
    grads = [torch.full((n,), finfo.max, dtype=dtype) for n in SIZES]
    grads += [torch.full((33,), value, dtype=dtype) for value in (finfo.min, finfo.tiny, finfo.smallest_normal / 8)]
    assert check(backend, grads, list(range(len(grads))), shift=shift)[0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@compared
def test_every_16_bit_pattern(backend, dtype):
    """All finite patterns pass in one tensor; each pattern that is not finite is caught alone."""
    patterns = every_pattern(dtype)
    finite = patterns[patterns.isfinite()]
    assert check(backend, [finite], [0]) == (0.0, [3, 3])
    others = patterns[~patterns.isfinite()]
    others = others[:: 64 if backend.slow else 1]
    found, flags = check(backend, list(others.split(1)), list(range(len(others))))
    assert found == 1.0
    assert set(flags[:-1]) == {11}


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sizes", [[], [0], [5]], ids=str)
@compared
def test_weight(backend, sizes, weight):
    """A bad weight counts, whatever the list; no flag is set for it."""
    found, flags = check(backend, [random(n, torch.float16) for n in sizes], list(range(len(sizes))), weight)
    assert found == float(not (0 <= weight < math.inf))
    assert set(flags) == {3}


@pytest.mark.parametrize("sizes", [[], [0], [0, 5, 0]], ids=str)
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@compared
def test_clean_lists_change_nothing(backend, sizes, found_inf):
    """found_inf and flags stay as they are."""
    grads = [random(n, torch.bfloat16) for n in sizes]
    assert check(backend, grads, list(range(len(sizes))), found_inf=found_inf)[0] == found_inf
