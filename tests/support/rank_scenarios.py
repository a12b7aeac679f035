"""Data parallel windows that end as one process would: functions of rank and size, whose results are pickled."""

from __future__ import annotations

import contextlib
import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.models import batch, mlp
from tests.support.ranks import parameters

WINDOWS = 3
MAX_NORM = 0.05  # clips in every window


def micro_batches(window, rank, dtype=torch.float32):
    """A rank's data in a window: 0 to 3 micro-batches of unequal sizes; in window 1 the last rank has none."""
    counts = {0: rank + 1, 1: 2 if rank == 0 else 0, 2: 3 - rank % 2}
    data = (
        batch(2 + (3 * rank + 5 * i + window) % 7, torch.float64, seed=100 * window + 10 * rank + i)
        for i in range(min(counts[window], 3))
    )
    return [(x.to(dtype), y.to(dtype)) for x, y in data]


def adamw(params):
    """Fused: its step divides and clips."""
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def sgd(params):
    """Not fused."""
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def unequal_model(dtype, rank):
    """Another model on each rank, with another count of BatchNorm-free buffers: the group's rank 0 wins."""
    return mlp(dtype, seed=rank)


def train(rank, make_model, make_optimizer, *, dtype=torch.float32, group=True, last=False, no_sync=False, **options):
    """Three windows; parameters, norms, and what of `.grad` was left over."""
    model = make_model()
    if group:
        options["process_group"] = torch.distributed.group.WORLD
    acc = ak.FusedAccumulator(model, **options)
    optimizer = make_optimizer(acc.parameters())
    norms, left = [], 0
    for window in range(WINDOWS):
        data = micro_batches(window, rank, dtype)
        for i, (x, y) in enumerate(data):
            with model.no_sync() if no_sync and i + 1 < len(data) else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y)
                kwargs = {"last": i + 1 == len(data) and window != 2} if last else {}
                acc.backward(loss, weight=len(x), **kwargs)
        norms.append(acc.step(optimizer, max_norm=MAX_NORM).item())
        left += sum(p.grad is not None for p in model.parameters())
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    acc.remove()
    return parameters(inner), norms, left


def equals_one_process(rank, size):
    """Every form of the loop."""
    found = {}
    for dtype, make_optimizer in itertools.product((torch.float64, torch.float32), (adamw, sgd)):
        for options in (
            {},
            {"release": "backward", "bucket_bytes": 64},
            {"release": "backward", "bucket_bytes": 64, "last": True},
        ):
            name = dtype, make_optimizer.__name__, options.get("release"), options.get("last", False)
            found[name] = train(rank, lambda d=dtype: unequal_model(d, rank), make_optimizer, dtype=dtype, **options)
    return found


def distributed_data_parallel(rank, size):
    """As params, in several forms, which would hang or be wrong if its reducer did anything."""
    found = {}
    for no_sync, kwargs in (
        (False, {}),
        (True, {}),
        (True, {"gradient_as_bucket_view": True}),
        (False, {"static_graph": True}),
        (False, {"find_unused_parameters": True}),
    ):
        make = lambda kwargs=kwargs: DistributedDataParallel(mlp(torch.float64, seed=rank), **kwargs)  # noqa: E731
        found[no_sync, tuple(kwargs)] = train(rank, make, sgd, dtype=torch.float64, group=False, no_sync=no_sync)
    return found


def long_form(rank, size):
    """finalize, clip, scaler.step, scaler.update, with several optimizers and a divisor."""
    found = {}
    for divisor in (False, True):
        model = unequal_model(torch.float64, rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, scaler=scaler)
        optimizers = [sgd(model[:2].parameters()), sgd(model[2:].parameters())]
        norms = []
        for window in range(WINDOWS):
            for x, y in micro_batches(window, rank, torch.float64):
                loss = nn.functional.mse_loss(model(x), y)
                if divisor:
                    acc.backward(loss * len(x))
                else:
                    scaler.scale(loss).backward()
                    acc.accumulate(len(x))
            samples = sum(len(x) for r in range(size) for x, _ in micro_batches(window, r))
            acc.finalize(*optimizers, divisor=samples if divisor else None)
            norms.append(acc.clip_grad_norm_(MAX_NORM).item())
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            acc.zero_()
        found[divisor] = parameters(model), norms, scaler.get_scale()
    return found


