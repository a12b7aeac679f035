"""Data parallel windows that overflow, fail, are empty or end out of order, and what is refused."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.models import batch, mlp
from tests.support.rank_scenarios import MAX_NORM, WINDOWS, adamw, micro_batches, sgd
from tests.support.ranks import message, parameters


def overflow(rank, size):
    """The last micro-batch of rank 0 in the first window is not finite."""
    found = {}
    for mode, (with_scaler, make_optimizer) in itertools.product(
        (None, "window", "microbatch", "raise"), ((False, adamw), (False, sgd), (True, adamw))
    ):
        if mode is None and with_scaler:
            continue
        model = mlp(torch.float64)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if with_scaler else None
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, overflow=mode, scaler=scaler)
        optimizer = make_optimizer(acc.parameters())
        raised, skipped, seen = 0, [], []
        for window in range(WINDOWS):
            for x, y in micro_batches(window, rank, torch.float64) + [(None, None)] * (window == 0):
                if x is None:
                    if rank != 0:
                        continue
                    x, y = batch(2, torch.float64)
                    x[0, 0] = math.inf
                try:
                    acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
                except FloatingPointError:
                    raised += 1
            before = parameters(model)
            acc.finalize(optimizer)
            seen.append(acc.found_inf.item())
            acc.clip_grad_norm_(MAX_NORM)
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif not acc.step_was_skipped:
                optimizer.step()
            skipped.append((acc.step_was_skipped, all(map(torch.equal, before, parameters(model)))))
            acc.zero_()
        scale = None if scaler is None else scaler.get_scale()
        found[mode, with_scaler, make_optimizer.__name__] = parameters(model), raised, skipped, seen, scale
    return found


def overflow_in_step(rank, size):
    """As before by `step`, in the modes that skip; then also where only the sum over ranks overflows."""
    found = {}
    for make_optimizer in (adamw, sgd):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, scaler=scaler)
        optimizer = make_optimizer(acc.parameters())
        skipped = []
        for value in (1.0, math.nan if rank == size - 1 else 1.0, 3e38, 1.0):
            before = parameters(model)
            # The gradient of the last bias is `value`: 3e38 is finite on each rank.
            acc.backward((model(torch.zeros(1, 5)).sum() - model[4].bias.sum().detach()) * 0 + model[4].bias[0] * value)
            acc.step(optimizer)
            skipped.append((acc.step_was_skipped, all(map(torch.equal, before, parameters(model)))))
        found[make_optimizer.__name__] = skipped, scaler.get_scale()
    return found


def empty(rank, size):
    """A window that is empty on all ranks, in every form."""
    found = {}
    for release, make_optimizer in itertools.product(("microbatch", "backward"), (adamw, sgd)):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, release=release, scaler=scaler)
        optimizer = make_optimizer(acc.parameters())
        skipped = []
        for window in range(4):
            if window % 2:  # clean ones: after the second the scale grows
                acc.backward(model(torch.ones(1, 5)).sum())
            elif rank == 0 and window == 2:
                acc.backward(model(torch.ones(1, 5)).sum(), weight=0)
            norm = acc.step(optimizer, max_norm=1.0)
            skipped.append((acc.step_was_skipped, norm.item() == 0))
        found[release, make_optimizer.__name__] = skipped, scaler.get_scale(), bool(optimizer.state)
    return found


class Fails(torch.autograd.Function):
    """Raises in backward, in the middle of the model."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("planted")


def failures(rank, size):
    """Rank 0's second micro-batch raises in backward, or rank 0 drops the window; windows around it are clean."""
    found = {}
    for release, how in itertools.product(("microbatch", "backward"), ("exception", "window", "last")):
        if (release, how) == ("microbatch", "last"):
            continue
        model = mlp(torch.float64)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        acc = ak.FusedAccumulator(
            model, process_group=torch.distributed.group.WORLD, release=release, bucket_bytes=8, scaler=scaler
        )
        optimizer = sgd(acc.parameters())
        skipped, messages = [], []
        for window in range(WINDOWS):
            for i, (x, y) in enumerate(micro_batches(window, rank, torch.float64)):
                if window == 1 and rank == 0 and i == 1:
                    if how == "window":
                        acc.discard(window=True)
                    else:
                        hidden = Fails.apply(model[:2](x))
                        loss = nn.functional.mse_loss(model[2:](hidden), y)
                        messages.append(message(acc.backward, loss, len(x), last=how == "last"))
                        if release == "backward":
                            messages.append(message(acc.finalize, optimizer))
                        if how == "last":
                            messages.append(message(acc.zero_))
                            messages.append(message(acc.state_dict))
                        acc.discard()
                    continue
                acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
            acc.step(optimizer, max_norm=MAX_NORM)
            skipped.append(acc.step_was_skipped)
        found[release, how] = parameters(model), skipped, scaler.get_scale(), messages
    return found


