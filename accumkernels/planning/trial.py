"""Trains on trial: the steps, and the meters of memory and time."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import devices
from ..accumulator import FusedAccumulator
from ..arguments import as_bytes
from ..errors import is_oom_error, logger
from ..splitting.memory import Memory, format_bytes, let_go, memory_of
from .training import Training, fraction, positive_int

# ---- The memory of a device during a trial, or of the smaller one that a limit simulates


def memory_for(
    device: torch.device, memory_limit: int | None, margin: float, tensors: Callable[[], Iterable[Tensor]]
) -> Memory:
    """Return the memory that trials run in.

    Args:
        device: Where training runs.
        memory_limit: Bytes of a device to simulate; None for the device itself.
        margin: Fraction of its memory that must stay free.
        tensors: What is alive before a trial, where tensors are counted.
    """
    whole, held = memory_limit, 0
    if whole is None and margin > 0:
        if devices.counts_memory(device):  # the allocator cannot free what others and this process's context hold
            free, whole = torch.accelerator.get_memory_info(device)
            held = whole - free - torch.accelerator.memory_reserved(device)
        elif device.type == "cpu":
            whole = _host_memory()
        if whole is None:
            raise ValueError(f"margin on {device} needs memory_limit: the device's memory is not known")
    return memory_of(device, None if whole is None else int((1 - margin) * whole - held), tensors)


def _host_memory() -> int | None:
    """Bytes of the host's memory; None where the system does not say (Windows has no sysconf)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def describe_peak(nbytes: int) -> str:
    """Format bytes exactly and readably: "12,345 bytes (12.1 KiB)"."""
    return f"{nbytes:,} bytes ({format_bytes(nbytes)})"


# ---- Trains a few steps at one batch size to see whether it fits

_log = logger(__name__)
PartsOf = Callable[[Optimizer, contextlib.ExitStack], list[Callable[[], object]]]


class Trial(NamedTuple):
    """The result of one size.

    Attributes:
        size: Samples of a micro-batch.
        ok: Whether it fits.
        peak_bytes: The most memory in use at a time; for a size that does not fit, until it ran out.
        samples_per_second: Measured in training, after warming up; 0.0 for a size that does not fit.
    """

    size: int
    ok: bool
    peak_bytes: int
    samples_per_second: float


class Outcome(NamedTuple):
    """A trial, and the results that `BatchSize.tried` omits.

    Attributes:
        trial: The result of the size.
        failure: Why it does not fit, in a line; "" if it does.
        parts: Seconds of each micro-batch and, last, of the update; empty if the size does not fit.
    """

    trial: Trial
    failure: str
    parts: tuple[float, ...]


