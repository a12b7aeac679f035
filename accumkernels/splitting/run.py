"""Runs a batch as micro-batches; one that runs out of memory is split in two, and nothing that ran is lost."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import expect, is_oom_error, logger
from ..hooks import graph_nodes
from ..snapshots import RandomState
from .batches import Samples
from .memory import Memory, format_bytes, let_go
from .packing import Learned, Packer

_log = logger(__name__)
_MANY = 20  # batches before a warning about those that are split again
_RECHECK_AFTER = 16  # batches in which nothing new was tried, after which to look again how much memory is free


class BatchReport(NamedTuple):
    """What `FusedAccumulator.backward_batch` ran.

    Attributes:
        sizes: Number of samples of each micro-batch that was used, in the order in which they ran.
        costs: What each of them cost.
        out_of_memory: Tries that ran out of memory.
        peak_bytes: The most bytes alive in a micro-batch, where it was measured: while a cost is new. None: it was not.
        loss: `sum w_i l_i / sum w_i` over the micro-batches that were used, 0-d on the device; nan if there were none.
        extras: What `loss_fn` returned beside loss and weight for each micro-batch that was used, detached, in the
            order of `sizes`; empty if it returned nothing else.
    """

    sizes: list[int]
    costs: list[float]
    out_of_memory: int
    peak_bytes: int | None
    loss: Tensor
    extras: list[Any]


class Window(Protocol):
    """The window that micro-batches are added to.

    Attributes:
        max_over_ranks: The largest of such numbers on all ranks, if forward or backward communicates, so that ranks
            need equally many micro-batches; None if they do not.
    """

    max_over_ranks: Callable[[Sequence[int]], list[int]] | None

    def add(self, part: Any, indices: Sequence[int], whole: bool, last: bool, asks: bool) -> tuple[bool, Any]:
        """Run a micro-batch, forward and backward, and add its gradients.

        Args:
            part: The argument of `loss_fn`.
            indices: The samples that count.
            whole: Whether to add only when backward has ended, so that an error leaves the sums as they were.
            last: Whether this is the last micro-batch of its batch.
            asks: Whether this is the first one of several, so that a loss must say what it weighs.

        Returns:
            Whether it had a weight, and what `loss_fn` returned beside loss and weight, detached.
        """

    def adds_early(self) -> bool:
        """Whether gradients may be added while backward runs."""

    def is_broken(self) -> bool:
        """Whether an error has left a part of a micro-batch in the sums."""

    def begin_anew(self) -> bool:
        """Drop what this batch has added; return False if the window has more than that."""

    def loss(self) -> Tensor:
        """Return the loss of what this batch has added, as `BatchReport` has it."""


class BatchRunner:
    """Runs the batches of one accumulator.

    Args:
        memory: Of the accumulator's device.

    Attributes:
        learned: What fits.
    """

    def __init__(self, memory: Memory) -> None:
        self.learned = Learned()
        self._memory = memory
        self._free: int | None = None
        self._settled = 0  # batches since a cost was new or failed
        self._warned = False

    def run(
        self, samples: Samples, packer: Packer, budget: float | None, window: Window, devices: Sequence[torch.device]
    ) -> BatchReport:
        """Run a batch.

        Args:
            samples: The batch.
            packer: Packs them into micro-batches.
            budget: The most that a micro-batch may cost; None: what has shown to fit.
            window: Adds micro-batches.
            devices: Accelerators whose random numbers a micro-batch may draw.

        Raises:
            torch.OutOfMemoryError: One sample does not fit, or nothing does. The message says whether the last try
                broke the window.
            RuntimeError: A micro-batch that used to fit did not, and the window cannot begin anew.
        """
        if self._settled % _RECHECK_AFTER == 0:
            self._free = self._memory.free()
            if self._free is not None and self._free < 0:
                raise torch.OutOfMemoryError(self._below(self._memory.alive() or 0))
        with self._memory.limited():
            return self._run(samples, packer, budget, window, devices)

    def _run(
        self, samples: Samples, packer: Packer, budget: float | None, window: Window, devices: Sequence[torch.device]
    ) -> BatchReport:
        outer = sys.exc_info()[1]
        learned, tries, peak, new = self.learned, 0, 0, False
        start = RandomState(devices)
        room = self._free if self._memory.counts_ops else None  # else the limit holds whether measured or not
        queue = self._pack(packer, budget, window)
        used: list[tuple[int, float, Any]] = []  # size, cost and extra of micro-batches
        ended = 0
        single = False  # whether a single sample failed, and is tried with gradients added early
        while queue:
            indices = queue.popleft()
            cost = packer.cost(indices)
            if len(indices) > 1 and cost >= learned.failed and window.max_over_ranks is None:
                queue.extendleft(reversed(packer.split(indices)))
                continue
            before = RandomState(devices)
            fits = learned.known_to_fit(cost, room) or not indices
            try:
                with contextlib.nullcontext() if fits else self._memory.measured():
                    part = samples.part(indices or [0])
                    asks = not ended and len(queue) > 0
                    counts, extra = window.add(part, indices, not (fits or single), not queue, asks)
            except BaseException as error:
                if not is_oom_error(error):
                    _note(error, f"backward_batch(): {ended} of {ended + 1 + len(queue)} micro-batches ran")
                    raise
                message = let_go(error, outer)
            else:
                part, single = None, False
                ended += 1
                if counts and indices:
                    used.append((len(indices), cost, extra))
                    if not fits:
                        new, peak = True, max(peak, self._learn(cost, len(indices)))
                extra = None
                continue
            part = None
            tries += 1
            self._memory.let_go()
            if window.max_over_ranks is not None:
                raise torch.OutOfMemoryError(
                    f"backward_batch(): a micro-batch of cost {cost:g} ran out of memory, and cannot be split, since "
                    "other ranks wait in forward or backward: pass a smaller budget or micro_batch"
                    f"{_broken(window)} ({message}) (AK33)"
                )
            if len(indices) > 1:
                learned.fail(cost)
            elif fits or single or not window.adds_early():
                learned.fail(cost)
                message = self._too_expensive(cost, message, not fits) + _broken(window)
                raise torch.OutOfMemoryError(message)
            single = len(indices) == 1
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
                    f"its batches again, or pass release='microbatch' ({message}) (AK14)"
                )
        learned.end_batch(split=tries > 0)
        self._settled = 0 if new or tries else self._settled + 1
        self._warn_of_splits()
        sizes, costs, extras = map(list, zip(*used, strict=True)) if used else ([], [], [])
        extras = extras if any(extra is not None for extra in extras) else []
        return BatchReport(sizes, costs, tries, peak or None, window.loss(), extras)

    def _pack(self, packer: Packer, budget: float | None, window: Window) -> deque[list[int]]:
        """Micro-batches of all samples; empty ones at the end, where other ranks have more."""
        limit = self._budget(budget)
        parts = packer.pack(limit)
        if window.max_over_ranks is None:
            return deque(parts)
        number, a_rank_is_empty = window.max_over_ranks([len(parts), int(not parts)])
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
        return min(learned.budget(self._free), math.inf if budget is None else budget)

    def _learn(self, cost: float, size: int) -> int:
        """Learn from a micro-batch that was new; returns its peak, 0 if that is unknown."""
        self.learned.record(cost, self._memory.taken)
        if self._memory.over_limit and size > 1:  # it counts, but it does not fit; a single sample has to
            self.learned.fail(cost)
        return self._memory.peak or 0

    def _too_expensive(self, cost: float, message: str, measured: bool) -> str:
        memory, expected = self._memory, self.learned.expect(cost)
        limit, bytes_, of = memory.limit, "", ""
        if measured and limit is not None and memory.before is not None and memory.before > limit:
            return self._below(memory.before)
        if measured and memory.taken is not None:
            bytes_ = f", which takes {format_bytes(max(memory.taken, expected or 0))} or more,"
        elif expected is not None:
            bytes_ = f", which is expected to take {format_bytes(expected)},"
        if limit is not None:
            of = f" of {format_bytes(limit)}"
            if measured and memory.before is not None:
                of += f", of which {format_bytes(memory.before)} were taken before it"
        return f"backward_batch(): one sample of cost {cost:g}{bytes_} does not fit in memory{of}: {message} (AK13)"

    def _below(self, alive: int) -> str:
        return (
            f"backward_batch(): memory_limit is {format_bytes(self._memory.limit or 0)}, and tensors of "
            f"{format_bytes(alive)} are alive before a micro-batch runs: model, sums, optimizer, batch and whatever "
            "else the process holds on the device"
        )

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


# ---- Calls what users give for the loss of a part of their batch, and for its weight


class PartLoss(NamedTuple):
    """What `loss_fn` returned for a part of the batch.

    Attributes:
        loss: The loss, with a graph.
        weight: What the part counts.
        given: Whether somebody said so; else it is the number of samples.
        extra: What else was returned.
    """

    loss: Tensor
    weight: float
    given: bool
    extra: Any


class LossAndWeight:
    """The loss and the weight of a part of the batch.

    Args:
        loss_fn: Returns the mean loss of a part of the batch, or that and its weight, or these and anything else.
        weight: Returns the weight of a part; None: its number of samples.
        check: Returns a weight as a number, or as a tensor that is read here; raises if it is neither.
        all_run: Whether a part of weight 0 runs too, since other ranks wait for it.

    Raises:
        TypeError: One is not callable.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        weight: Callable[[Any], Any] | None,
        check: Callable[[Any], float | Tensor],
        all_run: bool,
    ) -> None:
        self._loss_fn = expect(loss_fn, Callable, "loss_fn", "a function of a part of the batch")
        self._weight = expect(weight, Callable | None, "weight", "a function of a part of the batch, or None")
        self._check = check
        self._all_run = all_run

    def __call__(self, part: Any, samples: int) -> PartLoss | None:
        """Run the forward of a part with so many samples that count.

        Returns:
            None if it weighs nothing, so that its NaN spoils nothing.
        """
        number = float(samples)
        if self._weight is not None and samples:
            number = self._number(self._weight(part))
            if number == 0 and not self._all_run:
                return None
        loss, given, extra = returned_by(self._loss_fn(part))
        if given is not None:
            if self._weight is not None:
                raise ValueError("backward_batch(): loss_fn returned a weight, and weight= was given: leave one out")
            number = self._number(given) if samples else 0.0
        if number == 0 and not self._all_run:
            return None
        return PartLoss(loss, number, given is not None or self._weight is not None, extra)

    def _number(self, weight: Any) -> float:
        checked = self._check(weight)
        return float(self._check(checked.item()) if isinstance(checked, Tensor) else checked)


def returned_by(returned: Any) -> tuple[Tensor, Any, Any]:
    """Check what a `loss_fn` returned: a loss, that and its weight, or that, its weight or None, and anything else.

    Returns:
        The loss, the weight and the rest, None where there is none.
    """
    loss, weight, extra = returned, None, None
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise ValueError(
                f"loss_fn must return a loss, or a loss and its weight, got {len(returned)} values; anything else goes "
                "into one object, the third: (loss, weight, extra)"
            )
        loss, weight, extra = (*returned, None)[:3]
    expect(loss, Tensor, "what loss_fn returns", "a tensor, or a tensor and a weight")
    if loss.numel() != 1:
        raise ValueError(f"loss_fn must return a loss of one element, got a tensor of shape {tuple(loss.shape)}")
    return loss, weight, extra


@contextmanager
def adding_nothing(loss: Tensor) -> Iterator[None]:
    """Make every gradient of a backward inside zero, where NaN times a weight of 0 would be NaN."""
    handles = [node.register_prehook(_zeros) for node in graph_nodes([loss.grad_fn])]
    try:
        yield
    finally:
        for handle in handles:  # parameters keep their nodes
            handle.remove()


def _zeros(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
