"""One step for several optimizers, clipping by parts, and parameters that no optimizer owns, against stock torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp, relative_error

SIZES = (4, 1, 8)
# Gradients agree to 1e-6; Muon's orthogonalisation works in bf16, whose rounding may turn over where they differ.
TOLERANCE = {"muon": 1e-3, "adamw": 1e-4}


def make(model, fused):
    """Muon for matrices and AdamW for the rest, as people train them."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, fused=fused)


def apart(params):
    """Matrices and the rest."""
    params = list(params)
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def assert_alike(model, twin):
    """The parameters of each optimizer, to its tolerance."""
    for ours, stock, name in zip(apart(model.parameters()), apart(twin.parameters()), TOLERANCE, strict=True):
        assert relative_error(ours, stock) < TOLERANCE[name]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("limit", [None, 0.05, 100.0, torch.tensor(0.05), "parts"], ids=str)
def test_muon_and_adamw(fused, scaled, limit):
    """Five windows leave what five stock steps of both optimizers leave, and the norms are torch's."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(sum(SIZES))
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu") if scaled else None)
    optimizers, stocks = make(model, fused), make(twin, fused)
    for _ in range(5):
        for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
            acc.backward(mse_loss(model(xs), ys), weight=len(xs))
        limits = list(zip(apart(model.parameters()), (0.03, 0.02), strict=True)) if limit == "parts" else limit
        norms = acc.step(*optimizers, max_norm=limits)
        mse_loss(twin(x), y).backward()
        if limit == "parts":
            expected = [
                nn.utils.clip_grad_norm_(params, value)
                for params, value in zip(apart(twin.parameters()), (0.03, 0.02), strict=True)
            ]
            torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
            joint = torch.linalg.vector_norm(torch.stack(expected))
            torch.testing.assert_close(acc.metrics()["grad_norm"], joint, rtol=1e-5, atol=0)
        elif limit is not None:
            expected = nn.utils.clip_grad_norm_(twin.parameters(), float(limit))
            torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)
        for stock in stocks:
            stock.step()
            stock.zero_grad()
    assert_alike(model, twin)


@pytest.mark.parametrize("fused", [False, True])
def test_all_skip_together(fused):
    """An overflow in a parameter of one leaves both alone and backs off once; training goes on as stock's."""
    model = mlp()
    twin = copy.deepcopy(model)
    scaler, twin_scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizers, stocks = make(model, fused), make(twin, fused)
    for factor in (1.0, math.inf, 1.0, 1.0):
        x, y = batch(6)
        before = [p.detach().clone() for p in model.parameters()]
        loss = mse_loss(model(x), y) + factor * (model[4].bias.sum() if factor == math.inf else 0)
        acc.backward(loss)
        acc.step(*optimizers, max_norm=1.0)
        assert acc.step_was_skipped == (factor == math.inf)
        twin_loss = mse_loss(twin(x), y) + factor * (twin[4].bias.sum() if factor == math.inf else 0)
        twin_scaler.scale(twin_loss).backward()
        for stock in stocks:
            twin_scaler.unscale_(stock)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        if factor != math.inf:  # stock asks each optimizer alone, and would step Muon with what clipping made nan
            for stock in stocks:
                twin_scaler.step(stock)
        else:
            assert all(map(torch.equal, before, model.parameters()))
            twin_scaler.step(stocks[1])
        twin_scaler.update()
        for stock in stocks:
            stock.zero_grad()
        assert scaler.get_scale() == twin_scaler.get_scale()
        assert scaler._growth_tracker == twin_scaler._growth_tracker
    assert_alike(model, twin)


