"""Lockstep with the stock GradScaler loop: same skips, scale and growth tracker, and the same bits where possible."""

from __future__ import annotations

import copy
import random
import unittest.mock

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.capture.inbox import MicroBatch
from accumkernels.window.grad_scaler import loss_scale
from tests.support.frozen import Adapted
from tests.support.models import batch, mlp
from tests.support.seen import Seen

OPTIMIZERS = {
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.05, fused=fused),
    "momentum": lambda params, fused: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=fused),
    "adamw": lambda params, fused: torch.optim.AdamW(params, lr=0.01, fused=fused),
    "adagrad": lambda params, fused: torch.optim.Adagrad(params, lr=0.01, fused=fused),
}


class StockLoop:
    """The loop a user of torch.amp writes: undivided scaled losses into .grad, which is then divided by K."""

    def __init__(self, model, make_optimizer, **scaler_kwargs):
        self.model = model
        self.scaler = torch.amp.GradScaler("cpu", **scaler_kwargs)
        self.optimizer = make_optimizer(list(model.parameters()))

    def window(self, losses):
        """Train one window; returns whether the step was skipped."""
        for loss in losses:
            self.scaler.scale(loss(self.model)).backward()
        self.scaler.unscale_(self.optimizer)
        for p in self.model.parameters():
            p.grad.div_(len(losses))
        before = [p.detach().clone() for p in self.model.parameters()]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return all(torch.equal(p, b) for p, b in zip(self.model.parameters(), before, strict=True))


def assert_same_scaler(ours, stock):
    """Scale and growth tracker agree."""
    assert ours.get_scale() == stock.get_scale()
    assert ours._get_growth_tracker() == stock._get_growth_tracker()


