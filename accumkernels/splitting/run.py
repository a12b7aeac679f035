"""Runs a batch as micro-batches; one that runs out of memory is split in two, and nothing that ran is lost."""

from __future__ import annotations

import logging
import math
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import wrong_type
from ..snapshots import RandomState
from .learning import Learned
from .live_bytes import format_bytes
from .memory import Memory
from .oom import is_oom_error
from .packing import Packer
from .samples import Samples

_log = logging.getLogger(__name__)
_MANY = 20  # windows before a warning about windows that are split again


class BatchReport(NamedTuple):
    """What `FusedAccumulator.backward_batch` ran.

    Attributes:
        sizes: Number of samples of each micro-batch, in the order in which they ran.
        costs: What each of them cost.
        out_of_memory: Tries that ran out of memory and were split.
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
        add: Runs a micro-batch, forward and backward, and adds its gradients. It gets the argument of `loss_fn`, the
            number of samples that count, whether to add only when backward has ended, so that an error leaves the sums
            as they were, and whether this is the last micro-batch of its batch.
        is_broken: Whether an error has left a part of a micro-batch in the sums.
        begin_anew: Drops what this batch has added; False if the window has more than that.
        agree: The largest of such numbers on all ranks, if forward or backward communicates, so that ranks need equally
            many micro-batches; None if they do not.
    """

    add: Callable[[Any, int, bool, bool], None]
    is_broken: Callable[[], bool]
    begin_anew: Callable[[], bool]
    agree: Callable[[int], int] | None = None


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
            torch.OutOfMemoryError: One sample does not fit.
            RuntimeError: A micro-batch that used to fit did not, and the window cannot begin anew.
        """
        start = RandomState(self._devices)
        queue = self._pack(len(samples), packer, budget, window)
        sizes: list[int] = []
        costs: list[float] = []
        tries, peak = 0, None
        while queue:
            indices = queue.popleft()
            cost = packer.cost(indices) if indices else 0.0
            before = RandomState(self._devices)
            try:
                measured = self._try(samples, indices, cost, window, not queue)
            except BaseException as error:
                if not is_oom_error(error):
                    _note(error, f"backward_batch(): {len(sizes)} of {len(sizes) + len(queue) + 1} micro-batches ran")
                    raise
                message = _let_go(error)
            else:
                peak = measured if peak is None or measured is None else max(peak, measured)
                if indices:
                    sizes.append(len(indices))
                    costs.append(cost)
                continue
            tries += 1
            self._memory.let_go()
            if window.agree is not None:
                raise torch.OutOfMemoryError(
                    f"backward_batch(): a micro-batch of cost {cost:g} ran out of memory, and cannot be split, since "
                    f"other ranks wait in forward or backward: pass a smaller budget or micro_batch ({message})"
                )
            self.learned.fail(cost)
            if len(indices) == 1:
                raise torch.OutOfMemoryError(self._too_dear(cost, message))
            if window.is_broken():
                if not window.begin_anew():
                    raise RuntimeError(
                        f"backward_batch(): memory ran out in a micro-batch of cost {cost:g}, which had fitted before, "
                        "after some of its gradients were added, and the window has other micro-batches: drop it with "
                        "acc.zero_() and run its batches again, or pass release='microbatch'"
                    )
                start.restore()
                sizes, costs = [], []
                queue = self._pack(len(samples), packer, budget, window)
                continue
            before.restore()
            queue.appendleft(indices)
            queue = deque(
                half
                for part in queue
                for half in (packer.split(part) if len(part) > 1 and packer.cost(part) >= cost else [part])
            )
        self.learned.end_window(split=tries > 0)
        self._warn_of_splits()
        return sizes, costs, tries, peak

    def _pack(self, count: int, packer: Packer, budget: float | None, window: Window) -> deque[list[int]]:
        """Micro-batches of all samples; empty ones at the end, where other ranks have more."""
        everything = list(range(count))
        limit = self._budget(packer.cost(everything), budget) if everything else 0.0
        parts = packer.pack(everything, limit) if everything else []
        if window.agree is not None:
            number = window.agree(len(parts))
            if everything and number > len(parts):
                parts = packer.pack(everything, limit, number)
            parts += [[]] * (number - len(parts))
        return deque(parts)

    def _budget(self, whole: float, budget: float | None) -> float:
        """What a micro-batch may cost now; a budget of the user's is kept unless it has failed."""
        if budget is not None and self.learned.failed > budget:
            return budget
        limit = self._memory.limit
        free = None if limit is None or whole <= self.learned.ran else limit - self._memory.live()
        return min(self.learned.budget(whole, free), math.inf if budget is None else budget)

    def _try(self, samples: Samples, indices: list[int], cost: float, window: Window, last: bool) -> int | None:
        """Run a micro-batch; returns its peak if it was measured."""
        if self.learned.proven(cost):
            window.add(samples.part(indices or [0]), len(indices), False, last)
            return None
        limit = self._memory.limit
        if limit is None:
            window.add(samples.part(indices), len(indices), True, last)
            self.learned.see(cost, None)
            return None
        live = self._memory.live()
        with self._memory.measured():
            window.add(samples.part(indices), len(indices), True, last)
        peak = self._memory.peak
        assert peak is not None
        self.learned.see(cost, peak - live)
        if peak > limit or self._memory.crowded:  # it counts, but it does not fit
            self.learned.fail(cost)
        return peak

    def _too_dear(self, cost: float, message: str) -> str:
        limit = self._memory.limit
        expected = self.learned.expect(cost)
        bytes_ = "" if expected is None else f", which is expected to take {format_bytes(expected)}"
        of = "" if limit is None else f" of {format_bytes(limit)}"
        return f"backward_batch(): one sample of cost {cost:g}{bytes_}, does not fit in memory{of}: {message}"

    def _warn_of_splits(self) -> None:
        learned = self.learned
        if not self._warned and learned.windows >= _MANY and learned.splits > learned.windows / 10:
            self._warned = True
            _log.warning(
                "backward_batch() ran out of memory and split micro-batches in %d of %d windows: pass a budget, or "
                "cost= if memory does not follow the number of samples",
                learned.splits,
                learned.windows,
            )


