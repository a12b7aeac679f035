"""A slow link between ranks, and a device that computes, both of sleep: how much of a reduction a loop hides.

Real all-reduces of gloo follow the wait for the link, so the results are right. What the host does beside that is the
methods' own work, in chunks and buckets that are smaller than usual by one factor, as the model is. Where it waits for
the device, layer by layer, all of it adds to the time of a window; where it runs ahead, only what follows the last
gradient does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.ranks import sender

from .trainers import as_launched

LAYERS, ELEMENTS = 32, 2**16
BYTES = LAYERS * ELEMENTS * 4
SHRINK = 32  # of chunks and buckets
BUCKET_BYTES = 16 * 2**20 // SHRINK  # the default on a GPU, and on a CPU where the largest gradient has 8 MiB
CHUNK_BYTES = sender.CHUNK_BYTES // SHRINK
FORWARD, BACKWARD = 0.002, 0.004  # seconds in a layer

Window = Callable[[int], None]  # of so many micro-batches


class Device:
    """Computes for given times.

    Args:
        ahead: Whether the host runs ahead of it, as of a GPU; else the host waits for each layer, as where it computes
            itself.
    """

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead
        self._free = 0.0  # when all that it was given will be done

    def compute(self, seconds: float) -> None:
        """Give it something to do."""
        self._free = self.done() + seconds
        if not self._ahead:
            time.sleep(seconds)

    def done(self) -> float:
        """When what it was given until now is done."""
        return max(self._free, time.monotonic()) if self._ahead else time.monotonic()

    def wait(self) -> None:
        """Let the host wait until then."""
        time.sleep(max(0.0, self.done() - time.monotonic()))


class Link:
    """Carries one tensor at a time, once the device has computed it.

    Args:
        rate: Bytes of gradients per second.
        device: Of the tensors.
    """

    def __init__(self, rate: float, device: Device) -> None:
        self.device = device
        self._rate = rate
        self._group = dist.new_group()
        self._all_reduce = dist.all_reduce  # what is patched below is not what the link does itself
        self._free = 0.0
        self._waiting: queue.SimpleQueue[tuple[Tensor, Any, float]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            tensor, sent, asked = self._waiting.get()
            self._free = max(self._free, asked) + tensor.nbytes / self._rate
            time.sleep(max(0.0, self._free - time.monotonic()))
            self._all_reduce(tensor, group=self._group)
            sent.set_result(tensor)

    def send(self, tensor: Tensor) -> Any:
        """Begin to sum a tensor over ranks."""
        sent: Any = torch.futures.Future()
        self._waiting.put((tensor, sent, self.device.done()))
        return sent


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device: Device) -> Tensor:
        device.compute(FORWARD)
        ctx.save_for_backward(weight)
        ctx.device = device
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.device.compute(BACKWARD)
        return grad, torch.full_like(ctx.saved_tensors[0], 1e-3), None


class Layer(nn.Module):
    """Takes its time on a device, and has a gradient."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))
        self._device = device

    def forward(self, x: Tensor) -> Tensor:
        """As it is."""
        return _Compute.apply(x, self.weight, self._device)


def _model(link: Link) -> nn.Module:
    return nn.Sequential(*(Layer(link.device) for _ in range(LAYERS)))


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, fused=True)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.ones(4, requires_grad=True)).sum()


_BUCKETS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 25 / SHRINK}  # of stock's reducer


def _send_buckets(ddp: Any, link: Link) -> None:
    """Have stock's reducer send over the link."""
    size = dist.get_world_size()

    def over_the_link(state, bucket):  # torch refuses other annotations than its own
        return link.send(bucket.buffer()).then(lambda sent: sent.value().div_(size))

    ddp.register_comm_hook(None, over_the_link)


def stock(link: Link) -> Window:
    """DistributedDataParallel, silent but in the last micro-batch."""
    ddp = DistributedDataParallel(_model(link), **_BUCKETS)
    _send_buckets(ddp, link)
    optimizer = _sgd(ddp.parameters())

    def window(micro_batches: int) -> None:
        for i in range(micro_batches):
            with ddp.no_sync() if i + 1 < micro_batches else contextlib.nullcontext():
                (_loss(ddp) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


@contextlib.contextmanager
def chunks_over(link: Link) -> Iterator[None]:
    """FusedAccumulator's chunks go over the link, in a shrunken size; what is waited for at once goes as ever."""
    all_reduce = dist.all_reduce

    def over_the_link(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return link.send(tensor) if kwargs.get("async_op") else all_reduce(tensor, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_reduce", over_the_link),
        mock.patch.object(sender, "CHUNK_BYTES", CHUNK_BYTES),
    ):
        yield


def fused(link: Link, looks_ahead: bool) -> Window:
    """FusedAccumulator, in a loop over `acc.window` or without it."""
    model = _model(link)
    acc = ak.FusedAccumulator(model, bucket_bytes=BUCKET_BYTES, process_group=dist.group.WORLD)
    optimizer = _sgd(acc.parameters())

    def window(micro_batches: int) -> None:
        for _ in acc.window(range(micro_batches)) if looks_ahead else range(micro_batches):
            acc.backward(_loss(model))
        acc.step(optimizer)

    return window


def accelerated(link: Link, ours: bool) -> Window:
    """An Accelerator, ours or accelerate's own, in the loop of its documentation, around DistributedDataParallel."""
    import accelerate

    from accumkernels.integrations.accelerate import Accelerator

    as_launched()
    if ours:
        accelerator = Accelerator(cpu=True, accumulator_options={"bucket_bytes": BUCKET_BYTES})
    else:
        handler = accelerate.DistributedDataParallelKwargs(**_BUCKETS)
        accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[handler])
    model = _model(link)
    model, optimizer = accelerator.prepare(model, _sgd(model.parameters()))
    if not ours:
        _send_buckets(model, link)

    def window(micro_batches: int) -> None:
        accelerator.gradient_accumulation_steps = micro_batches
        accelerator.step = 0  # where accelerate counts micro-batches
        for _ in range(micro_batches):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model))
                optimizer.step()
                optimizer.zero_grad()

    return window


NO_SYNC = "DDP, no_sync"
METHODS: dict[str, Callable[[Link], Window]] = {
    NO_SYNC: stock,
    "FusedAccumulator": lambda link: fused(link, False),
    "FusedAccumulator, acc.window": lambda link: fused(link, True),
}
if importlib.util.find_spec("accelerate"):
    METHODS["accelerate's loop, its Accelerator"] = lambda link: accelerated(link, False)
    METHODS["accelerate's loop, our Accelerator"] = lambda link: accelerated(link, True)
