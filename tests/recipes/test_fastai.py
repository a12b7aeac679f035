"""docs/recipes/fastai.md: its callback against the big batch, beside fastai's own GradientAccumulation."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

pytest.importorskip("fastai")

from fastai.callback import fp16  # noqa: E402
from fastai.callback.core import Callback, CancelFitException  # noqa: E402
from fastai.callback.training import GradientAccumulation, GradientClip  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.learner import Learner  # noqa: E402
from fastai.optimizer import OptimWrapper  # noqa: E402

from tests.support.recipes import batches, check, classifier, difference, recipe, together, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

SIZES = [4, 1, 7, 3, 5, 2]  # a window of twelve samples, and a short one of ten
SAMPLES = 12
LOSS = nn.CrossEntropyLoss()
RATE = 0.5
STOCK_IS_OFF = 0.3
SAME = {"rtol": 1e-5, "atol": 1e-7}  # sums of scaled gradients in fp32, rounded in another order


@pytest.fixture(scope="module")
def fused():
    """The page's callback."""
    return recipe("fastai")["FusedAccumulation"]


def sgd(parameters):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=RATE)


def learner(model, data, *callbacks, **options):
    """A Learner that says nothing, with micro-batches as they are."""
    optimizer = functools.partial(OptimWrapper, opt=torch.optim.SGD)
    made = Learner(
        DataLoaders(data, data[:1]), model, LOSS, opt_func=optimizer, cbs=list(callbacks), wd=0.0, lr=RATE, **options
    )
    made.remove_cbs([made.progress] if hasattr(made, "progress") else [])
    return made


def fit(model, data, *callbacks, epochs=1):
    """Train the model."""
    made = learner(model, data, *callbacks)
    with made.no_logging():
        made.fit(epochs)
    return model


@pytest.fixture
def mixed_precision_on_the_cpu(monkeypatch):
    """fastai has it on GPUs only."""
    monkeypatch.setattr(fp16, "autocast", lambda _, dtype: torch.autocast("cpu", dtype=dtype))
    monkeypatch.setattr(fp16, "GradScaler", lambda _, **kwargs: torch.amp.GradScaler("cpu", **kwargs))


def big(model, windows, max_norm=None):
    """In float64, what is trainable."""

    def clip(twin):
        if max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    def optimizer(parameters):
        return sgd([p for p in parameters if p.requires_grad])

    return train_big(model, windows, lambda twin, window: LOSS(twin(window[0]), window[1]), optimizer, clip)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_one_epoch(fused, max_norm):
    """A window, and a short one that ends with the fit, which fastai would leave unused."""
    model, data = classifier(), batches(SIZES)
    truth = big(model, [together(data[:3]), together(data[3:])], max_norm)
    ours = fit(copy.deepcopy(model), data, fused(SAMPLES, max_norm))
    check("fastai", difference(model, ours, truth))
    if max_norm is None:
        stock = fit(copy.deepcopy(model), data, GradientAccumulation(SAMPLES))
        assert difference(model, stock, truth) > STOCK_IS_OFF


def test_windows_run_over_the_end_of_an_epoch(fused):
    """As fastai's, whose mean divides by `n_acc`, whatever the window has."""
    model, data = classifier(), batches([4, 4, 4, 4])
    truth = big(model, [together(data[:3]), together([data[3], *data[:2]]), together(data[2:])])
    ours = fit(copy.deepcopy(model), data, fused(SAMPLES), epochs=2)
    check("fastai", difference(model, ours, truth))


class Scales(Callback):
    """The loss scale after each batch."""

    order = 20

    def __init__(self):
        self.seen = []

    def after_batch(self):
        if self.learn.training:
            self.seen.append(self.learn.scaler.get_scale())


@pytest.mark.usefixtures("mixed_precision_on_the_cpu")
def test_fp16_is_fastais_where_that_is_right(fused):
    """Whole windows of 4 equal micro-batches, an overflow in the second, clipping: parameters and scales."""
    found = []
    data = batches([4] * 12)
    data[4] = (data[4][0] * 1e30, data[4][1])
    for callbacks in ([GradientAccumulation(16), GradientClip(0.1)], [fused(16, max_norm=0.1)]):
        model, scales = classifier(), Scales()
        made = learner(model, data, *callbacks).to_fp16(init_scale=2.0**10)
        made.add_cb(scales)
        with made.no_logging():
            made.fit(1)
        found.append((model, scales.seen))
    (stock, stock_scales), (ours, our_scales) = found
    assert our_scales == stock_scales == [2.0**10] * 7 + [2.0**9] * 5
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, **SAME)


@pytest.mark.usefixtures("mixed_precision_on_the_cpu")
def test_bf16(fused):
    """An overflow is skipped, where fastai checks nothing."""
    model, data = classifier(), batches([4, 4])
    data[1] = (data[1][0] * math.inf, data[1][1])
    before = copy.deepcopy(model)
    made = learner(model, data, fused(8)).to_bf16()
    with made.no_logging():
        made.fit(1)
    assert all(map(torch.equal, model.parameters(), before.parameters()))


class Stop(Callback):
    """Cancels a fit inside a window."""

    def after_batch(self):
        if self.learn.training:
            raise CancelFitException


class Failing(Callback):
    """Ends a fit as a user's mistake does."""

    def after_loss(self):
        if self.learn.training and self.learn.iter == 1:
            raise RuntimeError("at fault")


def test_fits_follow_each_other(fused):
    """Also after one that was cancelled inside a window, or ended by an error; frozen layers get nothing."""
    model, data = classifier(), batches([4, 4, 4])
    callback = fused(SAMPLES)
    made = learner(model, data, callback, splitter=lambda m: [list(m[0].parameters()), list(m[2].parameters())])
    made.freeze()
    before = copy.deepcopy(model)
    with made.no_logging():
        made.fit(1, cbs=Stop())
        assert callback.accumulator is None
        assert all(map(torch.equal, model.parameters(), before.parameters()))
        with pytest.raises(RuntimeError, match="at fault"):
            made.fit(1, cbs=Failing())
        made.fit(1)
        check("fastai", difference(before, model, big(before, [together(data)])))
        made.unfreeze()
        middle = copy.deepcopy(model)
        made.fit(1)
    check("fastai", difference(middle, model, big(middle, [together(data)])))
