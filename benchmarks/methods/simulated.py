"""Windows of one rank of many, whose peers are simulated: torch's fake process group, and what goes over it.

The fake group answers every collective at once and moves nothing, so one process can be a rank of any number. Peers are
taken to be like this rank: a sum of what ranks agree on is this rank's times their number.
"""

from __future__ import annotations

import contextlib
import math
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import accumkernels as ak
from accumkernels.demo.gpt import GPT

from .training import SIZES

# The link of the model: a message from one rank to another takes ALPHA seconds, and a rank sends RATE bytes per second.
ALPHA = 5e-6
RATE = 50e9  # 400 Gb/s
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST = "all-reduce", "reduce-scatter", "all-gather", "broadcast"
MICRO_BATCHES = ("each micro-batch but the last", "the last micro-batch", "the end of the window")
_SMALL = 4096  # bytes; what is larger holds parameters or gradients
_TOKENS = 16  # of a micro-batch, so that the host's time is not that of arithmetic


class Sent(NamedTuple):
    """Collectives of one kind in a window.

    Attributes:
        when: In which part of the window.
        kind: Of the collective.
        holds: What is in them.
        count: How many there are.
        nbytes: Their bytes together: of an all-reduce's tensor, or of the whole that a rank has a shard of.
    """

    when: str
    kind: str
    holds: str
    count: int
    nbytes: int

    def wire(self, ranks: int) -> float:
        """Return the bytes that a rank sends: in a ring, or in a tree that loses nothing to one."""
        share = (ranks - 1) / ranks
        return self.nbytes * {ALL_REDUCE: 2 * share, BROADCAST: 1.0}.get(self.kind, share)

    def seconds(self, ranks: int) -> float:
        """Return the time on the link: an all-reduce goes up and down a tree, all others once."""
        hops = math.ceil(math.log2(ranks)) * (2 if self.kind == ALL_REDUCE else 1)
        return self.count * hops * ALPHA + self.wire(ranks) / RATE


class Simulated(NamedTuple):
    """A window of a rank.

    Attributes:
        sent: What it sends.
        window_seconds: Process time of a window.
        end_seconds: Process time of its end: `acc.step`, or the optimizer's.
    """

    sent: list[Sent]
    window_seconds: list[float]
    end_seconds: list[float]


_KINDS = {"allreduce_": ALL_REDUCE, "broadcast_": BROADCAST}


class _Recorder(TorchDispatchMode):
    """Notes collectives with the part of the window that they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.when = ""
        self.found: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            kind = _KINDS.get(name, REDUCE_SCATTER if "reduce_scatter" in name else ALL_GATHER)
            nbytes = max(_bytes(args[0]), _bytes(args[1]))  # of the whole
            self.found.append((self.when, kind, nbytes))
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0


@contextlib.contextmanager
def _peers_alike() -> Iterator[None]:
    """Sums of what ranks agree on, which are fp64, are as if all ranks had sent the same."""
    all_reduce = dist.all_reduce

    def of_all(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = all_reduce(tensor, op, group, async_op)
        if tensor.dtype == torch.float64 and op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return work

    with unittest.mock.patch.object(dist, "all_reduce", of_all):
        yield


class Loop(NamedTuple):
    """Micro-batch `i` of a window, and the window's end."""

    micro_batch: Callable[[Tensor, Tensor, bool], None]
    end: Callable[[], object]


def _sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, **options)


def fused(model: GPT) -> Loop:
    """FusedAccumulator, which knows the last micro-batch."""
    acc = ak.FusedAccumulator(model, process_group=dist.group.WORLD, release="backward")
    optimizer = _sgd(acc.parameters(), fused=True)
    return Loop(lambda x, y, last: acc.backward(model(x, y), last=last), lambda: acc.step(optimizer))