class Heads(nn.Module):
    """A trunk and heads of which a call uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(5, 40).double()
        self.heads = nn.ModuleList(nn.Linear(40, 3).double() for _ in range(4))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.trunk(x)))


HEADS = [[0, 1], [1, 1], [2, 0], [0, 0]]  # per window, of rank 0 and of the others; head 3 is never used


def unused(rank, size):
    """Which parameters have a `.grad`, and the values, with release in both ways."""
    found = {}
    for release in ("microbatch", "backward"):
        model = Heads()
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, release=release)
        optimizer = sgd(acc.parameters())
        touched = []
        for window, heads in enumerate(HEADS):
            x, y = batch(4 + rank, torch.float64, seed=10 * window + rank)
            kwargs = {} if release == "microbatch" else {"last": True}
            acc.backward(nn.functional.mse_loss(model(x, heads[min(rank, 1)]), y), weight=len(x), **kwargs)
            acc.finalize(optimizer)
            touched.append([p.grad is not None for p in model.parameters()])
            optimizer.step()
            acc.zero_()
        found[release] = parameters(model), touched
    return found


def divides(rank, size):
    """What ranks gave to the sum, and the mean that each has as `.grad`, with and without a check for overflow."""
    found = {}
    for mode in ("window", None):
        param = nn.Parameter(torch.zeros(1000))
        acc = ak.FusedAccumulator([param], process_group=torch.distributed.group.WORLD, overflow=mode)
        given = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        acc.backward((param * given).sum(), weight=1 + rank)
        acc.finalize(sgd(acc.parameters()))
        found[mode] = given, param.grad.clone()

    acc.zero_()
    for mode in ("window", None):
        acc.remove()
        acc = ak.FusedAccumulator([param], process_group=torch.distributed.group.WORLD, overflow=mode)
        acc.backward((param * 1e38).sum())
        acc.finalize(sgd(acc.parameters()), divisor=0.5)
        found[mode] += (acc.step_was_skipped,)
    return found


def noise(rank, size):
    """The critical batch size after some windows."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, noise_scale=True)
    optimizer = sgd(acc.parameters())
    for window in range(WINDOWS):
        for x, y in micro_batches(window, rank, torch.float64):
            acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
        acc.step(optimizer)
    found = acc.noise_scale()
    return float(found), found.windows


def unfreezing(rank, size):
    """A frozen layer is unfrozen between windows; a second buffer, and a rank that is empty then."""
    model = mlp(torch.float64)
    model[2].requires_grad_(False)
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = sgd(acc.parameters())
    for window in range(3):
        if window == 1:
            model[2].requires_grad_(True)
        if rank == 0 or window != 1:
            x, y = batch(4, torch.float64, seed=window * 10 + rank)
            acc.backward(nn.functional.mse_loss(model(x), y))
        if window == 1 and rank == 1:
            acc.release_buffers()
        acc.step(optimizer)
    return parameters(model), len(acc.flat_buffers)


TRAINED = [(0, 2, 4), (0,), (0,), (4,), (2,), (2, 4), (0, 2, 4)]  # the layers that are trained in each window


def data_of(window, rank):
    """One or two micro-batches; the last rank has none in the window that is the first with frozen layers."""
    if window == 1 and rank > 0:
        return []
    return [batch(4, torch.float64, seed=100 * window + 10 * rank + i) for i in range(1 + rank % 2)]


def freezing(rank, size):
    """Layers are frozen and unfrozen again; a rank is empty then, and one releases its buffers."""
    found = []
    for options in (
        {},
        {"release": "backward", "bucket_bytes": 64},
        {"release": "backward", "bucket_bytes": 64, "last": True},
        {"comm_dtype": "auto", "fuse_weight_gradients": True},
    ):
        last = options.pop("last", False)
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, **options)
        optimizer = sgd(acc.parameters())
        elements = []
        for window, layers in enumerate(TRAINED):
            for index in (0, 2, 4):
                model[index].requires_grad_(index in layers)
            if window == 3 and rank == 1:
                acc.release_buffers()
            parts = data_of(window, rank)
            for i, (x, y) in enumerate(parts):
                acc.backward(nn.functional.mse_loss(model(x), y), last=last and i + 1 == len(parts))
            acc.step(optimizer)
            elements.append(sum(segment.numel for buffer in acc._store.buffers for segment in buffer.segments))
        state = acc.state_dict(reduced=True)
        found.append((parameters(model), elements, sorted(state["sums"])))
        acc.remove()
    return found


def frozen_on_one_rank(rank, size):
    """Against the rules, but no rank waits for another: nothing is given back."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = sgd(acc.parameters())
    if rank == 0:
        model[2:].requires_grad_(False)
    for window in range(3):
        x, y = batch(4, torch.float64, seed=10 * window + rank)
        acc.backward(nn.functional.mse_loss(model(x), y))
        acc.step(optimizer)
    return parameters(model), sum(buffer.numel() for buffer in acc.flat_buffers)


def mixed_dtypes(rank, size):
    """fp32 and fp64 parameters in one model: two buffers."""
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3).double()])
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = sgd(acc.parameters())
    x = torch.full((1, 5), rank + 1.0)
    acc.backward(model[1](model[0](x).double()).sum())
    acc.finalize(optimizer)
    return [p.grad.double().clone() for p in model.parameters()], [p.detach().double() for p in model.parameters()]
