"""The end of a window: divisor, norm and clipping, `.grad` as handed out, and windows that move nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import TwoHeads, batch, big_batch_grads, grads_of, mlp, relative_error

BACKENDS = ["native", "reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_parameters_keep_no_grad(backend):
    """A parameter without gradient in the window has .grad None, and weight decay and momentum leave it alone."""
    torch.manual_seed(0)
    model = TwoHeads()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, backend=backend)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=0.5)
    for head in ("a", "b", "a"):
        idle = model.b if head == "a" else model.a
        before = idle.weight.detach().clone()
        acc.backward(mse_loss(model(x, head), y))
        acc.backward(mse_loss(model(x, head), y))
        acc.finalize(optimizer)
        assert idle.weight.grad is None
        assert model.body.weight.grad is not None
        optimizer.step()
        acc.zero_()
        assert torch.equal(idle.weight, before)


def test_weight_given_as_tensor_and_divisor():
    """0-d tensors serve as weight and divisor; divisor replaces the sum of weights (sum-reduced losses)."""
    model = mlp()
    x, y = batch(7)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for rows in (slice(0, 2), slice(2, 7)):
        acc.backward(mse_loss(model(x[rows]), y[rows], reduction="sum"), weight=torch.tensor(1))
    acc.finalize(optimizer, divisor=torch.tensor(float(y.numel())))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_parameters_get_gradients_rounded_once(dtype):
    """The sum is kept in fp32; .grad is its mean rounded to the parameter's dtype."""
    p = nn.Parameter(torch.zeros(5, dtype=dtype))
    acc = ak.FusedAccumulator([p])
    grads = [torch.randn(5).to(dtype) for _ in range(9)]
    for g in grads:
        p.grad = g.clone()
        acc.accumulate()
    acc.finalize(torch.optim.SGD([p], lr=0.1))
    assert torch.equal(p.grad, (torch.stack(grads).float().sum(0) / 9).to(dtype))
    norm = acc.clip_grad_norm_(0.5)
    mean = torch.stack(grads).double().mean(0)
    torch.testing.assert_close(norm.double(), mean.norm(), rtol=1e-6, atol=0)
    torch.testing.assert_close(p.grad, (mean * 0.5 / (mean.norm() + 1e-6)).to(dtype), rtol=0.01, atol=0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clip_grad_norm_is_torchs(norm_type):
    """Norm before clipping and clipped gradients equal torch.nn.utils.clip_grad_norm_'s."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    mse_loss(twin(x), y).backward()
    norm = acc.clip_grad_norm_(0.01, norm_type)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert relative_error(grads_of(acc), [p.grad for p in twin.parameters()]) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_each_step_has_a_limit_of_its_own(fused):
    """A limit that changes from step to step, and nothing of a step is left at the optimizer."""
    model = mlp(torch.float64)
    twin = copy.deepcopy(model)
    x, y = batch(6, torch.float64)
    acc = ak.FusedAccumulator(model)
    ours, stock = (torch.optim.SGD(m.parameters(), lr=1.0, fused=fused) for m in (model, twin))
    before = set(vars(ours))
    for limit in (0.1, 0.01, 10.0):
        acc.backward(mse_loss(model(x), y))
        acc.step(ours, max_norm=limit)
        mse_loss(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), limit)
        stock.step()
        stock.zero_grad()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    assert set(vars(ours)) == before


def test_several_optimizers_over_one_accumulator():
    """Optimizers named together are stepped each by themselves."""
    model = mlp()
    twin = copy.deepcopy(model)
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2, 4)]
    acc.backward(mse_loss(model(x), y))
    acc.finalize(*optimizers)
    for optimizer in optimizers:
        optimizer.step()
    acc.zero_()
    mse_loss(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-6


def test_empty_window_is_a_no_op():
    """A step without micro-batches changes neither parameters nor scale, and says that it skipped."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=1.0)
    assert acc.step(optimizer) is None
    assert acc.step(optimizer, max_norm=1.0).item() == 0
    assert acc.step_was_skipped
    assert scaler.get_scale() == 8.0
    acc.finalize(optimizer)
    scaler.step(optimizer)
    scaler.update()
    acc.zero_()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [None, "window"])
def test_zero_total_weight_is_a_no_op(fused, overflow):
    """A window whose weights sum to zero moves nothing: not the parameters, the scale or the growth tracker."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(6)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)):
        with ak.FusedAccumulator(model, scaler=scaler, overflow=overflow) as acc:
            optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, weight_decay=1.0, fused=fused)
            acc.backward(mse_loss(model(x), y), weight=0)
            acc.step(optimizer)
            assert acc.step_was_skipped
            assert scaler is None or scaler.get_scale() == 8.0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_that_raises_leaves_averages(monkeypatch):
    """What goes on by hand finds the gradients that `finalize` promises, though optimizers were to divide sums."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    params = list(acc.parameters())
    first, second = (torch.optim.AdamW(some, fused=True) for some in (params[:2], params[2:]))
    x, y = batch(6)
    expected = torch.autograd.grad(mse_loss(model(x), y), params)
    for _ in range(2):
        acc.backward(mse_loss(model(x), y), weight=6)
    monkeypatch.setattr(second, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        acc.step(first, second)
    for p, grad in zip(params, expected, strict=True):
        assert torch.allclose(p.grad, grad, rtol=1e-6, atol=1e-8)


def test_update_by_hand_needs_no_optimizer():
    """finalize() alone hands out the mean of the window, and step_was_skipped says whether to use it."""
    model = mlp(torch.float64)
    params = list(model.parameters())
    acc = ak.FusedAccumulator(model)
    x, y = batch(6, torch.float64)
    expected = [p - 0.1 * g for p, g in zip(params, big_batch_grads(model, x, y), strict=True)]
    for rows in (slice(0, 2), slice(2, 6)):
        acc.backward(mse_loss(model(x[rows]), y[rows]), weight=len(x[rows]))
    acc.finalize()
    assert not acc.step_was_skipped
    with torch.no_grad():
        torch._foreach_add_(params, grads_of(acc), alpha=-0.1)
    acc.zero_()
    for p, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-12, atol=1e-12)  # fp64 rounding

    acc.backward(mse_loss(model(x), y) * torch.nan)
    acc.finalize()
    assert acc.step_was_skipped


def test_update_by_hand_with_a_scaler_is_refused():
    """The scaler would never learn of an overflow; a disabled one does not matter."""
    model = mlp()
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu"))
    acc.backward(model(torch.ones(1, 5)).sum())
    with pytest.raises(TypeError, match=r"finalize\(\) needs the optimizers.*GradScaler keeps the verdict"):
        acc.finalize()
    acc.remove()
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    acc.backward(model(torch.ones(1, 5)).sum())
    acc.finalize()
