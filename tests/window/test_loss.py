"""The loss of a window: the weighted mean over the micro-batches that were used."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.window.state import WindowLoss
from tests.support.models import batch, mlp


def test_equals_the_big_batch():
    """Unequal weights, as numbers and on the device, in both forms."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    x, y = batch(9, torch.float64)
    for long_form in (False, True):
        for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
            loss = mse_loss(model(x[rows]), y[rows])
            weight = torch.tensor(len(x[rows])) if rows.start == 2 else len(x[rows])
            if long_form:
                loss.backward()
                acc.accumulate(weight, loss=loss)
                loss.detach().zero_()  # what a loop does with its loss afterwards is its own business
            else:
                acc.backward(loss, weight)
        acc.step(optimizer)
        assert acc.metrics()["loss"].item() == pytest.approx(mse_loss(model(x), y).item(), rel=1e-14)


@pytest.mark.parametrize("overflow", ["microbatch", "raise"])
def test_dropped_micro_batches_do_not_count(overflow):
    """Neither their loss, which is NaN, nor their weight."""
    model = mlp()
    acc = ak.FusedAccumulator(model, overflow=overflow)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(4)
    good = mse_loss(model(x), y)
    expected = good.item()
    acc.backward(good, 3)
    bad = mse_loss(model(x) * torch.nan, y)
    if overflow == "raise":
        with pytest.raises(FloatingPointError):
            acc.backward(bad, 5)
    else:
        acc.backward(bad, 5)
    acc.step(optimizer)
    assert acc.metrics()["loss"].item() == pytest.approx(expected, rel=1e-7)


def test_absent_where_no_loss_is_known():
    """A long form that gives none, and an empty window; gradients of a vector are no loss."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(4)
    mse_loss(model(x), y).backward()
    acc.accumulate()
    acc.step(optimizer)
    assert "loss" not in acc.metrics()
    out = model(x)
    acc.backward(out, gradient=torch.ones_like(out))
    acc.step(optimizer)
    assert "loss" not in acc.metrics()


def test_a_loss_that_changes_later():
    """One of a class of its own is kept as it was, too, when a loop goes on with its memory."""

    class Loss(torch.Tensor):
        pass

    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model)
    x, y = batch(3, torch.float64)
    loss = mse_loss(model(x), y)
    loss.backward()
    kept = loss.detach().as_subclass(Loss)
    acc.accumulate(loss=kept)
    kept.zero_()
    acc.finalize()
    assert acc.metrics()["loss"].item() == mse_loss(model(x), y).item()


def test_saved_after_the_last_micro_batch():
    """A resumed window that takes none has the loss of before."""
    model = mlp(torch.float64)
    x, y = batch(3, torch.float64)
    with ak.FusedAccumulator(model) as acc:
        acc.backward(mse_loss(model(x), y), 3)
        saved = acc.state_dict()
    acc = ak.FusedAccumulator(model)
    acc.load_state_dict(saved)
    acc.finalize()
    assert acc.metrics()["loss"].item() == pytest.approx(mse_loss(model(x), y).item(), rel=1e-14)


def test_saved_inside_a_window():
    """A resumed window has the losses of before."""
    model = mlp(torch.float64)
    x, y = batch(9, torch.float64)
    saved = None
    for resumes in (False, True):
        acc = ak.FusedAccumulator(model)
        if resumes:
            acc.load_state_dict(saved)
        else:
            acc.backward(mse_loss(model(x[:3]), y[:3]), 3)
            saved = acc.state_dict()
        acc.backward(mse_loss(model(x[3:]), y[3:]), 6)
        acc.finalize()
        assert acc.metrics()["loss"].item() == pytest.approx(mse_loss(model(x), y).item(), rel=1e-14)
        acc.zero_()
        acc.remove()


def test_losses_of_dropped_gradients_take_no_others_along():
    """Those that FSDP2 kept and never gave; a bad micro-batch after them drops its own loss alone."""
    losses = WindowLoss()
    losses.add(torch.tensor(1.0), 1.0)
    losses.add(torch.tensor(5.0), 1.0, unsynced=True)
    losses.drop_unsynced()
    losses.add(torch.tensor(7.0), 1.0, torch.ones(1, dtype=torch.float64))
    sums = losses.sums()
    assert sums is not None and sums.tolist() == [1.0, 1.0]
