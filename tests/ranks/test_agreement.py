"""Ranks that do not end the same window are told so, all of them, on two gloo ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumkernels.ranks.agreement import _cells
from tests.support import rank_agreement_scenarios as scenarios
from tests.support.ranks import check, run

pytestmark = pytest.mark.starts

EXACT = 1e-13  # of fp64


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Per scenario, what each of two ranks found."""
    return run(2, tmp_path_factory.mktemp("agreement"), scenarios.SCENARIOS)


def of(found, scenario):
    """A scenario's results by rank."""
    check(found, scenario.__name__)
    return found[scenario.__name__]


def test_missed_end(found):
    """At the next end, before anything is stepped; whether the loop has dropped its part or not."""
    for results in of(found, scenarios.missed_end):
        for (kind, text), same in results:
            assert kind == "RuntimeError"
            assert "ranks are in different windows, by rank [1, 2]" in text
            assert same


def test_iterated_in_parts(found):
    """What is alike on all ranks is no error."""
    assert max(of(found, scenarios.iterated_in_parts)) < EXACT


def test_resumed_beside_empty(found):
    """The sums of a rank that was saved would be counted twice, or not at all."""
    for results in of(found, scenarios.resumed_beside_empty):
        for (kind, text), same in results:
            assert kind == "RuntimeError"
            assert "resumed this window inside and others have not, by rank [True, False]" in text
            assert same


def test_resumed_before_the_first(found):
    """A rank's own state of a window that it had not begun is part of that window all the same."""
    assert max(of(found, scenarios.resumed_before_the_first)) < EXACT


def test_static_graph_later(found):
    """Silent from the first backward on."""
    for errors in of(found, scenarios.static_graph_later):
        assert max(errors) < EXACT


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(0, 2**10))
def test_values_that_differ_by_rounding_are_alike(value, steps):
    """In one of both grids, whose cells are 2**12 numbers wide; numbers of other cells are not."""
    bits = torch.tensor(value, dtype=torch.float64).view(torch.int64)
    one, near, away = (_cells((bits + count).view(torch.float64)) for count in (0, steps, 2**13))
    assert any(map(torch.equal, one, near))
    assert not any(map(torch.equal, one, away))
