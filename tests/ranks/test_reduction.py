"""Data parallel windows on 2 and 4 gloo ranks: data_parallel_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

from tests.support import coupled_scenarios as coupled
from tests.support import data_parallel_metrics_scenarios as metrics
from tests.support import data_parallel_scenarios as training
from tests.support import data_parallel_state_scenarios as checkpoints
from tests.support.ranks import check

TWO_RANKS = training.TWO_RANKS + metrics.TWO_RANKS + checkpoints.TWO_RANKS + coupled.TWO_RANKS
FOUR_RANKS = training.FOUR_RANKS + checkpoints.FOUR_RANKS


def test_two_ranks(two, scenario):
    """See the function of that name."""
    check(two, scenario)


def test_four_ranks(four, scenario):
    """See the function of that name."""
    check(four, scenario)
