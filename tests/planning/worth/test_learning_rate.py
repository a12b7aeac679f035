"""suggest_learning_rate, suggest_betas and schedules of growing batches."""

import math

import numpy
import pytest

import accumkernels as ak
from accumkernels.planning.schedule import Milestones


def test_rules():
    """Linear and square root, up and down."""
    assert ak.suggest_learning_rate(0.1, 256, 1024) == pytest.approx(0.4)
    assert ak.suggest_learning_rate(0.1, 256, 64, rule="linear") == pytest.approx(0.025)
    assert ak.suggest_learning_rate(3e-4, 256, 1024, rule="sqrt") == pytest.approx(6e-4)


@pytest.mark.parametrize("batch_size", [1, 64, 512, 100_000])
def test_betas(batch_size):
    """The second moment's half-life stays what it was, counted in samples; steps of several sizes compose."""
    beta2 = ak.suggest_betas(0.999, 512, batch_size)
    assert math.log(0.5) / math.log(beta2) * batch_size == pytest.approx(math.log(0.5) / math.log(0.999) * 512)
    assert ak.suggest_betas(beta2, batch_size, 512) == pytest.approx(0.999)
    assert ak.suggest_betas(0.0, 512, batch_size) == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((1.0, 1, 1), ValueError, "beta2 must be at least 0 and less than 1, got 1.0"),
        ((math.nan, 1, 1), ValueError, "beta2 must be at least 0 and less than 1, got nan"),
        (((0.9, 0.999), 1, 1), TypeError, r"beta2 must be a number, got \(0.9, 0.999\)"),
        ((0.9, 0, 1), ValueError, "base_batch_size must be at least 1, got 0"),
        ((0.9, 1, True), TypeError, "batch_size must be an int, got True"),
    ],
)
def test_wrong_betas(arguments, error, match):
    """Named with their value."""
    with pytest.raises(error, match=match):
        ak.suggest_betas(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0.0, 1, 1), ValueError, "base_lr must be positive and finite, got 0.0"),
        ((math.nan, 1, 1), ValueError, "base_lr must be positive and finite, got nan"),
        (("1", 1, 1), TypeError, "base_lr must be a number, got '1'"),
        ((0.1, 0, 1), ValueError, "base_batch_size must be at least 1, got 0"),
        ((0.1, 1, 1.5), TypeError, "batch_size must be an int, got 1.5"),
        ((0.1, 1, 1, "cubic"), ValueError, "rule must be one of 'linear', 'sqrt', got 'cubic'"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    """Named with their value."""
    with pytest.raises(error, match=match):
        ak.suggest_learning_rate(*arguments)


def test_milestones():
    """From its step on, each size holds."""
    schedule = Milestones({0: 32, 10: 64, 20: 48})
    assert [schedule(step) for step in (0, 9, 10, 19, 20, 10**6)] == [32, 32, 64, 64, 48, 48]
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        schedule(-1)


def test_instead_of_decay():
    """Wherever MultiStepLR would divide the rate, the batch is multiplied, up to a maximum."""
    schedule = Milestones.instead_of_decay(128, [60, 30], gamma=0.2, maximum=2000)
    assert [schedule(step) for step in (0, 29, 30, 59, 60)] == [128, 128, 640, 640, 2000]
    with pytest.raises(ValueError, match="gamma must be more than 0 and less than 1, got 1"):
        Milestones.instead_of_decay(128, [30], gamma=1)
    with pytest.raises(ValueError, match="maximum must be at least batch_size 128, got 100"):
        Milestones.instead_of_decay(128, [30], maximum=100)


def test_milestones_of_numpy():
    """As MultiStepLR takes them."""
    schedule = Milestones.instead_of_decay(128, numpy.array([60, 30]), gamma=0.2)
    assert [schedule(step) for step in (29, 30, numpy.int64(60))] == [128, 640, 3200]


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ({10: 5}, ValueError, "batch size of step 0"),
        ({0: 5, -1: 5}, ValueError, "must not be negative, got -1"),
        ({0: 0}, ValueError, "the batch size of step 0 must be at least 1, got 0"),
        ({0: 5, "1": 5}, TypeError, "every step in sizes must be an int, got '1'"),
        ([5], TypeError, r"sizes must be a mapping from steps to batch sizes, got \[5\]"),
    ],
)
def test_wrong_milestones(sizes, error, match):
    """Named with their value."""
    with pytest.raises(error, match=match):
        Milestones(sizes)
