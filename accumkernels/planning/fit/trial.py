"""Trains a few steps at one batch size to see whether it fits."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...accumulator import FusedAccumulator
from ...splitting.live_bytes import format_bytes
from ...splitting.oom import clear_frames, is_oom_error
from ..batches import Source, training_loss
from ..snapshot import Snapshot, interrupts_later
from .meters import Meter

_log = logging.getLogger(__name__)


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


class GcGuard:
    """Collects often at little cost, inside a `with` block.

    A full collection looks at every object of the process, which takes 0.1 s and more with torch and a few libraries
    loaded. After the first one, all living objects are set aside (`gc.freeze`), so that later ones look only at new
    objects. If the program has frozen objects itself, nothing is set aside.
    """

    def __init__(self) -> None:
        self._frozen = False

    def collect(self) -> None:
        """Collect."""
        gc.collect()
        if not self._frozen and gc.get_freeze_count() == 0:
            gc.freeze()
            self._frozen = True

    def __enter__(self) -> GcGuard:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._frozen:
            gc.unfreeze()


@dataclass
class Training:
    """Everything that a trial needs, except the batch size."""

    model: nn.Module
    device: torch.device
    source: Source
    loss_fn: Callable[[Any, Any], Tensor] | None
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer]
    amp_dtype: torch.dtype | None
    iterations: int
    accumulate: int | None
    meter: Meter
    garbage: GcGuard
    on_step: Callable[[int, int, int], None] = lambda size, done, steps: None
    steps_in_parts: int = 1  # after the trial, to time parts; each part's fastest time counts

    def try_size(self, size: int, snapshot: Snapshot) -> Outcome:
        """Train, and restore everything that training changes.

        Args:
            size: Samples of a micro-batch.
            snapshot: Restored afterwards, whatever happens.

        Raises:
            Exception: whatever training raises, unchanged, unless it means out of memory.
        """
        rate, failure = 0.0, ""
        parts: tuple[float, ...] = ()
        with self.meter.trial():
            try:
                rate, parts = self._train(size, snapshot)
            except BaseException as error:
                if not is_oom_error(error):
                    raise
                failure = first_line(error)
                clear_frames(error)  # frames hold the activations
            finally:
                with interrupts_later():
                    snapshot.restore()
        if failure or self.device.type != "cpu":
            self.garbage.collect()  # objects in cycles must not count in the next trial
        failure = failure or self.meter.rejected or ""
        trial = Trial(size, not failure, self.meter.peak, 0.0 if failure else rate)
        if failure:
            _log.info("batch size %d does not fit: %s", size, failure)
        else:
            _log.info("batch size %d fits: peak %s, %.4g samples/s", size, format_bytes(trial.peak_bytes), rate)
        return Outcome(trial, failure, () if failure else parts)

    def _train(self, size: int, snapshot: Snapshot) -> tuple[float, tuple[float, ...]]:
        """Train; return samples per second, and the seconds of a step's parts."""
        for param in self.model.parameters():
            param.grad = None
        if len({param.device for param in self.model.parameters()}) == 1:  # else leave it spread over devices
            self.model.to(self.device)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
            with self.meter.counting([*self.model.parameters(), *self.model.buffers()]):
                optimizer = self.optimizer_fn(trained)
                snapshot.include(optimizer)  # it may have existed before
                parts = self._parts(optimizer, self.source(size, self.device), size, stack)
                counted = self.meter.counted_steps
                first = self.iterations if counted is None else min(counted, self.iterations)
                # Counting slows every op down, so time two more steps without it.
                total = max(self.iterations, first + 2)
                for index in range(first):
                    for part in parts:
                        part()
                    self.on_step(size, index + 1, total)
            timed = total - first
            if first == 0:  # nothing has warmed up yet
                for part in parts:
                    part()
                timed -= 1
            self.meter.synchronize()
            begin = time.perf_counter()
            for index in range(total - timed, total):
                for part in parts:
                    part()
                self.on_step(size, index + 1, total)
            self.meter.synchronize()
            seconds = time.perf_counter() - begin

            # Time parts in steps of their own, because a wait after each would slow down the steps above.
            times = [[self.seconds(part) for part in parts] for _ in range(self.steps_in_parts)]
        rate = timed * size * (self.accumulate or 1) / max(seconds, 1e-9)
        return rate, tuple(min(column) for column in zip(*times, strict=True))

    def loss(self, batches: Iterator[Any]) -> Tensor:
        """Run one forward pass of the next batch."""
        enabled = self.amp_dtype is not None
        with torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=enabled):
            return training_loss(self.model, next(batches), self.loss_fn)

    def seconds(self, part: Callable[[], object]) -> float:
        """Time a part of a step, with a wait for the device."""
        begin = time.perf_counter()
        part()
        self.meter.synchronize()
        return time.perf_counter() - begin

    def _parts(
        self, optimizer: Optimizer, batches: Iterator[Any], size: int, stack: contextlib.ExitStack
    ) -> list[Callable[[], None]]:
        """Return the parts of a training step, to be called in order: its micro-batches, and the update."""
        if self.accumulate is None:

            def update() -> None:
                # Step whatever the gradients are. A GradScaler would skip the first steps until it has found its scale,
                # and the measurement would miss the optimizer's state, which its first step makes.
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            return [lambda: self.loss(batches).backward(), update]

        acc = stack.enter_context(FusedAccumulator(self.model, overflow=None, process_group=False))

        def micro_batch() -> None:
            acc.backward(self.loss(batches), weight=size)

        def end() -> None:
            acc.step(optimizer)

        return [micro_batch] * self.accumulate + [end]


def first_line(error: BaseException) -> str:
    """Return the first line of its message, or its class if there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
