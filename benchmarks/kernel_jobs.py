"""Runs methods and collects seconds: in this process, or in one of its own."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from .harness.case import DTYPES, Case
from .harness.measure import Call, Flush, Timer, count_launches, device_seconds, host_seconds
from .harness.shapes import Shapes
from .methods import compute, host, limits, other_jobs, peers, window

COLD, WRITTEN = "cold", "written"  # the caches hold something else; backward has just written the gradients
PRODUCTS, OPTIMIZER = "matrix products of a micro-batch", "fused AdamW"
_WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        table: "accumulate", "window", "host", "other jobs" or "step".
        methods: Measured in turn, so that what disturbs the machine disturbs all alike.
        seconds: After so many per method no further repetition begins.
        micro_batches: Lengths of windows.
        tokens: Of a micro-batch, where there are matrix products.
    """

    table: str
    methods: tuple[str, ...]
    shapes: Shapes
    dtype: str
    device: str
    threads: int
    repetitions: int
    seconds: float
    micro_batches: tuple[int, ...] = ()
    tokens: int = 0


@dataclasses.dataclass
class Measured:
    """Seconds of a method. `gradients` is `COLD` or `WRITTEN`, empty where that makes no difference.

    On a GPU, `host` is the host's own time per call and `device` what the GPU is busy for. With many small tensors the
    host is the slower of the two, and `seconds`, taken by events, are the time of whoever is slower.
    """

    table: str
    method: str
    gradients: str
    micro_batches: int
    seconds: list[float]
    launches: int | None = None
    unavailable: str | None = None
    host: float | None = None
    device: float | None = None


def _repeat(job: Job, once: Sequence[Callable[[], float]], warm_up: int = _WARM_UP) -> list[list[float]]:
    """Seconds that each of `once` answers, in turn."""
    seconds: list[list[float]] = [[] for _ in once]
    deadline = time.monotonic() + job.seconds * len(once)
    for repetition in range(job.repetitions + warm_up):
        for call, found in zip(once, seconds, strict=True):
            elapsed = call()
            if repetition >= warm_up:
                found.append(elapsed)
        if repetition >= warm_up and time.monotonic() > deadline:
            break
    return seconds


def _accumulate(job: Job, case: Case, timer: Timer) -> list[Measured]:
    """One accumulate of each method, gradients cold and just written; with ours, the limits."""
    prepared = {name: peers.PEERS[name](case) for name in job.methods}
    loops = limits.limits(case) if peers.OURS in prepared else {}
    flush = Flush(case.device)
    launches: dict[str, int | None] = dict.fromkeys(loops, 1)
    for name, method in prepared.items():
        method.whole()
        launches[name] = count_launches(method.whole, case.device, method.launches)

    def interleaved(add: Callable[[int], object]) -> Callable[[], float]:
        """Each gradient is added when it has just been written; the writing alone is subtracted."""

        def both() -> None:
            for index in reversed(range(len(case.grads))):
                case.write_one(index)
                add(index)

        # Of tiny lists the difference may be lost in the noise of the two.
        return lambda: max(timer(both, flush) - timer(case.write, flush), 1e-9)

    names = [*loops, *prepared]
    calls: dict[str, Call] = {
        **{n: loop.call for n, loop in loops.items()},
        **{n: method.whole for n, method in prepared.items()},
    }
    host, device = _apart(calls, case.device)
    once: list[Callable[[], float]] = [functools.partial(timer, calls[n], flush, host.get(n, 0.0)) for n in names]
    for name, loop in loops.items():
        once.append(functools.partial(timer, loop.call, loop.write, host.get(name, 0.0)))
    for name, method in prepared.items():
        whole = functools.partial(timer, method.whole, case.write, host.get(name, 0.0))
        once.append(whole if method.one is None else interleaved(method.one))
    states = [COLD] * len(names) + [WRITTEN] * len(names)
    return [
        Measured(job.table, name, state, 1, seconds, launches[name], host=host.get(name), device=device.get(name))
        for name, state, seconds in zip(names * 2, states, _repeat(job, once), strict=True)
    ]


