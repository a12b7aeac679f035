"""Stages of torch.distributed.pipelining on 2 and 4 gloo ranks: pipeline_scenarios.py."""

from __future__ import annotations

import pytest

from tests.support import pipeline_scenarios as scenarios
from tests.support import ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What failed on each of two ranks."""
    return ranks.run(2, tmp_path_factory.mktemp("pipeline"), scenarios.TWO_RANKS)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What failed on each of four ranks."""
    return ranks.run(4, tmp_path_factory.mktemp("pipeline"), scenarios.FOUR_RANKS)


@pytest.mark.parametrize("scenario", [s.__name__ for s in scenarios.TWO_RANKS])
def test_two_ranks(two, scenario):
    """See the function of that name."""
    ranks.check(two, scenario)


@pytest.mark.parametrize("scenario", [s.__name__ for s in scenarios.FOUR_RANKS])
def test_four_ranks(four, scenario):
    """See the function of that name."""
    ranks.check(four, scenario)