@pytest.mark.parametrize("form", ["step", "long"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lockstep_with_injected_overflow(name, fused, form):
    """100 windows of 1 to 4 micro-batches with overflow injected at random.

    Power-of-two scales commute with every rounding, so sums and means are those of the stock loop bit for bit. Fused
    optimizers divide in their own kernel in step(), so only there a tolerance is needed. Torch's fused SGD leaves its
    momentum uninitialised when its very first step is skipped, so the first window is clean.
    """
    rng = random.Random(0)
    model = mlp()
    twin = copy.deepcopy(model)
    kwargs = {"init_scale": 2.0**12, "growth_interval": 3}
    scaler = torch.amp.GradScaler("cpu", **kwargs)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = OPTIMIZERS[name](acc.parameters(), fused)
    stock = StockLoop(twin, lambda params: OPTIMIZERS[name](params, fused), **kwargs)
    skips = 0
    for window in range(100):
        losses = []
        for _ in range(rng.randint(1, 4)):
            x, y = batch(3, seed=rng.randrange(10**6))
            factor = float("inf") if window and rng.random() < 0.1 else 1.0
            losses.append(lambda m, x=x, y=y, factor=factor: mse_loss(m(x), y) * factor)
        if form == "step":
            for loss in losses:
                acc.backward(loss(model))
            acc.step(optimizer)
        else:
            for loss in losses:
                scaler.scale(loss(model)).backward()
                acc.accumulate()
            acc.finalize(optimizer)
            scaler.step(optimizer)
            scaler.update()
            acc.zero_()
        skipped = stock.window(losses)
        skips += skipped
        assert acc.step_was_skipped == skipped
        assert_same_scaler(scaler, stock.scaler)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            if form == "step" and fused:
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(p, q)
    assert 10 < skips < 50


def test_real_fp16_autocast_follows_stock():
    """Under fp16 autocast the scale climbs until real gradients overflow, window by window as in the stock loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    twin = copy.deepcopy(model)
    kwargs = {"init_scale": 2.0**14, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", **kwargs)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.01)
    stock = StockLoop(twin, lambda params: torch.optim.SGD(params, lr=0.01), **kwargs)

    def loss(m, seed):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", dtype=torch.float16):
            return mse_loss(m(x).float(), x * 3)

    skips = 0
    for window in range(100):
        seeds = [2 * window, 2 * window + 1]
        for seed in seeds:
            acc.backward(loss(model, seed))
        acc.step(optimizer)
        skipped = stock.window([lambda m, s=s: loss(m, s) for s in seeds])
        skips += skipped
        assert acc.step_was_skipped == skipped
        assert_same_scaler(scaler, stock.scaler)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
    assert skips >= 5


@pytest.mark.parametrize("where", ["first", "last"])
def test_overflow_in_one_element_skips(where):
    """One inf in the first or last element of any parameter skips the step, and the report names the parameter."""
    model = mlp()
    x, y = batch(3)
    for bad, (name, target) in enumerate(model.named_parameters()):
        with ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu")) as acc:
            optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
            before = [p.detach().clone() for p in model.parameters()]
            acc.backward(mse_loss(model(x), y))
            acc.engine.options.scaler.scale(mse_loss(model(x), y)).backward()
            target.grad.view(-1)[0 if where == "first" else -1] = float("inf" if bad % 2 else "nan")
            acc.accumulate()
            acc.backward(mse_loss(model(x), y))
            assert acc.found_inf.item() == 1.0
            assert acc.overflow_report() == [name]
            acc.step(optimizer)
            assert acc.step_was_skipped
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert acc.found_inf.item() == 0.0


def test_loss_scale_may_change_inside_a_window():
    """Each micro-batch is unscaled by the scale it was made with."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(4)
    for i, scale in enumerate((2.0, 3.0, 1000.0, 0.5)):
        scaler.scale(torch.zeros(()))  # makes the scale exist before the first update
        scaler.update(scale)
        acc.backward(mse_loss(model(x[i : i + 1]), y[i : i + 1]))
    acc.finalize(optimizer)
    twin = copy.deepcopy(model).double()
    mse_loss(twin(x.double()), y.double()).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_scaler_overflow_skips_too(fused):
    """bf16 users have no scaler; a NaN gradient does not reach their parameters."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=fused)
    acc.backward(mse_loss(model(x), y) * float("nan"))
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    assert not acc.step_was_skipped
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_fused_sgd_keeps_a_clean_momentum_when_its_first_step_is_skipped():
    """Torch would leave the momentum buffer uninitialised; here the optimizer sees no gradient at all."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(3)
    for form in ("step", "long"):
        with ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu")) as acc:
            optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, momentum=0.9, fused=True)
            acc.backward(mse_loss(model(x), y) * float("inf"))
            if form == "step":
                acc.step(optimizer)
            else:
                acc.finalize(optimizer)
                assert all(p.grad is None for p in model.parameters())
                acc.engine.options.scaler.step(optimizer)
                acc.engine.options.scaler.update()
                acc.zero_()
            assert acc.step_was_skipped
            assert not any("momentum_buffer" in state for state in optimizer.state.values())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_disabled_scaler_is_none():
    """A disabled GradScaler changes nothing."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    acc.backward(mse_loss(model(x), y))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert torch.isfinite(model[0].weight.grad).all()


def test_16_bit_mean_that_rounds_to_infinity_is_an_overflow():
    """A finite fp32 sum of fp16 gradients whose mean is over 65504 skips the step and backs the scale off."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    acc = ak.FusedAccumulator([p], scaler=scaler)
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(torch.zeros(()))
    p.grad = torch.full_like(p, 60000.0)
    acc.accumulate(weight=2)
    acc.finalize(optimizer, divisor=1.0)
    assert acc.found_inf.item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    assert torch.equal(p, torch.zeros_like(p))


def test_scaler_found_inf_is_not_ours():
    """GradScaler.update adds found_inf in place across optimizers; the accumulator's own value must not change."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2, 4)]
    acc.backward(mse_loss(model(x), y) * float("inf"))
    acc.finalize(*optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert acc.found_inf.item() == 1.0
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_unscale_inside_a_window(call):
    """scaler.unscale_ before clipping, as stock loops do it, would unscale twice: refused."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    if call == "accumulate":
        scaler.scale(mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"scaler.unscale_\(optimizer\) was called inside a window"):
        acc.accumulate() if call == "accumulate" else acc.step(optimizer)
    acc.zero_()  # as the message says, and the next window is as ever
    acc.discard()
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    assert not acc.step_was_skipped
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_window_without_weight_is_none_to_the_scaler(fused):
    """Between two clean ones after which the scale grows: neither scale nor growth tracker move."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), fused=fused)
    seen = []
    for weight in (1, 0, 0, 1, 0):
        acc.backward(mse_loss(model(x), y), weight)
        acc.step(optimizer)
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(8, 1), (8, 1), (8, 1), (16, 0), (16, 0)]


def test_scaler_that_never_scaled():
    """A bare loss.backward() with a scaler would be unscaled wrongly: refused."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu"))
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match="has never scaled a loss"):
        acc.accumulate()


