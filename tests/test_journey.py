"""A micro-batch passes through few frames and files: each case's trace must stay within its limits."""

from __future__ import annotations

import pytest

from accumkernels.capture import autocast_presence
from tools.journey import CASES

# Frames and files, counted by Python 3.11; later versions make no frames for comprehensions.
LIMITS = {
    "whole": (30, 10),
    "buckets": (60, 13),
    "fused": (95, 15),
    "autocast": (110, 16),
    "autocast, fused": (110, 16),
    "step, whole": (90, 16),
    "step, buckets": (90, 16),
    "step, fused": (90, 16),
    "step, autocast": (90, 16),
}


def test_every_case_has_a_limit():
    """Every case of the tool has a limit."""
    assert LIMITS.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_journey_is_short(case, one_thread, monkeypatch):
    """A settled window stays within its limits, with the module sizes for the autocast route that users get."""
    monkeypatch.setattr(autocast_presence, "SMALLEST", 2**16)
    journey = CASES[case]()
    frames, files = LIMITS[case]
    assert len(journey.calls) <= frames and journey.files <= files, "\n".join(map(" ".join, journey.calls))
