"""Meters of a device's memory during a trial: the peak, and a limit that simulates a smaller device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ...splitting.live_bytes import LiveBytes, format_bytes


class Meter(Protocol):
    """Measures one trial after another."""

    peak: int
    counted_steps: int | None  # number of steps that must run under `counting`; None: all
    rejected: str | None  # why a trial that came through does not count as fitting

    def trial(self) -> AbstractContextManager[None]:
        """Wrap a whole trial, and clean up the device before and after."""

    def counting(self, existing: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Wrap the counted steps; `existing` tensors from before take memory too."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""


class CountingMeter:
    """Counts tensors, for the CPU and for devices whose allocator does not keep count."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self.peak = 0
        self.rejected: str | None = None
        self._limit = limit
        self.counted_steps = 2 if limit is None else None  # an optimizer has its state from the second step on

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Wrap a whole trial."""
        self.peak = 0
        yield

    @contextmanager
    def counting(self, existing: Iterable[Tensor]) -> Iterator[None]:
        """Count, and enforce the limit."""
        live = LiveBytes(self._limit)
        try:
            live.add(existing)
            with live:
                yield
        finally:
            self.peak = max(self.peak, live.peak)

    def synchronize(self) -> None:
        """Do nothing: nothing runs asynchronously here."""


class CudaMeter:
    """Reads the caching allocator, and lets it enforce the limit."""

    def __init__(self, device: torch.device, limit: int | None, margin: float) -> None:
        self.peak = 0
        self.counted_steps: int | None = 0
        self.rejected: str | None = None
        self._device = device
        self._limit = limit
        self._margin = margin

    def _clean(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _retries(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)

    def _fraction(self) -> float | None:
        """Return the fraction of the device's memory that the allocator may take; None for all of it.

        The allocator cannot free what other processes and this process's CUDA context hold.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        if self._limit is not None:
            return min(1.0, self._limit * (1 - self._margin) / total)
        if self._margin == 0:
            return None
        others = total - free - torch.cuda.memory_reserved(self._device)
        return max(0.0, (1 - self._margin) - others / total)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Clean up before, measure, clean up after."""
        self.peak, self.rejected = 0, None
        self._clean()
        torch.cuda.reset_peak_memory_stats(self._device)
        retries = self._retries()
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        fraction = self._fraction()
        try:
            if fraction is not None:
                torch.cuda.set_per_process_memory_fraction(min(before, fraction), self._device)
            yield
            torch.cuda.synchronize(self._device)
            if self._retries() > retries:
                self.rejected = "it fits only when cached blocks are freed again and again"
        finally:
            self.peak = torch.cuda.max_memory_allocated(self._device)
            if fraction is not None:
                torch.cuda.set_per_process_memory_fraction(before, self._device)
            self._clean()

    @contextmanager
    def counting(self, existing: Iterable[Tensor]) -> Iterator[None]:
        """Do nothing: the allocator always counts."""
        yield

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


def meter_for(device: torch.device, memory_limit: int | None, margin: float) -> Meter:
    """Return the meter for a device.

    Args:
        device: Where training runs.
        memory_limit: Bytes of a device to simulate; None for the device itself.
        margin: Fraction of its memory that must stay free.
    """
    if device.type == "cuda":
        return CudaMeter(device, memory_limit, margin)
    limit = memory_limit
    if limit is None and margin > 0:
        if device.type != "cpu":
            raise ValueError(f"margin on {device} needs memory_limit: the device's memory is not known")
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CountingMeter(device, None if limit is None else int(limit * (1 - margin)))


def describe_peak(nbytes: int) -> str:
    """Format bytes exactly and readably: "12,345 bytes (12.1 KiB)"."""
    return f"{nbytes:,} bytes ({format_bytes(nbytes)})"
