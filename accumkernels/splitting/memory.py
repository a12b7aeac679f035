"""What a device's memory has free, and how much of it a micro-batch takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .live_bytes import LiveBytes, storage_of

# A graph that is older than any user's. A backward that raises on the CPU leaves nodes in its thread's queue, and with
# them what they saved; the queue hands out the newest first and drops what belongs to no backward any more.
with torch.enable_grad():
    _leaf = torch.zeros((), device="cpu", requires_grad=True)
    _oldest = _leaf.clone()


class Memory:
    """A device's memory. The base class knows neither limit nor peaks: errors alone say what does not fit.

    Attributes:
        limit: Bytes that tensors of the process may take; None if that is not known.
        peak: The most bytes alive in the micro-batch measured last, of the whole process; None if unknown.
        taken: How many of them the micro-batch added.
        crowded: Whether it does not fit though it ran: it took more than the limit, or the allocator had to give its
            cached blocks back.
    """

    limit: int | None = None
    peak: int | None = None
    taken: int | None = None
    crowded = False

    def free(self) -> int | None:
        """Bytes that a micro-batch may take now; None if that is not known."""
        return None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what runs inside."""
        yield

    def let_go(self) -> None:
        """Give back what an error has left."""
        torch.autograd.grad(_oldest, _leaf, retain_graph=True)
        gc.collect()
        torch.clear_autocast_cache()


class CountedMemory(Memory):
    """Counts live tensors, for devices whose allocator does not keep count. Looking for them takes milliseconds."""

    limit: int

    def __init__(self, device: torch.device, limit: int) -> None:
        self.limit = limit
        self._device = device

    def free(self) -> int:
        """See `Memory`."""
        live = LiveBytes()
        live.add(self._tensors())
        return self.limit - live.live

    def _tensors(self) -> Iterator[Tensor]:
        for found in gc.get_objects():
            if not issubclass(type(found), Tensor):  # isinstance would ask lazy proxies for their class
                continue
            # A `.grad` that nobody has looked at has no object of Python's. Fake tensors' storages are on meta.
            for tensor in [found] if not found.is_leaf or found.grad is None else [found, found.grad]:
                storage = storage_of(tensor)
                if storage is not None and storage.device == self._device:
                    yield tensor

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`."""
        counter = LiveBytes()
        counter.add(self._tensors())
        before = counter.live
        with counter:
            yield
        self.peak, self.taken = counter.peak, counter.peak - before
        self.crowded = counter.peak > self.limit


class CudaMemory(Memory):
    """Reads the caching allocator."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device
        self._limit = limit

    @property
    def limit(self) -> int:  # type: ignore[override]
        """Bytes that tensors of this process may take: all but what others hold, or the user's limit."""
        free, _ = torch.cuda.mem_get_info(self._device)
        available = free + torch.cuda.memory_reserved(self._device)
        return available if self._limit is None else min(self._limit, available)

    def free(self) -> int:
        """See `Memory`."""
        return self.limit - torch.cuda.memory_allocated(self._device)

    def _retries(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`. The allocator's peak statistics begin anew."""
        before, retries, limit = torch.cuda.memory_allocated(self._device), self._retries(), self.limit
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.peak = torch.cuda.max_memory_allocated(self._device)
        self.taken = self.peak - before
        self.crowded = self.peak > limit or self._retries() > retries

    def let_go(self) -> None:
        """See `Memory`."""
        super().let_go()
        torch.cuda.empty_cache()


def memory_of(device: torch.device, limit: int | None) -> Memory:
    """The memory of a device, or `limit` bytes of it."""
    if device.type == "cuda":
        return CudaMemory(device, limit)
    return Memory() if limit is None else CountedMemory(device, limit)
