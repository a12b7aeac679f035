"""What tests/ranks/test_fsdp2.py runs on every rank: micro-batches and windows that are dropped, or kept by FSDP2."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.fsdp2_scenarios import (
    UNEQUAL,
    assert_close,
    data,
    full,
    micro_batches,
    net,
    run_window,
    shard,
    true_grads,
    window,
)


def poisoned(model, acc, steps, rank, weight=2) -> None:
    """Three micro-batches; in those of `steps` one element of a shard of `rank` alone becomes inf."""
    for step, (x, y) in enumerate(micro_batches(dist.get_rank(), [weight] * 3)):
        loss = mse_loss(model(x), y)
        (loss if (scaler := acc.engine.options.scaler) is None else scaler.scale(loss)).backward()
        if step in steps and dist.get_rank() == rank:
            model.middle.weight.grad.to_local()[0, 0] = math.inf
        acc.accumulate(weight)


def overflow_on_one_rank_skips_on_all(rank, size):
    """The window's step, and the same scale afterwards, with fused and plain optimizers."""
    for fused in (False, True):
        model = shard(net())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        acc = ak.FusedAccumulator(model, scaler=scaler)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=fused)
        before = full(model.parameters())
        poisoned(model, acc, {1}, rank=1)
        norm = acc.step(optimizer, max_norm=1.0)
        assert not torch.isfinite(norm)
        assert acc.step_was_skipped
        assert scaler.get_scale() == 2.0**9
        assert acc.overflow_report() == (["middle.weight"] if dist.get_rank() == 1 else [])
        assert_close(full(model.parameters()), before)
        for _ in range(2):
            poisoned(model, acc, {}, rank=1)
            acc.step(optimizer)
        assert not acc.step_was_skipped
        assert scaler.get_scale() == 2.0**10
        assert not torch.equal(full(model.parameters())[0], before[0])


def overflow_drops_a_micro_batch_on_all(rank, size):
    """overflow="microbatch": the mean over the others, whichever rank saw it; the scale backs off on all."""
    batches = window([2] * 3)
    expected = true_grads([batches[0], batches[2]])
    for rank in range(2):
        model = shard(net())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        acc = ak.FusedAccumulator(model, scaler=scaler, overflow="microbatch")
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        poisoned(model, acc, {1}, rank)
        assert acc.weight == 4
        assert acc.found_inf == 1
        acc.finalize(optimizer)
        assert_close(full(p.grad for p in model.parameters()), expected)
        scaler.step(optimizer)
        scaler.update()
        acc.zero_()
        assert scaler.get_scale() == 2.0**9
        assert not acc.step_was_skipped


def overflow_raises_on_all(rank, size):
    """overflow="raise": where the shards were finite the error says that it was another rank."""
    model = shard(net())
    acc = ak.FusedAccumulator(model, overflow="raise")
    where = "gradients of middle.weight" if dist.get_rank() == 1 else "gradients on another rank"
    with pytest.raises(FloatingPointError, match=where):
        poisoned(model, acc, {1}, rank=1)
    assert acc.micro_batches == 1
    assert all(p.grad is None for p in model.parameters())


def rounding_overflows_on_one_rank(rank, size):
    """A mean that fits fp32 and not fp16, in a shard of one rank: no rank steps."""
    model = shard(net(torch.float16))
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    before = full(model.parameters())
    x, y = data(2, dist.get_rank(), torch.float16)
    mse_loss(model(x), y).backward()
    acc.accumulate(1)
    if dist.get_rank() == 0:
        acc.main_grad(model.first.weight)[0, 0] = 1e6
    acc.step(optimizer)
    assert acc.step_was_skipped
    assert_close(full(model.parameters()), before)


# ---- gradients that FSDP2 keeps


def without_gradient_sync(rank, size):
    """Only the last micro-batch is reduced, by FSDP2; equal weights give the mean over all, in every mode."""
    expected = true_grads(window([2] * 3))
    for kwargs in ({}, {"release": "backward"}, {"overflow": "microbatch"}, {"overflow": "raise"}):
        for weight in (2, 0.1):
            model = shard(net())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            acc = ak.FusedAccumulator(model, scaler=scaler, **kwargs)
            optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
            for step, (x, y) in enumerate(micro_batches(dist.get_rank(), [2] * 3)):
                model.set_requires_gradient_sync(step == 2)
                acc.backward(mse_loss(model(x), y), weight)
            assert acc.micro_batches == 3
            assert_close([acc.weight], [torch.tensor(3.0 * weight, dtype=torch.float64)])
            acc.finalize(optimizer)
            assert_close(full(p.grad for p in model.parameters()), expected)
            acc.zero_()


