"""acc.metrics(), and what a profile shows of us."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

import accumkernels as ak
from tests.support.models import batch, mlp

INF = float("inf")


def values(acc):
    """As a logger takes them."""
    return {name: float(value) for name, value in acc.metrics().items()}


def run_window(acc, model, optimizer, factors=(1.0, 1.0), max_norm=1.0, weights=(2, 3)):
    """One window, its loss multiplied by a factor per micro-batch. Returns the norm."""
    x, y = batch(4)
    for factor, weight in zip(factors, weights, strict=True):
        acc.backward(mse_loss(model(x), y) * factor, weight=weight)
    return acc.step(optimizer, max_norm=max_norm)


def setup(**kwargs):
    """A model, its accumulator and optimizer."""
    model = mlp()
    acc = ak.FusedAccumulator(model, **kwargs)
    return model, acc, torch.optim.AdamW(acc.parameters(), lr=0.01)


def test_of_the_last_window():
    """What was put in and what came out; the window that is open does not show."""
    model, acc, optimizer = setup()
    assert values(acc) == {"windows": 0, "windows_skipped": 0}
    x, y = batch(4)
    expected = mse_loss(model(x), y)
    norm = run_window(acc, model, optimizer)
    acc.backward(mse_loss(model(x), y), weight=7)
    assert values(acc) == {
        "micro_batches": 2,
        "micro_batches_used": 2,
        "weight": 5,
        "loss": pytest.approx(expected.item(), rel=1e-6),  # fp32 losses of two micro-batches
        "grad_norm": norm.item(),
        "found_inf": 0,
        "step_skipped": 0,
        "windows": 1,
        "windows_skipped": 0,
    }


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_loss_of_one_element(shape):
    """In any shape it is a number."""
    model, acc, optimizer = setup()
    x, y = batch(4)
    expected = mse_loss(model(x), y).item()
    acc.backward(mse_loss(model(x), y).reshape(shape))
    acc.step(optimizer)
    assert values(acc)["loss"] == expected


def test_counts_skipped_windows():
    """For overflow and for emptiness; a step taken in spite of a dropped micro-batch is none."""
    model, acc, optimizer = setup(overflow="microbatch")
    for factors, skipped, used in (((1, 1), 0, 2), ((1, INF), 0, 1), ((INF, INF), 1, 0), ((1, 1), 1, 2)):
        run_window(acc, model, optimizer, factors)
        got = values(acc)
        assert (got["windows_skipped"], got["micro_batches_used"], got["micro_batches"]) == (skipped, used, 2)
        assert got["found_inf"] == (INF in factors)
        assert got["step_skipped"] == acc.step_was_skipped
    acc.step(optimizer, max_norm=1.0)
    got = values(acc)
    assert (got["windows"], got["windows_skipped"], got["micro_batches"], got["weight"]) == (5, 2, 0, 0)
    run_window(acc, model, optimizer, weights=(0, 0))
    assert values(acc)["windows_skipped"] == 3


def test_norm_only_where_one_was_computed():
    """A norm of an earlier window is none of this one's."""
    model, acc, optimizer = setup()
    run_window(acc, model, optimizer)
    assert "grad_norm" in acc.metrics()
    run_window(acc, model, optimizer, max_norm=None)
    assert "grad_norm" not in acc.metrics()


def test_long_form():
    """finalize ends the window, clip_grad_norm_ adds the norm."""
    model, acc, optimizer = setup()
    x, y = batch(4)
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    assert "grad_norm" not in acc.metrics()
    norm = acc.clip_grad_norm_(1.0)
    acc.zero_()
    assert values(acc)["grad_norm"] == norm.item()
    assert values(acc)["windows"] == 1


def test_loss_scale_and_noise_scale():
    """The scale as it is now, and the critical batch size where it is measured."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model, acc, optimizer = setup(scaler=scaler, noise_scale=True)
    assert "loss_scale" not in acc.metrics()
    assert math.isnan(values(acc)["noise_scale"])
    for seed in range(3):
        for step in range(3):
            x, y = batch(4, seed=10 * seed + step)
            acc.backward(mse_loss(model(x), y))
        acc.step(optimizer)
    assert values(acc)["noise_scale"] == pytest.approx(float(acc.noise_scale()), rel=1e-12)
    run_window(acc, model, optimizer, (1, INF))
    assert values(acc)["loss_scale"] == scaler.get_scale() == 32.0


def test_is_a_snapshot():
    """What was handed out does not change when training goes on."""
    model, acc, optimizer = setup(scaler=torch.amp.GradScaler("cpu", init_scale=64.0))
    run_window(acc, model, optimizer)
    before, now = acc.metrics(), values(acc)
    run_window(acc, model, optimizer, (INF, 1), weights=(4, 9))
    assert {name: float(value) for name, value in before.items()} == now


@pytest.mark.native
def test_ranges_in_a_profile():
    """What is ours has our name, in either form; the ops are below it."""
    model, acc, optimizer = setup()
    run_window(acc, model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run_window(acc, model, optimizer)
        acc.backward(mse_loss(model(batch(4)[0]), batch(4)[1]))
        acc.finalize(optimizer)
        acc.clip_grad_norm_(1.0)
    counts = {event.key: event.count for event in profiled.key_averages()}
    names = ("accumulate", "step", "finalize", "clip_grad_norm_", "accumulate_", "norm_")
    assert [counts[f"accumkernels::{name}"] for name in names] == [3, 1, 1, 1, 3, 2]
