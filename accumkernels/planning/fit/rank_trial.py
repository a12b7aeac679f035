"""Training on trial over several ranks, none of which waits for one whose trial failed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...accumulator import FusedAccumulator
from ...splitting.oom import clear_frames, is_oom_error
from ..snapshot import Snapshot
from .agreement import Agreement
from .averaging import Averaging
from .trial import Training

_SECONDS = 0.5  # per trial, if time allows: building an accumulator over ranks takes about as long


class RankTrials:
    """Trials that all ranks run together: `step` and `window`, both collective.

    Before every step or window, ranks agree whether to go on. A rank's exception leaves its trial when the trial is
    over on all ranks.

    Args:
        training: What to train; it has already run alone, so anything that fails on every rank has failed by now.
        snapshot: Restored after each trial.
        size: Samples of a micro-batch.
        group: The ranks that reduce.
        agreement: Their agreement.
        end: When all trials end, by `time.perf_counter`.
        ddp: The model's wrapper, if it has one.
    """

    def __init__(
        self,
        training: Training,
        snapshot: Snapshot,
        size: int,
        group: Any,
        agreement: Agreement,
        end: float,
        ddp: DistributedDataParallel | None,
    ) -> None:
        self._training = training
        self._snapshot = snapshot
        self._size = size
        self._group = group
        self._agreement = agreement
        self._end = end
        self._params: nn.Module = training.model if ddp is None else ddp
        self._failure: BaseException | None = None
        self._optimizer: Optimizer
        self._batches: Iterator[Any]

    def step(self) -> tuple[float, ...]:
        """Return the fastest seconds of each part of a step without accumulation: backward and update."""

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        with self._trial():
            averaging = self._attempt(lambda: Averaging(self._trained(), self._group))
            return self._time([lambda: averaging.run(lambda: self._loss().backward()), update])

    def window(self, length: int) -> tuple[float, ...]:
        """Return the fastest seconds of each part of a window: `length` micro-batches and the update."""

        def build() -> FusedAccumulator:
            return stack.enter_context(FusedAccumulator(self._params, overflow=None, process_group=self._group))

        with self._trial(), ExitStack() as stack:
            acc = self._attempt(build)
            micro_batches = [lambda: acc.backward(self._loss(), weight=self._size)] * length
            return self._time([*micro_batches, lambda: acc.step(self._optimizer)], lambda: _drop(acc))

    @contextmanager
    def _trial(self) -> Iterator[None]:
        self._failure = None
        try:
            with torch.inference_mode(False), torch.enable_grad():
                for param in self._training.model.parameters():
                    param.grad = None
                yield
        finally:
            self._snapshot.restore()

    def _time(
        self, parts: Sequence[Callable[[], object]], end_for_others: Callable[[], None] = lambda: None
    ) -> tuple[float, ...]:
        """Run parts in turns until time is up on a rank.

        Args:
            parts: The parts of a step or window.
            end_for_others: Issues the remaining collectives of a step or window in which a part failed here.
        """
        self._attempt(self._prepare)
        end = min(self._end, time.perf_counter() + _SECONDS)
        times: list[list[float]] = []
        while self._go_on(len(times) < self._training.iterations or time.perf_counter() < end):
            times.append([self._training.seconds(functools.partial(self._attempt, part)) for part in parts])
            if self._failure is not None:
                end_for_others()
        if self._failure is not None:
            raise self._failure
        return tuple(min(column) for column in zip(*times, strict=True))

    def _go_on(self, wanted: bool) -> bool:
        """Whether all ranks want to go on, and none has failed."""
        return all(self._agreement.gather(wanted and self._failure is None))

    def _attempt(self, part: Callable[[], Any]) -> Any:
        """Return a part's result; after a failure nothing runs, and nothing is raised before all ranks know."""
        if self._failure is None:
            try:
                return part()
            except BaseException as error:
                if is_oom_error(error):
                    clear_frames(error)  # frames hold the activations
                self._failure = error
        return None

    def _prepare(self) -> None:
        self._optimizer = self._training.optimizer_fn(self._trained())
        self._snapshot.include(self._optimizer)  # it may have existed before
        self._batches = self._training.source(self._size, self._training.device)

    def _trained(self) -> list[nn.Parameter]:
        return [param for param in self._training.model.parameters() if param.requires_grad]

    def _loss(self) -> Tensor:
        return self._training.loss(self._batches)


def _drop(acc: FusedAccumulator) -> None:
    """End a window that failed on this rank, without this rank's part; all ranks skip it."""
    acc.discard(window=True)
    try:
        acc.finalize()
    except RuntimeError:
        pass  # the optimizer raised, after all ranks had reduced the window
    acc.zero_()
