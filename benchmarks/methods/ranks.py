"""Data parallel windows over ranks, as benchmarks.ranks compares them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.demo.gpt import GPT

from .training import Batch

Window = Callable[[list[Batch]], None]


def _sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)  # type: ignore[arg-type]


def _wrapped(model: nn.Module, **kwargs: object) -> DistributedDataParallel:
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **kwargs)  # type: ignore[arg-type]


def _compress(state, bucket):  # torch refuses the hook by its name where there is no NCCL, though gloo reduces bf16
    return bf16_compress_hook(state, bucket)


def stock(model: nn.Module, *, no_sync: bool, compress: bool = False) -> Window:
    """DistributedDataParallel and `loss / K`: gradients are reduced in the last micro-batch, or in each."""
    ddp = _wrapped(model, gradient_as_bucket_view=True)
    if compress:
        ddp.register_comm_hook(None, _compress)
    optimizer = _sgd(ddp.parameters())

    def window(batches: list[Batch]) -> None:
        for i, batch in enumerate(batches):
            silent = no_sync and i + 1 < len(batches)
            with ddp.no_sync() if silent else contextlib.nullcontext():
                (ddp(*batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def fused(model: nn.Module, *, last: bool = False, **options: object) -> Window:
    """FusedAccumulator, with `last=True` or without."""
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, **options)  # type: ignore[arg-type]
    return _loop(model, acc, _sgd(acc.parameters()), last)


def wrapped(model: nn.Module) -> Window:
    """FusedAccumulator over DistributedDataParallel, which it keeps silent."""
    ddp = _wrapped(model, gradient_as_bucket_view=True)
    acc = ak.FusedAccumulator(ddp)
    return _loop(ddp, acc, _sgd(acc.parameters()))


def zero(model: nn.Module) -> Window:
    """FusedAccumulator, and an optimizer whose state is shared out."""
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = ZeroRedundancyOptimizer(acc.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)
    return _loop(model, acc, optimizer)


def fsdp2(model: GPT) -> Window:
    """FusedAccumulator over parameters that FSDP2 has sharded."""
    for module in (*model.blocks, model):
        fully_shard(module)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.01, momentum=0.9)  # torch's fused one knows no DTensors
    return _loop(model, acc, optimizer)


def _loop(model: nn.Module, acc: ak.FusedAccumulator, optimizer: torch.optim.Optimizer, last: bool = False) -> Window:
    def window(batches: list[Batch]) -> None:
        for i, batch in enumerate(batches):
            acc.backward(model(*batch), last=last and i + 1 == len(batches))
        acc.step(optimizer)

    return window


NO_SYNC = "DDP, no_sync"
METHODS: dict[str, Callable[[GPT], Window]] = {
    NO_SYNC: lambda model: stock(model, no_sync=True),
    "DDP, every micro-batch": lambda model: stock(model, no_sync=False),
    "DDP, no_sync, bf16_compress_hook": lambda model: stock(model, no_sync=True, compress=True),
    "FusedAccumulator": fused,
    'FusedAccumulator, release="backward", last=True': lambda model: fused(model, release="backward", last=True),
    "FusedAccumulator, comm_dtype=bfloat16": lambda model: fused(model, comm_dtype=torch.bfloat16),
    "FusedAccumulator(DistributedDataParallel)": wrapped,
    "FusedAccumulator, ZeroRedundancyOptimizer": zero,
    "FusedAccumulator, FSDP2": fsdp2,
}