def _reduced(state, bucket):  # torch refuses other annotations than its own
    dist.all_reduce(bucket.buffer())
    reduced: Any = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def ddp(model: GPT) -> Loop:
    """DistributedDataParallel, silent but in the last micro-batch."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _reduced)  # as without, but the fake group's work has no result
    optimizer = _sgd(wrapped.parameters(), fused=True)

    def micro_batch(x: Tensor, y: Tensor, last: bool) -> None:
        with contextlib.nullcontext() if last else wrapped.no_sync():
            wrapped(x, y).backward()

    return Loop(micro_batch, lambda: (optimizer.step(), optimizer.zero_grad()))


def _sharded(model: GPT) -> GPT:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def fsdp2(model: GPT) -> Loop:
    """FSDP2: parameters are gathered and gradients reduced in every micro-batch."""
    model = _sharded(model)
    optimizer = _sgd(model.parameters())
    end = lambda: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
    return Loop(lambda x, y, last: model(x, y).backward(), end)


def fused_fsdp2(model: GPT) -> Loop:
    """FusedAccumulator over FSDP2's shards."""
    model = _sharded(model)
    acc = ak.FusedAccumulator(model)
    optimizer = _sgd(acc.parameters())
    return Loop(lambda x, y, last: acc.backward(model(x, y)), lambda: acc.step(optimizer))


OURS = "FusedAccumulator, acc.window"
MEGATRON = "Megatron's distributed optimizer"
RECORDED: dict[str, Callable[[GPT], Loop]] = {
    OURS: fused,
    "DDP, no_sync": ddp,
    "FSDP2": fsdp2,
    "FusedAccumulator, FSDP2": fused_fsdp2,
}
SHARDED = ("FSDP2", "FusedAccumulator, FSDP2")
MOST_SHARDED = 64  # of more ranks, most would hold a padded shard of so small a model: taken from those of 64


def megatron(parameters: int) -> list[Sent]:
    """What Megatron-Core's DistributedOptimizer sends, by its documentation (not run): fp32 gradients, bf16 parameters.

    Gradients are added up in an fp32 buffer; the last micro-batch reduce-scatters it, bucket by bucket while backward
    runs (`overlap_grad_reduce`). Ranks then agree on overflow and on the norm, step their shards, gather parameters.
    """
    _, last, end = MICRO_BATCHES
    buckets = math.ceil(parameters / 40e6)  # the default bucket size, elements
    return [
        Sent(last, REDUCE_SCATTER, "gradients", buckets, 4 * parameters),
        Sent(end, ALL_REDUCE, "agreement", 2, 8),
        Sent(end, ALL_GATHER, "parameters", buckets, 2 * parameters),
    ]


def model() -> GPT:
    """The model that is recorded."""
    torch.manual_seed(0)
    return SIZES["small"].model()


@contextlib.contextmanager
def _rank_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of so many."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    try:
        with _peers_alike():
            yield
    finally:
        dist.destroy_process_group()


def simulate(ranks: int, name: str, micro_batches: int, windows: int) -> Simulated:
    """Run a method as rank 0 of so many."""
    with _rank_of(ranks):
        return _run(RECORDED[name](model()), micro_batches, windows)


def construction(ranks: int, **options: Any) -> list[tuple[str, int]]:
    """List kind and bytes of what building a FusedAccumulator sends."""
    built, recorder = model(), _Recorder()
    with _rank_of(ranks), recorder:
        ak.FusedAccumulator(built, process_group=dist.group.WORLD, **options)
    return [(kind, nbytes) for _, kind, nbytes in recorder.found]


def _run(loop: Loop, micro_batches: int, windows: int) -> Simulated:
    x, y = torch.randint(SIZES["small"].vocabulary, (2, 1, _TOKENS), generator=torch.Generator().manual_seed(0))
    recorder, starts, ends = _Recorder(), [], []
    for window in range(windows + 5):
        records = window == 4  # settled: reducers and ranks have learned what they learn
        with recorder if records else contextlib.nullcontext():
            start = time.process_time()
            for i in range(micro_batches):
                last = i + 1 == micro_batches
                recorder.when = MICRO_BATCHES[last]
                loop.micro_batch(x, y, last)
            recorder.when = MICRO_BATCHES[2]
            middle = time.process_time()
            loop.end()
            end = time.process_time()
        if window > 4:
            starts.append(end - start)
            ends.append(end - middle)
    return Simulated(_grouped(recorder.found), starts, ends)


def _grouped(found: list[tuple[str, str, int]]) -> list[Sent]:
    groups: dict[tuple[str, str, str], tuple[int, int]] = {}
    for when, kind, nbytes in found:
        holds = "agreement" if nbytes < _SMALL else "parameters" if kind == ALL_GATHER else "gradients"
        count, total = groups.get((when, kind, holds), (0, 0))
        groups[when, kind, holds] = count + 1, total + nbytes
    return [Sent(*key, *value) for key, value in groups.items()]


def parameters_of(module: nn.Module) -> int:
    """How many elements it has."""
    return sum(p.numel() for p in module.parameters())
