"""A micro-batch passes through few frames and files: a trace of each case is held to what it may take."""

from __future__ import annotations

import pytest

from accumkernels.capture import autocast_presence
from tools.journey import CASES

# Frames and files. The numbers are those of Python 3.11; later ones make no frames for comprehensions.
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
    """A new case needs one."""
    assert LIMITS.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_journey_is_short(case, one_thread, monkeypatch):
    """In a settled window, with the sizes that modules take the autocast route from outside of tests."""
    monkeypatch.setattr(autocast_presence, "SMALLEST", 2**16)
    journey = CASES[case]()
    frames, files = LIMITS[case]
    assert len(journey.calls) <= frames and journey.files <= files, "\n".join(map(" ".join, journey.calls))
