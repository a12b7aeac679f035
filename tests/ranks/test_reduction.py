"""Data parallel windows on 2 and 4 gloo ranks: data_parallel_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

import pytest

from tests.support import coupled_scenarios as coupled
from tests.support import data_parallel_scenarios as training
from tests.support import data_parallel_state_scenarios as checkpoints
from tests.support import ranks

TWO_RANKS = training.TWO_RANKS + checkpoints.TWO_RANKS + coupled.TWO_RANKS
FOUR_RANKS = training.FOUR_RANKS + checkpoints.FOUR_RANKS


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for all."""
    return tmp_path_factory.mktemp("reduction")


@pytest.fixture(scope="module")
def two(shared):
    """What failed on each of two ranks."""
    return ranks.run(2, shared, TWO_RANKS)


@pytest.fixture(scope="module")
def four(shared, two):
    """What failed on each of four ranks, which load what the two saved."""
    return ranks.run(4, shared, FOUR_RANKS)


@pytest.mark.parametrize("scenario", [s.__name__ for s in TWO_RANKS])
def test_two_ranks(two, scenario):
    """See the function of that name."""
    ranks.check(two, scenario)


@pytest.mark.parametrize("scenario", [s.__name__ for s in FOUR_RANKS])
def test_four_ranks(four, scenario):
    """See the function of that name."""
    ranks.check(four, scenario)
