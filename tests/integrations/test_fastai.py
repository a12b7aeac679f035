"""fastai with our callback against the big batch, beside its own GradientAccumulation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

pytest.importorskip("fastai")

from fastai.callback import fp16  # noqa: E402
from fastai.callback.core import Callback, CancelFitException  # noqa: E402
from fastai.callback.fp16 import NonNativeMixedPrecision  # noqa: E402
from fastai.callback.training import GradientAccumulation, GradientClip  # noqa: E402
from fastai.data.core import DataLoaders  # noqa: E402
from fastai.learner import Learner  # noqa: E402
from fastai.optimizer import SGD, OptimWrapper  # noqa: E402

from accumkernels.integrations.fastai import FusedAccumulation  # noqa: E402
from tests.support.recipes import batches, check, classifier, difference, together, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

SIZES = [4, 1, 7, 3, 5, 2]  # a window of twelve samples, and a short one of ten
SAMPLES = 12
LOSS = nn.CrossEntropyLoss()
RATE = 0.5
STOCK_IS_OFF = 0.3
SAME = {"rtol": 1e-5, "atol": 1e-7}  # sums of scaled gradients in fp32, rounded in another order


def sgd(parameters):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=RATE)


def wrapped(parameters, lr, **_):
    """torch's optimizer in fastai's wrapper."""
    return OptimWrapper(parameters, torch.optim.SGD, lr=lr)


def learner(model, data, *callbacks, optimizer=SGD, **options):
    """A Learner that says nothing, with micro-batches as they are."""
    options.setdefault("lr", RATE)
    made = Learner(
        DataLoaders(data, data[:1]), model, loss_func=LOSS, opt_func=optimizer, cbs=list(callbacks), wd=0.0, **options
    )
    made.remove_cbs([made.progress] if hasattr(made, "progress") else [])
    return made


def fit(model, data, *callbacks, epochs=1, **options):
    """Train the model."""
    made = learner(model, data, *callbacks, **options)
    with made.no_logging():
        made.fit(epochs)
    return model


@pytest.fixture
def mixed_precision_on_the_cpu(monkeypatch):
    """fastai has it on GPUs only."""
    monkeypatch.setattr(fp16, "autocast", lambda _, dtype: torch.autocast("cpu", dtype=dtype))
    monkeypatch.setattr(fp16, "GradScaler", lambda _, **kwargs: torch.amp.GradScaler("cpu", **kwargs))


def big(model, windows, max_norm=None):
    """In float64."""

    def clip(twin):
        if max_norm is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), max_norm)

    return train_big(model, windows, lambda twin, window: LOSS(twin(window[0]), window[1]), sgd, clip)


@pytest.mark.parametrize("optimizer", [SGD, wrapped])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_one_epoch(optimizer, max_norm):
    """A window, and a short one that ends with the fit, which fastai would leave unused."""
    model, data = classifier(), batches(SIZES)
    truth = big(model, [together(data[:3]), together(data[3:])], max_norm)
    clip = [] if max_norm is None else [GradientClip(max_norm)]
    ours = fit(copy.deepcopy(model), data, FusedAccumulation(SAMPLES), *clip, optimizer=optimizer)
    check("fastai", difference(model, ours, truth))
    if max_norm is None:
        stock = fit(copy.deepcopy(model), data, GradientAccumulation(SAMPLES), optimizer=optimizer)
        assert difference(model, stock, truth) > STOCK_IS_OFF


def test_windows_run_over_the_end_of_an_epoch():
    """As fastai's, whose mean divides by `n_acc`, whatever the window has."""
    model, data = classifier(), batches([4, 4, 4, 4])
    truth = big(model, [together(data[:3]), together([data[3], *data[:2]]), together(data[2:])])
    ours = fit(copy.deepcopy(model), data, FusedAccumulation(SAMPLES), epochs=2)
    check("fastai", difference(model, ours, truth))


