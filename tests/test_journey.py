"""A micro-batch passes through few frames and files: each case's trace must stay within its limits."""

from __future__ import annotations

import sys

import pytest

from accumkernels import hooks
from accumkernels.capture import graph
from accumkernels.capture.graph import SMALLEST_CAST
from accumkernels.window.loss_weighting import SharedLoss
from tools.journey import CASES

# Frames and files, counted by Python 3.11; later versions make no frames for comprehensions. Of fused weights, what
# reads the graph stands for hooks in forward, which a trace of the backward did not show.
LIMITS = {
    "whole": (30, 10),
    "buckets": (62, 13),
    "fused": (125, 15),
    "autocast": (110, 16),
    "autocast, fused": (126, 16),
    "step, whole": (90, 16),
    "step, buckets": (90, 16),
    "step, fused": (92, 16),
    "step, autocast": (90, 16),
}


def test_every_case_has_a_limit():
    """Every case of the tool has a limit."""
    assert LIMITS.keys() == CASES.keys()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a profiled frame of Python 3.10 holds its variables twice")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.native
def test_journey_is_short(case, one_thread, monkeypatch):
    """A settled window stays within its limits, with the sizes from which users' casts are looked at."""
    monkeypatch.setattr(graph, "SMALLEST_CAST", SMALLEST_CAST)
    monkeypatch.setattr(hooks, "_followers", [])  # accumulators that another test left would see this one's steps,
    monkeypatch.setattr(SharedLoss, "alive", [])  # and what its backwards leave at their parameters
    journey = CASES[case]()
    frames, files = LIMITS[case]
    assert len(journey.calls) <= frames and journey.files <= files, "\n".join(map(" ".join, journey.calls))
