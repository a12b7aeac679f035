"""Stages of torch.distributed.pipelining on 2 and 4 gloo ranks: pipeline_scenarios.py."""

from __future__ import annotations

from tests.support import pipeline_scenarios as stages
from tests.support.ranks import check

TWO_RANKS = stages.TWO_RANKS
FOUR_RANKS = stages.FOUR_RANKS


def test_two_ranks(two, scenario):
    """See the function of that name."""
    check(two, scenario)


def test_four_ranks(four, scenario):
    """See the function of that name."""
    check(four, scenario)
