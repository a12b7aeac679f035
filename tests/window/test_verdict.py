"""A window is judged again when more is known: what was found before stays."""

from __future__ import annotations

import pytest
import torch

from accumkernels.ops import native, reference
from accumkernels.window.verdict import Verdict

# Two micro-batches that weigh 4 together.
STATE = {"weight": 4.0, "found_inf": 0.0, "used": 2.0, "poisoned": 0.0}


def scalar(value):
    """fp64 0-d."""
    return torch.tensor(value, dtype=torch.float64)


@pytest.fixture(params=[reference, native], ids=["reference", "native"])
def verdict(request):
    """Of a clean window."""
    return Verdict(request.param, torch.tensor(list(STATE.values()), dtype=torch.float64), None)


def test_clean(verdict):
    """The average is the sum over 4."""
    assert (verdict.skip, verdict.found_inf, verdict.empty, verdict.divisor) == (0, 0, False, 4)


@pytest.mark.parametrize(
    "again",
    [lambda v: v.with_overflow(scalar(0.0)), lambda v: v.clipped(scalar(8.0), scalar(1.0))],
    ids=["rounded", "clipped"],
)
def test_an_overflow_stays(verdict, again):
    """Found in one pass over the sums, and not in the next."""
    found = again(verdict.with_overflow(scalar([1.0])))
    assert (found.skip, found.found_inf, found.empty) == (1, 1, False)


def test_clipped(verdict):
    """The norm of the sums is 8, that of the average 2, and half of it is left."""
    clipped = verdict.clipped(scalar(8.0), scalar(1.0)).with_overflow(scalar(0.0))
    assert clipped.norm == 2
    assert clipped.coefficient == pytest.approx(0.5, rel=1e-6)
    assert clipped.divide_by == pytest.approx(8, rel=1e-6)
    assert verdict.clipped(scalar(8.0), scalar(3.0)).coefficient == 1
