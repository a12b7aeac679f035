"""What docs/swapping.md says of pitfalls, of stock torch too; tests/docs/test_pages.py runs its code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, big_batch_grads, mlp, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")


def accumulate(model, x, y, steps, divide):
    """Gradients of a window whose losses are divided."""
    acc = ak.FusedAccumulator(model)
    for xs, ys in zip(x.chunk(steps), y.chunk(steps), strict=True):
        acc.backward(mse_loss(model(xs), ys) / divide)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    return [p.grad for p in model.parameters()]


def test_loss_divided_by_the_number_of_steps():
    """Left in place, it divides the gradient once more; without it, the gradient is the big batch's."""
    x, y = batch(8)
    expected = big_batch_grads(mlp(), x, y)
    assert relative_error(accumulate(mlp(), x, y, 4, 1), expected) < 1e-6
    assert relative_error(accumulate(mlp(), x, y, 4, 4), [g / 4 for g in expected]) < 1e-6


@pytest.mark.parametrize("steps", [2, 8])
def test_loss_added_to_itself_in_stock_torch(steps):
    """`loss += loss / accumulation_steps` with .grad: the sum is K + 1 times the mean, whatever K."""
    model = mlp()
    x, y = batch(8)
    for xs, ys in zip(x.chunk(steps), y.chunk(steps), strict=True):
        loss = mse_loss(model(xs), ys)
        loss = loss + loss / steps
        loss.backward()
    expected = [(steps + 1) * g for g in big_batch_grads(model, x, y)]
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-6


def test_unscale_says_what_to_delete():
    """In a window, in either order with accumulate; and the loop goes on with the next window."""
    for first in ("unscale", "accumulate"):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu")
        acc = ak.FusedAccumulator(model, scaler=scaler)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        x, y = batch(3)
        scaler.scale(mse_loss(model(x), y)).backward()
        if first == "accumulate":
            acc.accumulate()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_\(optimizer\) was called inside a window: delete that line"):
            acc.accumulate() if first == "unscale" else acc.step(optimizer, max_norm=1.0)
        acc.zero_()
        acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
        assert not acc.step_was_skipped


class Fp16Overflow(torch.autograd.Function):
    """Identity, whose gradient passes through fp16 as under autocast."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.half().float()


def scales(divided, init_scale, steps, windows=30):
    """The scale after each window: stock torch with loss / K, or ours with the undivided loss."""
    weight = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    acc = None if divided else ak.FusedAccumulator([weight], scaler=scaler)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    history = []
    for _ in range(windows):
        for _ in range(steps):
            loss = (Fp16Overflow.apply(weight) * 3).sum()
            if divided:
                scaler.scale(loss / steps).backward()
            else:
                acc.backward(loss)
        if divided:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            acc.step(optimizer)
        history.append(scaler.get_scale())
    return history


@pytest.mark.parametrize("steps", [2, 8])
def test_scale_settles_lower(steps):
    """By K, window for window, when both start alike: init_scale / K here, init_scale in the stock loop."""
    stock, ours = scales(True, 2.0**17, steps), scales(False, 2.0**17 / steps, steps)
    assert ours == [scale / steps for scale in stock]
    assert any(later < earlier for earlier, later in itertools.pairwise(stock))  # it did have to back off
    assert scales(False, 2.0**17, steps) != stock
