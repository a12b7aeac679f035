"""The autocast route is on a model only while autocast casts its parameters."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.capture import autocast_presence
from accumkernels.capture.autocast_presence import EVERY, SMALLEST


def hooks(model):
    """How many modules are on the slow path of `Module.__call__`."""
    return sum(bool(m._forward_pre_hooks or m._forward_hooks) for m in model.modules())


def net():
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(acc, model, autocast, run=None):
    """One micro-batch."""
    x = torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = (model if run is None else run)(x).float().square().mean()
    acc.backward(loss)


def test_never_without_autocast():
    """No module gets a hook, however long the run."""
    model = net()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EVERY + 2):
        assert hooks(model) == 0
        backward(acc, model, autocast=False)
        acc.step(optimizer)
    assert "autocast route" not in repr(acc)


@pytest.mark.parametrize(("route", "hooked"), [("auto", 2), (True, 4)])
def test_small_modules_are_left_to_autocast(monkeypatch, route, hooked):
    """Hooks take longer than a small module's casts: unless it is asked for, only large ones get them, and the root."""
    monkeypatch.setattr(autocast_presence, "SMALLEST", SMALLEST)
    width = SMALLEST // 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2), nn.Linear(2, 2))
    assert model[0].weight.numel() == SMALLEST
    assert model[1].weight.numel() < SMALLEST
    acc = ak.FusedAccumulator(model, autocast_route=route)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(acc, model, autocast=True)
        acc.step(optimizer)
    assert hooks(model) == hooked
    assert hooks(model[0]) == 1


def test_small_models_get_no_hook(monkeypatch):
    """Neither the root, where nothing in it is large."""
    monkeypatch.setattr(autocast_presence, "SMALLEST", SMALLEST)
    model = net()
    acc = ak.FusedAccumulator(model)
    for _ in range(EVERY + 2):
        backward(acc, model, autocast=True)
        assert hooks(model) == 0


@pytest.mark.parametrize("before", [0, 1, EVERY, 2 * EVERY + 3])
def test_found_when_autocast_is_turned_on(before):
    """At the first backward, or soon after it is turned on; the sums are those of the stock route."""
    model = net()
    acc = ak.FusedAccumulator(model)
    stock = ak.FusedAccumulator(twin := net(), autocast_route=False)
    for _ in range(before):
        backward(acc, model, autocast=False)
        backward(stock, twin, autocast=False)
    for _ in range(EVERY + 3):
        backward(acc, model, autocast=True)
        backward(stock, twin, autocast=True)
    assert hooks(model) == 3
    assert "autocast route for 4 parameters" in repr(acc)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(acc.main_grad(p), stock.main_grad(q))


def test_gone_when_autocast_is_gone():
    """After a whole window without, hooks and the copy of the weights go; and come back with autocast."""
    model = net()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def window(autocast):
        for _ in range(2):
            backward(acc, model, autocast)
        acc.step(optimizer)

    window(True)
    window(True)
    copy_of_weights = weakref.ref(acc._runner.captures.presence.route)
    acc.zero_()  # a window of nothing says nothing
    assert hooks(model) == 3
    window(False)
    gc.collect()
    assert hooks(model) == 0
    assert copy_of_weights() is None
    for _ in range(EVERY + 1):
        window(True)
    assert hooks(model) == 3


def test_casts_that_are_not_autocasts():
    """They look the same in the graph: the route comes, finds no autocast, goes, and is ever longer away."""
    model = net()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x):
        return nn.functional.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())

    seen = []
    for _ in range(8 * EVERY):
        backward(acc, model, False, run)
        acc.step(optimizer)
        seen.append(hooks(model) > 0)
    came = [step for step, there in enumerate(seen) if there]
    away = [later - earlier for earlier, later in itertools.pairwise(came)]
    assert len(away) == 2
    assert away[0] >= 2 * EVERY
    assert away[1] >= 4 * EVERY


def test_inside_a_reentrant_checkpoint():
    """Its graph does not show what it does."""
    model = net()
    acc = ak.FusedAccumulator(model)
    for _ in range(3):
        backward(acc, model, True, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True))
    assert "autocast route for 4 parameters" in repr(acc)


def test_looks_now_and_then(monkeypatch):
    """A look at the graph takes a thirtieth of a backward, and most find nothing."""
    backwards, looks, real = 0, [], autocast_presence._casts
    monkeypatch.setattr(autocast_presence, "_casts", lambda *args: looks.append(backwards) or real(*args))
    model = net()
    acc = ak.FusedAccumulator(model)
    while backwards <= 2 * EVERY:
        backward(acc, model, autocast=False)
        backwards += 1
    assert looks == [0, EVERY, 2 * EVERY]


def test_casts_of_other_parameters():
    """Those of a model that is not accumulated here say nothing."""
    model, other = net(), net()
    acc = ak.FusedAccumulator(model)
    x = torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = other(x).float().sum()
    acc.backward(loss + model(x).sum())
    assert hooks(model) == 0


class Tied(nn.Module):
    """A weight that autocast casts in one place and not in the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids)).float().logsumexp(-1).mean()


@pytest.mark.parametrize("from_the_first", [True, False])
def test_a_window_whose_noise_is_measured_has_whole_gradients(from_the_first):
    """A gradient in two parts, one from the route, would leave the window out."""
    model = Tied()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1, noise_scale=from_the_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in range(3):
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.tensor([step, step + 1, window]))
            acc.backward(loss)
        acc.step(optimizer)
        if window == 0:
            assert acc.noise_scale().windows == from_the_first
    # What is asked for between windows is measured from the one that is open then.
    assert acc.noise_scale().windows == (3 if from_the_first else 2)


def test_graphs_of_small_models_are_not_looked_at(monkeypatch):
    """Where no parameter is large enough for the route, no backward pays for finding out about autocast."""
    looks = []
    monkeypatch.setattr(autocast_presence, "_casts", lambda *_: bool(looks.append(None)))
    for smallest, expected in ((SMALLEST, 0), (32, 1)):
        monkeypatch.setattr(autocast_presence, "SMALLEST", smallest)
        looks.clear()
        model = net()
        backward(ak.FusedAccumulator(model), model, autocast=True)
        assert len(looks) == expected


def test_compiled_small_models_take_the_route(monkeypatch):
    """One hook around a compiled part serves all of its modules, so that their sizes do not count."""
    monkeypatch.setattr(autocast_presence, "SMALLEST", SMALLEST)
    model = net()
    model.compile(backend="eager")
    acc = ak.FusedAccumulator(model)
    for _ in range(2):
        backward(acc, model, autocast=True)
    assert "autocast route for 4 parameters" in repr(acc)
