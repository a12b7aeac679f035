"""acc.backward_batch on gloo ranks: tests/support/splitting_scenarios.py."""

from __future__ import annotations

from tests.support.ranks import check
from tests.support.splitting_scenarios import TWO_RANKS  # noqa: F401  the fixtures read it


def test_two_ranks(two, scenario):
    """See the function of that name."""
    check(two, scenario)