def _let_go(error: BaseException) -> str:
    """Free what an error's frames hold; returns its message."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return str(error)


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), text]


class LossAndWeight:
    """Calls the user's functions for a micro-batch.

    Args:
        loss_fn: Returns the mean loss of a part of the batch, or that and its weight.
        weight: Returns the weight of a part; None: its number of samples.
        all_run: Whether a part of weight 0 runs too, since other ranks wait for it.

    Raises:
        TypeError: One is not callable.
    """

    def __init__(self, loss_fn: Callable[[Any], Any], weight: Callable[[Any], Any] | None, all_run: bool) -> None:
        if not callable(loss_fn):
            raise wrong_type("loss_fn", "a function of a part of the batch", loss_fn)
        if weight is not None and not callable(weight):
            raise wrong_type("weight", "a function of a part of the batch, or None", weight)
        self._loss_fn = loss_fn
        self._weight = weight
        self._all_run = all_run

    def __call__(self, part: Any, samples: int) -> tuple[Tensor, float | Tensor] | None:
        """The loss and the weight of a part; None if it weighs nothing, so that its NaN spoils nothing."""
        weight: float | Tensor = samples
        if self._weight is not None and samples:
            weight = self._weight(part)
            if self._is_left_out(weight):
                return None
        result = self._loss_fn(part)
        if isinstance(result, tuple):
            if self._weight is not None:
                raise ValueError("backward_batch(): loss_fn returned a weight, and weight= was given: leave one out")
            if len(result) != 2:
                raise ValueError(f"loss_fn must return a loss, or a loss and its weight, got {len(result)} values")
            result, weight = result[0], result[1] if samples else 0
            if self._is_left_out(weight):
                return None
        if not isinstance(result, Tensor):
            raise wrong_type("what loss_fn returns", "a tensor, or a tensor and a weight", result)
        if result.numel() != 1:
            raise ValueError(f"loss_fn must return a loss of one element, got a tensor of shape {tuple(result.shape)}")
        return result, weight

    def _is_left_out(self, weight: float | Tensor) -> bool:
        return not self._all_run and bool(weight == 0)