def last_is_last(rank, size):
    """What is refused after last=True, and that a step opens a window that takes gradients."""
    model = mlp()
    group = torch.distributed.group.WORLD
    acc = ak.FusedAccumulator(model, process_group=group, release="backward", bucket_bytes=64)
    optimizer = sgd(acc.parameters())
    found = []
    for _ in range(2):
        acc.backward(model(torch.ones(2, 5)).sum())
        acc.backward(model(torch.ones(2, 5)).sum(), last=True)
        found.append(message(acc.backward, model(torch.ones(2, 5)).sum()))
        found.append(message(acc.accumulate))
        found.append(message(acc.state_dict))
        found.append(message(acc.zero_))
        acc.step(optimizer)
    found.append(message(lambda: model(torch.ones(2, 5)).sum().backward()))
    acc.accumulate(last=True)
    found.append(message(lambda: model(torch.ones(2, 5)).sum().backward()))  # a loop that does not ask
    acc.discard()
    acc.step(optimizer)
    dropped = acc.step_was_skipped
    acc.remove()
    microbatch = ak.FusedAccumulator(model, process_group=group, release="microbatch")
    found.append(message(microbatch.backward, model(torch.ones(2, 5)).sum(), last=True))
    return found, dropped, acc.__repr__()


def errors(rank, size):
    """By name, what wrong use raises."""
    group = torch.distributed.group.WORLD
    ddp = DistributedDataParallel(mlp())
    other = torch.distributed.new_group(list(range(size)))
    part = torch.distributed.new_group([0])
    build = functools.partial(message, ak.FusedAccumulator)
    found = {
        "nothing said": build(mlp()),
        "kind": build(mlp(), process_group="gloo"),
        "alone": build(ddp, process_group=False),
        "other group": build(ddp, process_group=other),
        "wrapped": build(ddp.parameters(), process_group=group),
        "inside": build(nn.Sequential(ddp), process_group=group),
        "alike": build(nn.Linear(2, 2 if rank == 0 else 3), process_group=group),
        "options": build(mlp(), process_group=group, overflow=None if rank == 0 else "window"),
    }
    if rank > 0:
        found["member"] = build(mlp(), process_group=part)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    found["hook"] = build(ddp)
    ignoring = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    found["ignored"] = build(DistributedDataParallel(ignoring))
    model = mlp()
    acc = ak.FusedAccumulator(model, process_group=group)
    optimizer = sgd(acc.parameters())
    acc.backward(model(torch.ones(2, 5)).sum())
    found["divisor"] = message(acc.step, optimizer, divisor=rank + 1)
    found["after"] = message(acc.step, optimizer)
    for name, limit in (("clipping", 1.5 if rank == 0 else None), ("limit", rank + 1)):
        acc.zero_()
        acc.backward(model(torch.ones(2, 5)).sum())
        found[name] = message(acc.step, optimizer, max_norm=limit)
    acc.zero_()
    acc.backward(model(torch.ones(2, 5)).sum())
    acc.step(optimizer)  # all ranks are in step again
    model[0].requires_grad_(False)
    frozen = mlp()
    frozen[0].requires_grad_(False)
    acc = ak.FusedAccumulator(frozen, process_group=group)
    if rank == 0:
        frozen[0].requires_grad_(True)
    acc.backward(frozen(torch.ones(2, 5)).sum())
    found["unfrozen"] = message(acc.step, sgd(acc.parameters()))
    return found


def removed(rank, size):
    """After `remove` a DistributedDataParallel module communicates as ever."""
    model = DistributedDataParallel(mlp())
    with ak.FusedAccumulator(model) as acc:
        flags = model.require_backward_grad_sync, model.require_forward_param_sync
        model(torch.ones(1, 5)).sum().backward()
        acc.discard()
    model.zero_grad()
    model(torch.full((1, 5), float(rank))).sum().backward()
    return flags, [p.grad.clone() for p in model.parameters()], len(model._forward_pre_hooks)
