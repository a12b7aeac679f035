"""A window is decided again when more is known: what was found before stays."""

from __future__ import annotations

import functools

import pytest
import torch

from accumkernels.ops import native, reference
from accumkernels.ops.schema import VerdictField
from accumkernels.window.verdict import Verdict

# Two micro-batches that weigh 4 together.
STATE = {"weight": 4.0, "found_inf": 0.0, "used": 2.0, "poisoned": 0.0}


def scalar(value):
    """fp64 0-d."""
    return torch.tensor(value, dtype=torch.float64)


@pytest.fixture(params=[reference, native], ids=["reference", "native"])
def decide(request):
    """Makes a verdict of a clean window."""
    return functools.partial(Verdict, request.param, torch.tensor(list(STATE.values()), dtype=torch.float64), None)


def test_clean(decide):
    """The average is the sum over 4."""
    verdict = decide()
    assert (verdict.skip, verdict.found_inf, verdict.empty, verdict.divisor) == (0, 0, False, 4)


@pytest.mark.parametrize("found", [0.0, 1.0], ids=["later", "at once"])
def test_an_overflow_stays(decide, found):
    """Found in one pass over the sums, and not in the next."""
    verdict = decide(overflow=scalar([found])).with_overflow(scalar([1.0 - found])).with_overflow(scalar(0.0))
    assert (verdict.skip, verdict.found_inf, verdict.empty) == (1, 1, False)


def test_clipped(decide):
    """The norm of the sums is 8, that of the average 2, and half of it is left."""
    clipped = decide(scalar(8.0), scalar(1.0)).with_overflow(scalar(0.0))
    assert clipped.exact[VerdictField.NORM] == 2
    assert clipped.coefficient == pytest.approx(0.5, rel=1e-6)
    assert clipped.divide_by == pytest.approx(8, rel=1e-6)
    assert decide(scalar(8.0), scalar(3.0)).coefficient == 1
