"""Data parallel windows of other precisions, of modules with buffers, and with weights taken inside modules."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.capture import graph
from accumkernels.ranks import sender
from tests.support.frozen import KINDS, NOT_SENT, Adapted, trainable
from tests.support.models import mlp
from tests.support.rank_scenarios import MAX_NORM, WINDOWS, adamw, micro_batches, sgd
from tests.support.ranks import parameters


class Normed(nn.Module):
    """With BatchNorm, and a buffer of integers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("seed", torch.tensor([seed, seed == 0]))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def module_buffers(rank, size):
    """Copies at construction, before and after a step; and whether a micro-batch communicates."""
    found = {}
    for form in ("group", "ddp", "ddp without"):
        model = Normed(rank)
        if form == "group":
            whole, options = model, {"process_group": torch.distributed.group.WORLD}
        else:
            whole, options = DistributedDataParallel(model, broadcast_buffers=form == "ddp"), {}
        acc = ak.FusedAccumulator(whole, **options)
        optimizer = sgd(acc.parameters())
        steps = [[b.clone() for b in model.buffers()]]
        for _ in range(2):
            for x, _ in micro_batches(0, rank):
                acc.backward(whole(x).square().mean(), weight=len(x))
            steps.append([b.clone() for b in model.buffers()])
            acc.step(optimizer)
            steps.append([b.clone() for b in model.buffers()])
        found[form] = steps, parameters(model)
    return found


def bf16_communication(rank, size):
    """Averages, with the largest sum of magnitudes over ranks."""
    found = {}
    for release in ("microbatch", "backward"):
        model = nn.Linear(50, 40)
        acc = ak.FusedAccumulator(
            model, process_group=torch.distributed.group.WORLD, comm_dtype=torch.bfloat16, release=release
        )
        optimizer = sgd(acc.parameters())
        x = torch.randn(8, 50, generator=torch.Generator().manual_seed(rank))
        kwargs = {} if release == "microbatch" else {"last": True}
        acc.backward(model(x).square().sum(), **kwargs)
        torch.manual_seed(0)
        own = [torch.autograd.grad(model(x).square().sum(), p)[0].double() for p in model.parameters()]
        exact = [g.clone() for g in own]
        bound = [g.abs() for g in own]
        for tensor in exact + bound:
            torch.distributed.all_reduce(tensor)
        acc.finalize(optimizer)
        found[release] = [p.grad.double() * size for p in model.parameters()], exact, bound
    return found


def masters(rank, size):
    """bf16 parameters with fp32 masters in DistributedDataParallel."""
    model = DistributedDataParallel(mlp(torch.bfloat16, seed=rank))
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = adamw(acc.parameters())
    for window in range(WINDOWS):
        for x, y in micro_batches(window, rank, torch.bfloat16):
            acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
        acc.step(optimizer, max_norm=MAX_NORM)
    values = [p.detach().clone() for p in acc.parameters()]
    found = values, parameters(model.module)
    acc.remove()
    # A model that is not wrapped gets rank 0's values before masters are made of them.
    other = ak.FusedAccumulator(
        mlp(torch.bfloat16, seed=rank), master_weights=True, process_group=torch.distributed.group.WORLD
    )
    return *found, [p.detach().clone() for p in other.parameters()]


def under_autocast(rank, size):
    """bf16 autocast in DistributedDataParallel; with hooks on parameters, whose gradients are made in fp32 then."""
    found, smallest = {}, graph.SMALLEST_CAST
    graph.SMALLEST_CAST = 0
    for hooked in (False, True):
        model = DistributedDataParallel(mlp(seed=rank))
        for param in model.parameters() if hooked else ():
            param.register_hook(torch.clone)
        acc = ak.FusedAccumulator(model)
        optimizer = sgd(acc.parameters())
        for window in range(WINDOWS):
            for x, y in micro_batches(window, rank):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                acc.backward(loss, weight=len(x))
            acc.step(optimizer)
        found[hooked] = parameters(model.module), repr(acc)
        acc.remove()
    graph.SMALLEST_CAST = smallest
    return found


class Language(nn.Module):
    """A tied embedding, whose gradient comes in two parts, and layers between; all of them may be fused."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.watch = None  # called with the gradient of what the embedding returned, which comes last but one

    def forward(self, ids):
        x = self.embedding(ids)
        if self.watch is not None:
            x.register_hook(self.watch)
        return self.head(self.body(x)).logsumexp(-1).mean()


def fused_weights(rank, size):
    """Fused weights in DistributedDataParallel and with a group, whose chunks the last backward sends, and without.

    Returns, by (autocast, fused, with DistributedDataParallel), the parameters, and whether sums were sent in backward.
    """
    usual, sender.CHUNK_BYTES = sender.CHUNK_BYTES, 256
    found = {}
    for autocast, fused, wrapped in itertools.product((False, True), (False, True), (False, True)):
        inner = Language(rank)
        model = DistributedDataParallel(inner) if wrapped else inner
        acc = ak.FusedAccumulator(
            model,
            process_group=None if wrapped else torch.distributed.group.WORLD,
            release="backward",
            bucket_bytes=100,
            fuse_weight_gradients=fused,
        )
        optimizer = sgd(acc.parameters())
        seen = []
        for window in range(WINDOWS):
            for i in range(3):
                ids = torch.randint(
                    11, (2, 4 + rank), generator=torch.Generator().manual_seed(9 * window + 3 * i + rank)
                )
                inner.watch = (
                    (lambda _, seen=seen, acc=acc: seen.append(acc.engine.window.sent.count > 0)) if i == 2 else None
                )
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(ids)
                acc.backward(loss, weight=ids.numel(), last=i == 2)
            acc.step(optimizer, max_norm=MAX_NORM)
        found[autocast, fused, wrapped] = parameters(inner), seen
        acc.remove()
    sender.CHUNK_BYTES = usual
    return found


def frozen_kinds(rank, size):
    """The bytes of a frozen parameter that ranks begin with different values of, and what was trained beside it."""
    found = {}
    for kind in KINDS:
        for wrapped in (False, True) if kind in ("uint8", "int64") else (False,):  # DDP sends no others over gloo
            inner = Adapted(kind)
            if rank and kind not in NOT_SENT:
                inner.base.data = torch.ones(3, 5).to(inner.base.dtype)
            model = DistributedDataParallel(inner) if wrapped else inner
            acc = ak.FusedAccumulator(model, process_group=None if wrapped else torch.distributed.group.WORLD)
            optimizer = sgd(trainable(model))
            for window in range(WINDOWS):
                for x, y in micro_batches(window, rank):
                    acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
                acc.step(optimizer, max_norm=MAX_NORM)
            base = b"" if kind in NOT_SENT else inner.base.view(torch.uint8).numpy().tobytes()
            found[kind, wrapped] = base, [p.detach().clone() for p in trainable(inner)]
            acc.remove()
    return found
