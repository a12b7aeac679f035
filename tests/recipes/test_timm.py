"""docs/recipes/timm.md: its loop against the big batch, in each clip mode and with EMA, beside timm's own."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

pytest.importorskip("timm")

from timm.models import model_parameters  # noqa: E402
from timm.utils import ModelEmaV3, dispatch_clip_grad  # noqa: E402

import accumkernels as ak  # noqa: E402
from tests.support.recipes import batches, check, classifier, difference, recipe, together, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

SIZES = [4, 4, 4, 4, 4, 1]  # a window of four, and a short one with a small micro-batch
STEPS = 4
DECAY = 0.5
CLIPS = {"norm": 0.05, "value": 0.005, "agc": 0.02}  # each clips in every window
STOCK_IS_OFF = 0.3  # measured 0.4: a mean of means
LOSS = nn.CrossEntropyLoss()


def sgd(parameters):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=0.5)


def clip(model, mode):
    """As timm's script does."""
    if mode is not None:
        dispatch_clip_grad(model_parameters(model, exclude_head=mode == "agc"), value=CLIPS[mode], mode=mode)


def stock(model, data):
    """As timm's script does: each loss is divided by the number of micro-batches of its window."""
    optimizer = sgd(model.parameters())
    for window in (data[:STEPS], data[STEPS:]):
        for x, y in window:
            (LOSS(model(x), y) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("mode", [None, *CLIPS])
def test_clip_modes_and_ema(mode):
    """Two windows; the EMA's weights too."""
    model, data = classifier(), batches(SIZES)
    windows = [together(data[:STEPS]), together(data[STEPS:])]
    averages = []

    def see(twin):
        clip(twin, mode)
        if not averages:
            averages.append(ModelEmaV3(twin, decay=DECAY))
        else:  # after the step before
            averages[0].update(twin, step=1)

    truth = train_big(model, windows, lambda twin, window: LOSS(twin(window[0]), window[1]), sgd, see)
    averages[0].update(truth, step=2)

    ours = copy.deepcopy(model)
    average = ModelEmaV3(ours, decay=DECAY)
    acc = ak.FusedAccumulator(ours)
    updates = recipe("timm")["train_one_epoch"](
        ours, acc, data, LOSS, sgd(acc.parameters()), None, STEPS, contextlib.nullcontext,
        clip_grad=CLIPS.get(mode), clip_mode=mode or "norm", model_ema=average,
    )  # fmt: skip
    assert updates == 2
    check("timm", max(difference(model, ours, truth), difference(model, average.module, averages[0].module)))

    if mode is None:
        assert difference(model, stock(copy.deepcopy(model), data), truth) > STOCK_IS_OFF


def test_overflow():
    """fp16: the window is skipped by the scaler, agc sees no infinite gradient, and the next one trains."""
    model, data = classifier(), batches([4] * 4)
    data[0] = (data[0][0] * torch.inf, data[0][1])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    before = copy.deepcopy(model)
    train = recipe("timm")["train_one_epoch"]
    arguments = (LOSS, sgd(acc.parameters()), scaler, 2, contextlib.nullcontext, 0.02, "agc")
    train(model, acc, data[:2], *arguments)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert scaler.get_scale() == 2.0**9
    train(model, acc, data[2:], *arguments)
    assert not any(map(torch.equal, model.parameters(), before.parameters()))
