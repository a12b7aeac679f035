"""Timing: one call at a time, with the state of the caches chosen before it."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .tables import track

Call = Callable[[], object]
# Cycles for which a GPU is kept busy before a measurement, some 5 ms: the host runs ahead, as in training, so that what
# is timed is the device's work. The host's own time is a table of its own.
_HEAD_START = 10_000_000
_CYCLES_AHEAD = 3e9  # per second of host time: half as much again, at the 2 GHz of a fast GPU


class Timer:
    """Seconds of a call on a device.

    Args:
        device: On CUDA, events around the call are read; on the CPU, the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, call: Call, before: Call | None = None, host: float = 0.0) -> float:
        """Run `before`, which is not counted, then `call`.

        Args:
            call: What is timed.
            before: What comes before.
            host: Seconds that the host needs for `call`: a GPU is kept busy for longer before it. Where more kernels
                than the driver's queue holds (some 1,000) are launched, the host waits for the GPU all the same, and
                what is timed has the host's time in it: `host_seconds` and `device_seconds` tell them apart.
        """
        if self.device.type != "cuda":
            if before is not None:
                before()
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        if before is not None:
            before()
        torch.cuda._sleep(max(_HEAD_START, int(host * _CYCLES_AHEAD)))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def wall_seconds(call: Call, device: torch.device) -> float:
    """Seconds until the device has done a call."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def take_turns(
    calls: Mapping[str, Call], device: torch.device, repetitions: int, what: str
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """The seconds of each call, and the graphs that Dynamo has compiled in it; two calls of each warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    graphs = dict.fromkeys(calls, 0)
    names = list(calls)
    for repetition in track(range(repetitions + 2), what):
        for turn in range(len(names)):
            name = names[(repetition + turn) % len(names)]  # nobody always goes first
            before = _graphs_compiled()
            took = wall_seconds(calls[name], device)
            graphs[name] += _graphs_compiled() - before
            if repetition >= 2:
                seconds[name].append(took)
    return seconds, graphs


def _graphs_compiled() -> int:
    """How many graphs Dynamo has compiled so far; importing it takes a second."""
    compiles = "torch._dynamo" in sys.modules
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) if compiles else 0


def host_seconds(call: Call, before: Call, repetitions: int, device: torch.device) -> list[float]:
    """Host seconds of single calls, the device idle before each. On the CPU they include the work itself."""
    seconds = []
    for repetition in range(repetitions + 3):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if repetition >= 3:  # the first ones warm up
            seconds.append(elapsed)
    return seconds


def last_level_cache_bytes(device: torch.device) -> int:
    """Size of the largest cache; 64 MiB where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):
        size = 0
    return size if size > 0 else 64 * 2**20


class Flush:
    """Fills the caches with something else.

    By reading: lines that were written would have to go back to memory during the call that is timed, at its expense.
    """

    def __init__(self, device: torch.device) -> None:
        # A virtual machine may be told of a cache that it shares with many others.
        nbytes = min(max(2 * last_level_cache_bytes(device), 64 * 2**20), 512 * 2**20)
        self._scratch = torch.ones(nbytes // 4, device=device)

    def __call__(self) -> Tensor:
        """Read it all."""
        return self._scratch.sum()


def median_and_spread(seconds: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return statistics.median(seconds), deciles[0], deciles[8]


def milliseconds(seconds: list[float]) -> dict[str, object]:
    """The columns of a table that say how long a call took."""
    names = ("ms_median", "ms_p10", "ms_p90")
    return {name: float(f"{s * 1e3:.4g}") for name, s in zip(names, median_and_spread(seconds), strict=True)}


class _CountKernels(TorchDispatchMode):
    """Counts ops that touch elements; a foreach op on the CPU is a loop over its list."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not (func.is_view or "empty" in name or "detach" in name or "_local_scalar" in name):
            self.count += len(args[0]) if "foreach" in name else 1
        return func(*args, **(kwargs or {}))


def count_launches(call: Call, device: torch.device, on_cpu: int | None = None) -> int | None:
    """Kernels that `call` starts: on CUDA as the profiler saw them, on the CPU as torch dispatched them.

    Args:
        call: What to run.
        device: Where.
        on_cpu: The answer on the CPU, where it is known and cannot be counted.

    Returns:
        None where CUDA's profiler does not work.
    """
    if device.type != "cuda":
        if on_cpu is not None:
            return on_cpu
        with _CountKernels() as mode:
            call()
        return mode.count
    events = device_events(call, device)
    return None if events is None else len(events)


def device_events(call: Call, device: torch.device) -> list[Any] | None:
    """What a GPU did for `call`, as the profiler saw it: kernels, copies and fills; None where it does not work."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize(device)
    except RuntimeError:
        return None
    found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return found or None


def device_seconds(call: Call, device: torch.device, repetitions: int = 5) -> float | None:
    """Seconds that a GPU is busy with `call`, gaps between kernels left out: the median of some calls.

    Returns:
        None on the CPU, where the host does the work, and where the profiler does not work.
    """
    if device.type != "cuda":
        return None
    sums = []
    for _ in range(repetitions):
        events = device_events(call, device)
        if events is None:
            return None
        sums.append(sum(event.time_range.elapsed_us() for event in events) / 1e6)
    return statistics.median(sums)
