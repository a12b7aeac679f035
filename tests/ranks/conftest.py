"""Runs the lists TWO_RANKS and FOUR_RANKS of a module of tests: scenarios that check what they find themselves."""

from __future__ import annotations

import pytest

from tests.support import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for all scenarios of a module."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(request, folder):
    """What failed on each of two ranks."""
    return ranks.run(2, folder, request.module.TWO_RANKS)


@pytest.fixture(scope="module")
def four(request, folder, two):
    """What failed on each of four ranks, which load what the two saved."""
    return ranks.run(4, folder, request.module.FOUR_RANKS)


def pytest_generate_tests(metafunc):
    """A test for each scenario."""
    if "scenario" in metafunc.fixturenames:
        scenarios = metafunc.module.FOUR_RANKS if "four" in metafunc.fixturenames else metafunc.module.TWO_RANKS
        metafunc.parametrize("scenario", [s.__name__ for s in scenarios])
