"""Runs a batch as micro-batches; one that runs out of memory is split in two, and nothing that ran is lost."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..snapshots import RandomState
from .learning import Learned
from .live_bytes import format_bytes
from .memory import Memory
from .oom import is_oom_error, let_go
from .packing import Packer
from .samples import Samples

_log = logging.getLogger(__name__)
_MANY = 20  # batches before a warning about those that are split again
_LOOK = 16  # batches in which nothing new was tried, after which to look again how much memory is free


class BatchReport(NamedTuple):
    """What `FusedAccumulator.backward_batch` ran.

    Attributes:
        sizes: Number of samples of each micro-batch that was used, in the order in which they ran.
        costs: What each of them cost.
        out_of_memory: Tries that ran out of memory.
        peak_bytes: The most bytes alive in a micro-batch, where it was measured: while a cost is new. None: it was not.
        loss: `sum w_i l_i / sum w_i` over the micro-batches that were used, 0-d on the device; nan if there were none.
    """

    sizes: list[int]
    costs: list[float]
    out_of_memory: int
    peak_bytes: int | None
    loss: Tensor


class Window(NamedTuple):
    """The window that micro-batches are added to.

    Attributes:
        add: Runs a micro-batch, forward and backward, and adds its gradients; returns whether it had a weight. It gets
            the argument of `loss_fn`, the number of samples that count, whether to add only when backward has ended, so
            that an error leaves the sums as they were, and whether this is the last micro-batch of its batch.
        adds_early: Whether gradients may be added while backward runs.
        is_broken: Whether an error has left a part of a micro-batch in the sums.
        begin_anew: Drops what this batch has added; False if the window has more than that.
        agree: The largest of such numbers on all ranks, if forward or backward communicates, so that ranks need equally
            many micro-batches; None if they do not.
    """

    add: Callable[[Any, int, bool, bool], bool]
    adds_early: Callable[[], bool]
    is_broken: Callable[[], bool]
    begin_anew: Callable[[], bool]
    agree: Callable[[Sequence[int]], list[int]] | None = None


class BatchRunner:
    """Runs the batches of one accumulator.

    Args:
        memory: Of the accumulator's device.
        devices: Whose random state matters.

    Attributes:
        learned: What fits.
    """

    def __init__(self, memory: Memory, devices: Sequence[torch.device]) -> None:
        self.learned = Learned()
        self._memory = memory
        self._devices = devices
        self._free: int | None = None
        self._settled = 0  # batches since a cost was new or failed
        self._warned = False

    def run(
        self, samples: Samples, packer: Packer, budget: float | None, window: Window
    ) -> tuple[list[int], list[float], int, int | None]:
        """Run a batch.

        Args:
            samples: The batch.
            packer: Packs them into micro-batches.
            budget: The most that a micro-batch may cost; None: what has shown to fit.
            window: Adds micro-batches.

        Returns:
            The first four fields of its `BatchReport`.

        Raises:
            torch.OutOfMemoryError: One sample does not fit. The message says whether the last try broke the window.
            RuntimeError: A micro-batch that used to fit did not, and the window cannot begin anew.
        """
        outer = sys.exc_info()[1]
        learned, tries, peak, new = self.learned, 0, 0, False
        start = RandomState(self._devices)
        queue = self._pack(packer, budget, window)
        used: list[tuple[int, float]] = []
        ended = 0
        alone = False  # whether a single sample failed, and is tried with gradients added early
        while queue:
            indices = queue.popleft()
            cost = packer.cost(indices)
            if len(indices) > 1 and cost >= learned.failed and window.agree is None:
                queue.extendleft(reversed(packer.split(indices)))
                continue
            before = RandomState(self._devices)
            proven = learned.proven(cost)
            try:
                part = samples.part(indices or [0])
                if proven or not indices:
                    counts = window.add(part, len(indices), False, not queue)
                else:
                    with self._memory.measured():
                        counts = window.add(part, len(indices), not alone, not queue)
            except BaseException as error:
                if not is_oom_error(error):
                    _note(error, f"backward_batch(): {ended} of {ended + 1 + len(queue)} micro-batches ran")
                    raise
                message = let_go(error, outer)
            else:
                part, alone = None, False
                ended += 1
                if counts and indices:
                    used.append((len(indices), cost))
                    if not proven:
                        new, peak = True, max(peak, self._learn(cost, len(indices)))
                continue
            part = None
            tries += 1
            self._memory.let_go()
            if window.agree is not None:
                raise torch.OutOfMemoryError(
                    f"backward_batch(): a micro-batch of cost {cost:g} ran out of memory, and cannot be split, since "
                    "other ranks wait in forward or backward: pass a smaller budget or micro_batch"
                    f"{_broken(window)} ({message})"
                )
            if len(indices) > 1:
                learned.fail(cost)
            elif proven or alone or not window.adds_early():
                learned.fail(cost)
                message = self._too_dear(cost, message) + _broken(window)
                raise torch.OutOfMemoryError(message)
            alone = len(indices) == 1
            if not window.is_broken():
                before.restore()
                queue.appendleft(indices)
            elif window.begin_anew():
                start.restore()
                queue, used, ended = self._pack(packer, budget, window), [], 0
            else:
                raise RuntimeError(
                    f"backward_batch(): memory ran out in a micro-batch of cost {cost:g}, which had fitted before, "
                    "after some of its gradients were added, and the window has other micro-batches, or parts of it "
                    "were sent to other ranks: drop it with acc.zero_(), or acc.discard() with several ranks, and run "
                    f"its batches again, or pass release='microbatch' ({message})"
                )
        learned.end_batch(split=tries > 0)
        self._settled = 0 if new or tries else self._settled + 1
        self._warn_of_splits()
        return [size for size, _ in used], [cost for _, cost in used], tries, peak or None

    def _pack(self, packer: Packer, budget: float | None, window: Window) -> deque[list[int]]:
        """Micro-batches of all samples; empty ones at the end, where other ranks have more."""
        limit = self._budget(budget)
        parts = packer.pack(limit)
        if window.agree is None:
            return deque(parts)
        number, a_rank_is_empty = window.agree([len(parts), int(not parts)])
        if number and a_rank_is_empty:
            raise ValueError(
                "backward_batch(): a rank's batch has no samples, and other ranks' forward or backward waits for it"
            )
        parts = packer.pack(limit, number)
        return deque(parts + [[]] * (number - len(parts)))

    def _budget(self, budget: float | None) -> float:
        """What a micro-batch may cost now; a budget of the user's is kept unless it has failed."""
        learned = self.learned
        if budget is not None and (learned.failed == math.inf or learned.failed > budget):
            return budget
        if self._settled % _LOOK == 0:
            self._free = self._memory.free()
        return min(learned.budget(self._free), math.inf if budget is None else budget)

    def _learn(self, cost: float, size: int) -> int:
        """Learn from a micro-batch that was new; returns its peak, 0 if that is unknown."""
        self.learned.see(cost, self._memory.taken)
        if self._memory.crowded and size > 1:  # it counts, but it does not fit; a single sample has to
            self.learned.fail(cost)
        return self._memory.peak or 0

    def _too_dear(self, cost: float, message: str) -> str:
        limit = self._memory.limit
        expected = self.learned.expect(cost)
        bytes_ = "" if expected is None else f", which is expected to take {format_bytes(expected)},"
        of = "" if limit is None else f" of {format_bytes(limit)}"
        return f"backward_batch(): one sample of cost {cost:g}{bytes_} does not fit in memory{of}: {message}"

    def _warn_of_splits(self) -> None:
        learned = self.learned
        if not self._warned and learned.batches >= _MANY and learned.splits > learned.batches / 10:
            self._warned = True
            _log.warning(
                "backward_batch() ran out of memory and split micro-batches in %d of %d batches: pass a budget, or "
                "cost= if memory does not follow the number of samples",
                learned.splits,
                learned.batches,
            )


def _broken(window: Window) -> str:
    """What an error adds if the micro-batch that failed broke the window, so that nothing can be added to it."""
    if not window.is_broken():
        return ""
    return (
        ". Some of its gradients were added before memory ran out, so that the window is broken: drop it with "
        "acc.zero_(), or acc.discard() with several ranks"
    )


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]
