"""What tests/ranks/test_data_parallel.py runs: functions of rank and number of ranks, whose results are pickled."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.ranks import reduction
from tests.support.models import batch, mlp
from tests.support.ranks import message, parameters

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


def autocast_route(rank, size):
    """bf16 autocast in DistributedDataParallel, with the route and without; how many parameters took it."""
    found = {}
    for route in (False, True):
        model = DistributedDataParallel(mlp(seed=rank))
        acc = ak.FusedAccumulator(model, autocast_route=route)
        optimizer = sgd(acc.parameters())
        for window in range(WINDOWS):
            for x, y in micro_batches(window, rank):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                acc.backward(loss, weight=len(x))
            acc.step(optimizer)
        found[route] = parameters(model.module), repr(acc)
        acc.remove()
    return found


class Language(nn.Module):
    """A tied embedding, whose gradient comes in two parts, and layers between."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
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
    usual, reduction.CHUNK_BYTES = reduction.CHUNK_BYTES, 256
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
                inner.watch = (lambda _, seen=seen, acc=acc: seen.append(acc._ranks.begun)) if i == 2 else None
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(ids)
                acc.backward(loss, weight=ids.numel(), last=i == 2)
            acc.step(optimizer, max_norm=MAX_NORM)
        found[autocast, fused, wrapped] = parameters(inner), seen
        acc.remove()
    reduction.CHUNK_BYTES = usual
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


def mixed_dtypes(rank, size):
    """fp32 and fp64 parameters in one model: two buffers."""
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3).double()])
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = sgd(acc.parameters())
    x = torch.full((1, 5), rank + 1.0)
    acc.backward(model[1](model[0](x).double()).sum())
    acc.finalize(optimizer)
    return [p.grad.double().clone() for p in model.parameters()], [p.detach().double() for p in model.parameters()]


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


SCENARIOS = [
    distributed_data_parallel,
    long_form,
    overflow,
    module_buffers,
    masters,
    autocast_route,
    fused_weights,
    failures,
    noise,
    last_is_last,
    unfreezing,
    mixed_dtypes,
    removed,
    errors,
]
OF_EVERY_SIZE = [equals_one_process, overflow_in_step, unused, empty, bf16_communication]