def test_weight():
    """The Learner's current batch, counted otherwise."""
    model, data = classifier(), batches([4, 4, 4])
    ours = fit(copy.deepcopy(model), data, FusedAccumulation(SAMPLES, weight=lambda learn: 1 + learn.iter))
    twin = copy.deepcopy(model).double()
    losses = [LOSS(twin(x.double()), y) * (1 + i) / 6 for i, (x, y) in enumerate(data)]
    sum(losses).backward()
    sgd(twin.parameters()).step()
    check("fastai", difference(model, ours, twin))


class Scales(Callback):
    """The loss scale after each step."""

    order = 20

    def __init__(self):
        self.seen = []

    def after_step(self):
        self.seen.append(self.learn.scaler.get_scale())


@pytest.mark.usefixtures("mixed_precision_on_the_cpu")
def test_fp16_is_fastais_where_that_is_right():
    """Whole windows of 4 equal micro-batches, an overflow in the second, clipping: parameters and scales."""
    found = []
    data = batches([4] * 12)
    data[4] = (data[4][0] * 1e30, data[4][1])
    for callback in (GradientAccumulation, FusedAccumulation):
        model = classifier()
        made = learner(model, data, callback(16), GradientClip(0.1)).to_fp16(init_scale=2.0**10)
        scales = Scales()
        made.add_cb(scales)
        with made.no_logging():
            made.fit(1)
        found.append((model, scales.seen))
    (stock, stock_scales), (ours, our_scales) = found
    assert our_scales == stock_scales == [2.0**10, 2.0**9, 2.0**9]
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, **SAME)


@pytest.mark.usefixtures("mixed_precision_on_the_cpu")
def test_bf16():
    """An overflow is skipped, where fastai checks nothing; gradients come without being widened."""
    model, data = classifier(), batches([4, 4])
    data[1] = (data[1][0] * math.inf, data[1][1])
    before = copy.deepcopy(model)
    seen = []

    class Look(Callback):
        def before_step(self):
            seen.append(repr(self.learn.fused_accumulation.accumulator))

    made = learner(model, data, FusedAccumulation(8), Look()).to_bf16()
    with made.no_logging():
        made.fit(1)
    assert "84 taken in 16 bits" in seen[0]
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_fits_follow_each_other():
    """Also after one that was cancelled inside a window, or ended by an error; frozen layers get nothing."""
    model, data = classifier(), batches([4, 4, 4])

    class Stop(Callback):
        def after_batch(self):
            if self.learn.training:
                raise CancelFitException

    callback = FusedAccumulation(SAMPLES)
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
        truth = copy.deepcopy(before)
        truth[0].requires_grad_(False)
        truth = big_of_the_head(truth, data)
        check("fastai", difference(before, model, truth))
        made.unfreeze()
        middle = copy.deepcopy(model)
        made.fit(1)
    check("fastai", difference(middle, model, big(middle, [together(data)])))


class Failing(Callback):
    """Ends a fit as a user's mistake does."""

    def after_loss(self):
        if self.learn.training and self.learn.iter == 1:
            raise RuntimeError("at fault")


def big_of_the_head(model, data):
    """One step, in float64, of what is not frozen."""
    return train_big(
        model,
        [together(data)],
        lambda twin, window: LOSS(twin(window[0]), window[1]),
        lambda parameters: sgd([p for p in parameters if p.requires_grad]),
    )


def test_refused(monkeypatch):
    """What cannot be right is an error that says what to use."""
    data = batches([4])
    for other, instead in (
        (GradientAccumulation(8), "GradientAccumulation: FusedAccumulation takes its place"),
        (NonNativeMixedPrecision.__new__(NonNativeMixedPrecision), "NonNativeMixedPrecision: use to_fp16"),
    ):
        with pytest.raises(ValueError, match=instead):
            fit(classifier(), data, FusedAccumulation(8), other)
    with pytest.raises(ValueError, match="master_weights=True: fastai builds"):
        FusedAccumulation(8, master_weights=True)
    with pytest.raises(TypeError, match="n_acc must be an int, got 1.5"):
        FusedAccumulation(1.5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process, and there are 2"):
        fit(classifier(), data, FusedAccumulation(8))