def test_scaler_of_another_device():
    """A scaler for another device type is refused when it is enabled."""
    scaler = torch.amp.GradScaler("cpu")
    scaler._device = "cuda"
    ak.FusedAccumulator(Adapted("meta"), scaler=torch.amp.GradScaler("cpu"))  # what is frozen may be anywhere
    with pytest.raises(ValueError, match="scaler is for 'cuda', but '0.weight' is on cpu"):
        ak.FusedAccumulator(mlp(), scaler=scaler)


class CountsSteps(torch.amp.GradScaler):
    """As users override it: to log, or to leave out steps of their own choice."""

    steps = 0

    def step(self, optimizer, *args, **kwargs):
        self.steps += 1
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("how", ["subclass", "instance"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_with_a_step_of_its_own(fused, how):
    """It is called once per window, of fused optimizers too, which else are stepped past it."""
    model = mlp()
    x, y = batch(3)
    if how == "subclass":
        scaler = CountsSteps("cpu")
    else:
        scaler = torch.amp.GradScaler("cpu")
        scaler.step = unittest.mock.Mock(wraps=scaler.step)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), fused=fused)
    for windows in (1, 2):
        acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
        assert (scaler.steps if how == "subclass" else scaler.step.call_count) == windows
    assert scaler._get_growth_tracker() == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_a_window_known_to_be_good_is_stepped_as_without_a_scaler(scaled):
    """A fused optimizer takes found_inf back out of each of its counters of steps, which a 0 is not worth."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu", enabled=scaled))
    optimizer = torch.optim.AdamW(acc.parameters(), fused=True)
    for factor, steps in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        acc.backward(mse_loss(model(x), y) * factor)
        with Seen() as seen:
            acc.step(optimizer)
        assert acc.step_was_skipped == (factor != 1)
        assert ("_foreach_sub_" in seen.names) == acc.step_was_skipped
        assert {int(state["step"]) for state in optimizer.state.values()} == {steps}
        assert not hasattr(optimizer, "found_inf")
        assert not hasattr(optimizer, "grad_scale")


def test_what_a_trainer_divides_by_may_change():
    """From one micro-batch to the next, as another number or inside a tensor."""
    tensor = torch.tensor(8.0)
    for divided_by, expected in ((2, 0.5), (4, 0.25), (tensor, 0.125), (None, None), (2, 0.5)):
        found = loss_scale(None, MicroBatch(1.0, 1, divided_by=divided_by))
        assert (found if found is None else found.item()) == expected


def test_a_scaler_that_steps_by_itself_skips_an_overflow():
    """Its `step` calls the optimizer's and never torch's, which would set found_inf."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu")
    scaler.step = lambda optimizer: optimizer.step()
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), fused=True)
    for factor in (1.0, float("inf"), 1.0):
        before = [p.detach().clone() for p in model.parameters()]
        acc.backward(mse_loss(model(x), y) * factor)
        acc.step(optimizer)
        same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert all(same) if factor != 1 else not any(same)