@pytest.mark.parametrize("params", [lambda m: [*m[2].parameters(), *m[4].parameters()], lambda m: m[1:3].parameters()])
def test_parts_of_a_fused_optimizer(params):
    """It divides in its own pass, whether a part is all that it steps or not."""
    model = mlp()
    twin = copy.deepcopy(model)
    acc = ak.FusedAccumulator(model)
    first, second = list(model[0].parameters()), [*model[2].parameters(), *model[4].parameters()]
    fused = torch.optim.AdamW(second, lr=0.01, fused=True)
    plain = torch.optim.SGD(first, lr=0.01)
    seen = []
    fused.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.grad_scale))
    x, y = batch(4)
    acc.backward(mse_loss(model(x), y), weight=3)
    (norm,) = acc.step(plain, fused, max_norm=[(params(model), 0.05)])
    assert seen == [3.0]
    mse_loss(twin(x), y).backward()
    (expected,) = [nn.utils.clip_grad_norm_(list(params(twin)), 0.05)]
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.optim.AdamW([*twin[2].parameters(), *twin[4].parameters()], lr=0.01, fused=True).step()
    torch.optim.SGD(twin[0].parameters(), lr=0.01).step()
    assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-5


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parts_that_leave_some_out(masters, dtype):
    """What no entry names is not clipped, and an entry may name model parameters or masters."""
    model = mlp(dtype)
    acc = ak.FusedAccumulator(model, master_weights=masters)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    before = [p.detach().double() for p in acc.parameters()]
    x, y = batch(6, dtype)
    twin = copy.deepcopy(model)
    mse_loss(twin(x), y).backward()
    targets = list(acc.parameters())
    acc.backward(mse_loss(model(x), y))
    norms = acc.step(optimizer, max_norm=[(model[0].weight, 1e-3), (targets[2:4], math.inf), ([], 1.0)])
    grads = [p.grad.double() for p in twin.parameters()]
    expected = [grads[0].norm(), torch.stack([g.norm() for g in grads[2:4]]).norm(), torch.zeros(())]
    # 16-bit parameters without masters have rounded gradients and updates.
    torch.testing.assert_close([n.double() for n in norms], [e.double() for e in expected], rtol=1e-3, atol=0)
    grads[0] *= 1e-3 / grads[0].norm()
    after = [b - g for b, g in zip(before, grads, strict=True)]
    narrow = dtype == torch.float16 and not masters
    assert relative_error(list(acc.parameters()), after) < (1e-3 if narrow else 1e-5)
    moved = (before[0] - list(acc.parameters())[0].detach().double()).norm().item()
    if not narrow:
        assert moved == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("limits", "error", "words"),
    [
        ([1.0], TypeError, r"max_norm\[0\] must be a pair \(parameters, max_norm\), got 1.0"),
        ([("weight", 1.0)], TypeError, r"max_norm\[0\]: a parameter must be a tensor, got 'w'"),
        ([(torch.ones(2), 1.0)], ValueError, r"max_norm\[0\]: a tensor of shape \(2,\) is not one of the"),
        ("twice", ValueError, r"max_norm\[1\]: '0.weight' is in an entry before it"),
        ("negative", ValueError, r"max_norm\[0\] must be non-negative, got -1.0"),
    ],
)
def test_wrong_parts(limits, error, words):
    """The message names the entry; the window is as it was."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    if limits == "twice":
        limits = [(model[0].parameters(), 1.0), (model[0].weight, 1.0)]
    if limits == "negative":
        limits = [(model[0].parameters(), -1.0)]
    x, y = batch(6)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(error, match=words):
        acc.step(optimizer, max_norm=limits)
    assert acc.micro_batches == 1
    assert acc.step(optimizer, max_norm=[]) == []


def test_empty_window_has_a_norm_for_each_part():
    """As one limit has."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    assert acc.step(optimizer, max_norm=[(model[0].weight, 1.0), (model[2].weight, 1.0)]) == [0.0, 0.0]


@pytest.mark.parametrize("form", ["step", "long"])
@pytest.mark.parametrize("masters", [False, True])
def test_parameters_that_no_optimizer_owns(form, masters):
    """They stay as they are, as in stock, where they are named; else the first is an error. The norm counts them."""
    model = mlp(torch.bfloat16 if masters else torch.float32)
    twin = copy.deepcopy(model).float()
    acc = ak.FusedAccumulator(model, master_weights=masters)
    trained = list(acc.parameters())[2:]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(6, before[0].dtype)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"no optimizer named.*'0.weight'.*ignore=\[parameter\]"):
        acc.step(optimizer)
    with pytest.raises(RuntimeError, match=r"'0.bias'"):
        acc.step(optimizer, ignore=[model[0].weight])
    with pytest.raises(ValueError, match="ignore: a tensor of shape"):
        acc.step(optimizer, ignore=[torch.ones(1)])
    mse_loss(twin(x.float()), y.float()).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    if form == "step":
        norm = acc.step(optimizer, max_norm=0.1, ignore=model[0].parameters())
    else:
        acc.finalize(optimizer, ignore=model[0].parameters())
        norm = acc.clip_grad_norm_(0.1)
        optimizer.step()
        acc.zero_()
    torch.testing.assert_close(norm, expected, rtol=2e-2 if masters else 1e-5, atol=0)
    changed = [not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True)]
    assert changed[:2] == [False, False]
    assert any(changed[2:])
    assert all(p.grad is None for p in model.parameters())


def test_ownership_is_checked_anew_where_other_parameters_were_touched():
    """A layer that nobody steps gets no gradient in the first window, and one in the second."""
    model = mlp()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    acc = ak.FusedAccumulator(model)
    x, y = batch(6)
    model[:-1].requires_grad_(False)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    model[:-1].requires_grad_(True)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"no optimizer named.*'0.weight'"):
        acc.step(optimizer)


def test_ownership_is_checked_anew_without_ignore():
    """What one window was told to leave alone, the next one was not."""
    model = mlp()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    acc = ak.FusedAccumulator(model)
    x, y = batch(6)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer, ignore=model[:-1].parameters())
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"no optimizer named.*'0.weight'"):
        acc.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_one_optimizer_of_two_accumulators(fused):
    """What one of them has averaged is not divided by the other's weights."""
    models = [mlp(seed=1), mlp(seed=2)]
    twins = copy.deepcopy(models)
    first, second = (ak.FusedAccumulator(model) for model in models)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0, fused=fused)
    x, y = batch(4)
    for acc, model in ((first, models[0]), (second, models[1])):
        for rows in (slice(0, 1), slice(1, 4)):
            acc.backward(mse_loss(model(x[rows]), y[rows]), weight=rows.stop - rows.start)
    first.finalize(optimizer)
    second.step(optimizer)
    first.zero_()
    for model, twin in zip(models, twins, strict=True):
        mse_loss(twin(x), y).backward()
        stepped = [p.detach() - p.grad for p in twin.parameters()]
        assert relative_error(list(model.parameters()), stepped) < 1e-6
