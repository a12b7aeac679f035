"""What a device's memory has free, and how much of it a micro-batch takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .live_bytes import LiveBytes


class Memory:
    """A device's memory. The base class knows neither limit nor peaks: errors alone say what does not fit.

    Attributes:
        peak: Bytes alive at the most in the last micro-batch measured, of the whole process; None if unknown.
        crowded: Whether it came through only because the allocator gave its cached blocks back.
    """

    peak: int | None = None
    crowded = False
    limit: int | None = None

    def live(self) -> int:
        """Bytes alive now; only asked if there is a limit."""
        return 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the peak of a micro-batch."""
        yield

    def let_go(self) -> None:
        """Give back what an error has left."""
        gc.collect()


class CountedMemory(Memory):
    """Counts live tensors, for devices whose allocator does not keep count."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self.limit = limit
        self._device = device

    def live(self) -> int:
        """See `Memory`."""
        live = LiveBytes()
        live.add(self._tensors())
        return live.live

    def _tensors(self) -> Iterator[Tensor]:
        # Not isinstance, which asks lazy proxies for their class.
        tensors = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
        return (t for t in tensors if t.device == self._device)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`."""
        live = LiveBytes()
        live.add(self._tensors())
        try:
            with live:
                yield
        finally:
            self.peak = live.peak


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

    def live(self) -> int:
        """See `Memory`."""
        return torch.cuda.memory_allocated(self._device)

    def _retries(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`. The allocator's peak statistics begin anew."""
        retries = self._retries()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            self.peak = torch.cuda.max_memory_allocated(self._device)
            self.crowded = self._retries() > retries

    def let_go(self) -> None:
        """See `Memory`."""
        super().let_go()
        torch.cuda.empty_cache()


def memory_of(device: torch.device, limit: int | None) -> Memory:
    """The memory of a device, or `limit` bytes of it."""
    if device.type == "cuda":
        return CudaMemory(device, limit)
    return Memory() if limit is None else CountedMemory(device, limit)