def without_gradient_sync_twice_per_window(rank, size):
    """Runs of kept micro-batches may have weights of their own; one that overflows is dropped as a whole."""
    batches = window([2] * 3)
    for bad in (False, True):
        model = shard(net())
        acc = ak.FusedAccumulator(model, overflow="microbatch")
        for step, (x, y) in enumerate(micro_batches(dist.get_rank(), [2] * 3)):
            model.set_requires_gradient_sync(step != 0)
            mse_loss(model(x), y).backward()
            if bad and step == 1 and dist.get_rank() == 0:
                model.first.bias.grad.to_local()[0] = math.nan
            acc.accumulate(4 if step == 2 else 1)
        acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
        weights = [0, 0, 4] if bad else [1, 1, 4]
        parts = [true_grads([part]) for part in batches]
        expected = [
            sum(w * g for w, g in zip(weights, gs, strict=True)) / sum(weights) for gs in zip(*parts, strict=True)
        ]
        assert_close(full(p.grad for p in model.parameters()), expected)


def what_goes_wrong_without_gradient_sync(rank, size):
    """Unequal weights of a loop of its own, and windows or checkpoints without the last reduction."""
    model = shard(net())
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = data(2, 0)
    model.set_requires_gradient_sync(False)
    acc.backward(mse_loss(model(x), y), 2)
    for call in (lambda: acc.step(optimizer), lambda: acc.finalize(optimizer), acc.state_dict):
        with pytest.raises(
            RuntimeError, match=r"the last 1 micro-batches left no gradient.*set_requires_gradient_sync"
        ):
            call()
    model.set_requires_gradient_sync(True)
    acc.backward(mse_loss(model(x), y), 2)
    acc.finalize(optimizer)
    assert acc.micro_batches == 2
    assert_close(full(p.grad for p in model.parameters()), true_grads([(x, y)]))
    acc.zero_()
    for weight, sync in ((2, False), (3, True)):
        model.set_requires_gradient_sync(sync)
        mse_loss(model(x), y).backward()
        if sync:
            with pytest.raises(
                RuntimeError, match=r"weight=3\.0\) after 1 micro-batches .* by 2\.0, whose gradients FSDP2"
            ):
                acc.accumulate(weight)
        else:
            acc.accumulate(weight)


# ---- the loss of a window


def loss_of_a_window(rank, size):
    """The mean over all samples; without micro-batches dropped by all for one, or kept before."""
    for overflow, sync, unit in itertools.product(("window", "microbatch", "raise"), (True, False), (1, 0.1)):
        model = shard(net())
        acc = ak.FusedAccumulator(model, overflow=overflow)
        used = []
        for step in range(4):
            model.set_requires_gradient_sync(sync or step % 2 == 1)
            bad = overflow != "window" and step == 1
            x, y = micro_batches(rank, UNEQUAL[rank] + [2])[step]
            loss = mse_loss(model(x), y) * (math.nan if bad and rank == 1 else 1)
            with pytest.raises(FloatingPointError) if bad and overflow == "raise" else contextlib.nullcontext():
                acc.backward(loss, unit * len(x))
            used += [micro_batches(r, UNEQUAL[r] + [2])[step] for r in range(size)]
            if bad:
                used = used[: 0 if not sync else size]
        acc.finalize()
        x, y = (torch.cat(tensors) for tensors in zip(*used, strict=True))
        assert acc.metrics()["loss"].item() == pytest.approx(mse_loss(net()(x), y).item(), rel=1e-12)
        assert_close(full(p.grad for p in model.parameters()), true_grads(used))


def one_rank_drops_the_window(rank, size):
    """discard(window=True) on one rank: no rank steps, and all keep the loss scale and its growth tracker."""
    model = shard(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1)
    before = full(model.parameters())
    for _ in range(2):
        run_window(acc, model)
        if rank == 1:
            acc.discard(window=True)
        acc.step(optimizer)
        assert acc.step_was_skipped
        assert scaler.state_dict()["_growth_tracker"] == 0
        assert_close(full(model.parameters()), before)
    run_window(acc, model)
    acc.step(optimizer)
    assert scaler.state_dict()["_growth_tracker"] == 1


def what_a_backward_that_raised_leaves(rank, size):
    """FSDP2 reduces no more after it, in a stock loop either: the error says what to do."""
    model, stock = net(), net()
    for of in (model, stock):
        fully_shard(of.first)
        fully_shard(of)
    acc = ak.FusedAccumulator(model)
    x, y = data(2, 0)
    for of, backward in ((model, acc.backward), (stock, torch.Tensor.backward)):
        out = of(x)
        out.register_hook(_raise)
        with pytest.raises(ArithmeticError):
            backward(out.sum())
        of.reshard()
    acc.discard()
    for p in stock.parameters():
        p.grad = None
    mse_loss(stock(x), y).backward()
    assert not any(isinstance(p.grad, DTensor) for p in stock.parameters())
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"a backward has raised before.*build the model anew"):
        acc.finalize()


def _raise(grad):
    raise ArithmeticError


TWO_RANKS = [
    what_a_backward_that_raised_leaves,
    overflow_on_one_rank_skips_on_all,
    overflow_drops_a_micro_batch_on_all,
    overflow_raises_on_all,
    rounding_overflows_on_one_rank,
    without_gradient_sync,
    without_gradient_sync_twice_per_window,
    what_goes_wrong_without_gradient_sync,
    loss_of_a_window,
    one_rank_drops_the_window,
]