class Trials:
    """Trains on trial, again and again, and restores everything afterwards.

    Args:
        training: What to train.
        num_iterations: Steps per trial; at least 2 are run.
        memory_limit: See `memory_for`.
        margin: See `memory_for`.
        times_parts: Whether to run as many steps again and take each part's fastest time; else one step is run.

    Attributes:
        on_step: Called after each step with the size, the steps done and the steps in all.
    """

    def __init__(
        self,
        training: Training,
        num_iterations: Any,
        memory_limit: Any = None,
        margin: Any = 0.0,
        times_parts: bool = False,
    ) -> None:
        self._iterations = max(2, positive_int(num_iterations, "num_iterations"))
        limit = None if memory_limit is None else as_bytes(memory_limit, "memory_limit", of_a_device=True)
        model = training.model
        self._memory = memory_for(
            training.device, limit, fraction(margin, "margin"), lambda: [*model.parameters(), *model.buffers()]
        )
        self._training = training
        self._steps_in_parts = self._iterations if times_parts else 1
        self._snapshot = training.snapshot()
        self._cleanup = contextlib.ExitStack()
        self.on_step: Callable[[int, int, int], None] = lambda size, done, steps: None

    def __enter__(self) -> Trials:
        if self._training.device.type != "cpu":
            self._collect()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    def _collect(self) -> None:
        """Collect, again and again at little cost.

        A full collection looks at every object of the process, which takes 0.1 s and more with torch and a few
        libraries loaded. After the first one, all living objects are set aside until the end, so that later ones look
        only at new objects. If the program has set objects aside itself, nothing more is.
        """
        gc.collect()
        if gc.get_freeze_count() == 0:
            gc.freeze()
            self._cleanup.callback(gc.unfreeze)

    def try_size(self, size: int, accumulate: int | None, parts_of: PartsOf | None = None) -> Outcome:
        """Train, and restore everything that training changes.

        Args:
            size: Samples of a micro-batch.
            accumulate: See `Training`.
            parts_of: Makes the parts of a training step instead; what is entered into the stack ends with the trial.

        Raises:
            Exception: whatever training raises, unchanged, unless it means out of memory.
        """
        rate, failure, outer = 0.0, "", sys.exc_info()[1]
        parts: tuple[float, ...] = ()
        with self._clean():
            try:
                rate, parts = self._train(size, accumulate, parts_of)
            except BaseException as error:
                if not is_oom_error(error):
                    raise
                failure = next(iter(str(error).splitlines()), "") or type(error).__name__
                let_go(error, outer)  # frames hold the activations
            finally:
                self._snapshot.restore()
        if failure or self._training.device.type != "cpu":
            self._collect()  # objects in cycles must not count in the next trial
        if not failure and self._memory.over_limit:
            failure = "it fits only when cached blocks are freed again and again"
        trial = Trial(size, not failure, self._memory.peak or 0, 0.0 if failure else rate)
        if failure:
            _log.info("batch size %d does not fit: %s", size, failure)
        else:
            _log.info("batch size %d fits: peak %s, %.4g samples/s", size, format_bytes(trial.peak_bytes), rate)
        return Outcome(trial, failure, () if failure else parts)

    @contextmanager
    def _clean(self) -> Iterator[None]:
        """Empty the allocator's cache before a trial and after it."""
        self._empty_cache()
        try:
            yield
        except BaseException:
            # After a failed kernel every call raises its error once more: the first one is what the user has to see.
            with contextlib.suppress(RuntimeError):
                self._empty_cache()
            raise
        self._empty_cache()

    def _empty_cache(self) -> None:
        self._synchronize()
        if devices.counts_memory(self._training.device):
            torch.accelerator.empty_cache()

    def _train(self, size: int, accumulate: int | None, parts_of: PartsOf | None) -> tuple[float, tuple[float, ...]]:
        """Train; return samples per second, and the seconds of a step's parts."""
        training, memory = self._training, self._memory
        training.place()
        if training.cpu_offload:
            accumulate = accumulate or 1
        first = 1  # steps before those that are timed
        if memory.counts_ops:  # count in them alone; an optimizer has its state from the second step on
            first = min(2, self._iterations) if memory.limit is None else self._iterations
        total = max(self._iterations, first + (2 if memory.counts_ops else 1))
        with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
            measured = stack.enter_context(contextlib.ExitStack())
            measured.enter_context(memory.measured())
            # Only an accumulator that offloads must come before its optimizer, which steps masters.
            acc = stack.enter_context(training.accumulator()) if training.cpu_offload else None
            optimizer = training.optimizer(acc)
            self._snapshot.include(optimizer)  # it may have existed before
            if acc is None and accumulate is not None:
                acc = stack.enter_context(training.accumulator())
            parts = parts_of(optimizer, stack) if parts_of else self._parts(optimizer, size, accumulate, acc)

            def run(steps: range) -> None:
                for index in steps:
                    for part in parts:
                        part()
                    self.on_step(size, index + 1, total)
                self._synchronize()

            run(range(first))
            if memory.counts_ops:
                measured.close()
            begin = time.perf_counter()
            run(range(first, total))
            seconds = time.perf_counter() - begin

            # Time parts in steps of their own, because a wait after each would slow down the steps above.
            times = [[self._seconds(part) for part in parts] for _ in range(self._steps_in_parts)]
        rate = (total - first) * size * (accumulate or 1) / max(seconds, 1e-9)
        return rate, tuple(min(column) for column in zip(*times, strict=True))

    def _synchronize(self) -> None:
        """Wait until the device has finished."""
        if devices.is_current(self._training.device.type):
            torch.accelerator.synchronize(self._training.device)

    def _seconds(self, part: Callable[[], object]) -> float:
        """Time a part of a step, with a wait for the device."""
        begin = time.perf_counter()
        part()
        self._synchronize()
        return time.perf_counter() - begin

    def _parts(
        self, optimizer: Optimizer, size: int, accumulate: int | None, acc: FusedAccumulator | None
    ) -> list[Callable[[], object]]:
        """Return the parts of a training step, to be called in order: its micro-batches, and the update."""
        batches = self._training.source(size, self._training.device)
        walked = False

        def loss() -> Tensor:
            nonlocal walked
            found = self._training.loss(next(batches))
            if not walked:  # once, since it takes time
                self._snapshot.include_leaves(found)
                walked = True
            return found

        if acc is None:

            def update() -> None:
                # Step whatever the gradients are. A GradScaler would skip the first steps until it has found its scale,
                # and the measurement would miss the optimizer's state, which its first step makes.
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            return [lambda: loss().backward(), update]

        def micro_batch() -> None:
            acc.backward(loss(), weight=size)

        return [*[micro_batch] * (accumulate or 1), functools.partial(acc.step, optimizer)]
