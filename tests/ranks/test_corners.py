"""Windows on two gloo ranks that few loops have, against float64 in one process, or what every rank must be told."""

from __future__ import annotations

import pytest

from tests.support.rank_corner_scenarios import (
    discarded_last,
    first_weight_is_zero,
    fused_and_in_grad,
    grown_on_one_rank,
    marks_end_with_windows,
    one_loss_two_accumulators,
    removed_from_a_static_graph,
    saved_averaged,
    watched_by_others,
)
from tests.support.ranks import check, run

pytestmark = pytest.mark.starts

SCENARIOS = [
    first_weight_is_zero,  # before any has a weight
    fused_and_in_grad,
    one_loss_two_accumulators,
    grown_on_one_rank,
    discarded_last,
    marks_end_with_windows,
    removed_from_a_static_graph,
    saved_averaged,
    watched_by_others,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Per scenario, what each of two ranks found."""
    return run(2, tmp_path_factory.mktemp("corners"), SCENARIOS)


def of(found, scenario):
    """A scenario's results by rank."""
    check(found, scenario.__name__)
    return found[scenario.__name__]


def test_first_weight_is_zero(found):
    """What comes from other ranks' losses has their unit, though nobody knew it when backward began."""
    assert max(of(found, first_weight_is_zero)) < 1e-6


def test_fused_and_in_grad(found):
    """Nothing is sent before the part in `.grad` is added: what is missing would be a tenth of the gradient."""
    for errors in of(found, fused_and_in_grad):
        assert max(errors) < 2e-6  # of fp32


def test_watched_by_others(found):
    """What is left in `.grad` to somebody's hook is not sent before it is added."""
    for errors in of(found, watched_by_others):
        assert max(errors) < 1e-14


def test_one_loss_two_accumulators(found):
    """A weighted loss that reaches both is refused, by the names of both; what is thrown away, as in a GAN, is not."""
    for results in of(found, one_loss_two_accumulators):
        for *refused, error in (results[:4], results[4:]):
            for kind, text in refused:
                assert kind == "RuntimeError"
                assert "the gradient of 'weight' is of a loss" in text or "the gradient of 'bias' is of a loss" in text
                assert "another accumulator, that of '0.weight'" in text
                assert "acc.step(a, b)" in text
            assert error < 1e-14


def test_grown_on_one_rank(found):
    """The other makes room before sums are joined; where it will not, all ranks are told."""
    for names, error in of(found, grown_on_one_rank):
        assert names == [f"{i}.{name}" for i in (0, 2, 4) for name in ("bias", "weight")]
        assert error == (
            "RuntimeError",
            "parameters were unfrozen on some ranks only: by rank, from 4 to 6 are accumulated",
        )


def test_discarded_last(found):
    """The window goes on without that micro-batch, and steps."""
    for results in of(found, discarded_last):
        assert results == [(False, 15.0), (False, 15.0), (False, 15.0)]


def test_marks_end_with_windows(found):
    """Replicas train alike, and no micro-batch is taken for a last one that is not."""
    first, second = of(found, marks_end_with_windows)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_removed_from_a_static_graph(found):
    """Whoever trains it without an accumulator then would have replicas that diverge."""
    for (warning,) in of(found, removed_from_a_static_graph):
        assert "static_graph=True) has learned from backwards in which it was silent" in warning


def test_saved_averaged(found):
    """A window that was saved as finalized counts once, and its loss is that of all ranks."""
    for untouched, *resumed in of(found, saved_averaged):
        for result in resumed:
            assert result == pytest.approx(untouched, rel=1e-12)