def _apart(calls: Mapping[str, Call], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Host time and device time of each call; both empty on the CPU, where they are one."""
    if device.type != "cuda":
        return {}, {}
    host = {n: statistics.median(host_seconds(call, lambda: None, 5, device)) for n, call in calls.items()}
    busy = {n: device_seconds(call, device) for n, call in calls.items()}
    return host, {n: seconds for n, seconds in busy.items() if seconds is not None}


def _windows(job: Job, case: Case, timer: Timer) -> list[Measured]:
    """Windows of every length, gradients just written; with ours, the limits."""
    found = []
    if peers.OURS in job.methods:
        loops = limits.limits(case)
        passes = [functools.partial(timer, loop.call, loop.write) for loop in loops.values()]
        for name, seconds in zip(loops, _repeat(job, passes), strict=True):
            found.append(Measured(job.table, name, WRITTEN, 0, seconds, 1))
        del loops, passes
    for name in job.methods:
        method = window.WINDOWS[name](case)
        launches = (
            _window_launches(method, case.device) if name != peers.COMPILED or case.device.type == "cuda" else None
        )
        for length in job.micro_batches:
            once = functools.partial(_one_window, method, case, timer, length)
            once()  # warms up
            shorter = dataclasses.replace(job, repetitions=max(3, job.repetitions * 2 // length))
            (seconds,) = _repeat(shorter, [once], warm_up=0)
            count = None if launches is None else launches[0] + (length - 1) * launches[1]
            found.append(Measured(job.table, name, WRITTEN, length, seconds, count))
        del method, once
        gc.collect()
    return found


def _one_window(method: window.Window, case: Case, timer: Timer, micro_batches: int) -> float:
    """Seconds of a window without what writes its gradients."""

    def end() -> None:
        method.finish()
        method.zero()

    return sum(timer(method.accumulate, case.write) for _ in range(micro_batches)) + timer(end)


def _window_launches(method: window.Window, device: torch.device) -> tuple[int, int] | None:
    """Kernels of a window of one micro-batch, and of each further one; None where counting does not work."""

    def run(micro_batches: int) -> None:
        for _ in range(micro_batches):
            method.accumulate()
        method.finish()
        method.zero()

    run(1)
    one, two = (count_launches(functools.partial(run, length), device) for length in (1, 2))
    return None if one is None or two is None else (one, two - one)


def _host(job: Job, case: Case) -> list[Measured]:
    """Host time per call."""
    found = []
    for name in job.methods:
        call, before = host.METHODS[name](case)
        seconds = host_seconds(call, before, job.repetitions, case.device)
        found.append(Measured(job.table, name, "", 1, seconds))
    return found


def _other_jobs(job: Job, case: Case, timer: Timer) -> list[Measured]:
    """What is no peer."""
    found = []
    flush = Flush(case.device)
    for name in job.methods:
        try:
            call = other_jobs.JOBS[name](case, job.tokens)
            call()
        except (ImportError, RuntimeError, TypeError) as error:
            cause = str(error).partition("\n")[0].partition(". ")[0]
            found.append(Measured(job.table, name, COLD, 1, [], unavailable=cause))
            continue
        once = functools.partial(timer, call, flush)
        found.append(Measured(job.table, name, COLD, 1, _repeat(job, [once])[0]))
    return found


def run(job: Job) -> list[Measured]:
    """Measure a job in this process."""
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    timer, dtype = Timer(device), DTYPES[job.dtype]
    if job.table == "step":
        products, optimizer = compute.step_seconds(job.shapes, dtype, job.tokens, timer)
        return [Measured("step", name, "", 1, [s]) for name, s in ((PRODUCTS, products), (OPTIMIZER, optimizer))]
    case = Case(job.shapes, dtype, device)
    if job.table == "accumulate":
        return _accumulate(job, case, timer)
    if job.table == "window":
        return _windows(job, case, timer)
    return _host(job, case) if job.table == "host" else _other_jobs(job, case, timer)


def merge(measured: Sequence[Measured]) -> list[Measured]:
    """One entry per method and circumstances, with the seconds of all processes."""
    merged: dict[tuple[str, str, str, int], Measured] = {}
    for m in measured:
        key = (m.table, m.method, m.gradients, m.micro_batches)
        if key in merged:
            merged[key].seconds += m.seconds
        else:
            merged[key] = dataclasses.replace(m, seconds=list(m.seconds))
    return list(merged.values())
