"""Packs samples into micro-batches: few, none dearer than a budget, and all of them about as dear."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

_TIGHT = 0.01  # of the dearest micro-batch: how near to the evenest packing the search goes


class Packer:
    """Packs the samples of one batch. The same costs and limits make the same micro-batches, on every machine.

    Micro-batches are runs of samples that are sorted by their costs, the dearest first; runs are given by their bounds.

    Args:
        costs: Of each sample; an attribute too.
        padded: Whether a micro-batch costs its dearest sample times their number; else it costs their sum.
        most: The most samples of a micro-batch; None: any number.
        multiple_of: Sizes are multiples of it where the limits allow, except the last one; if it is not 1, they are few
            rather than even.
    """

    def __init__(
        self, costs: Sequence[float], *, padded: bool = False, most: int | None = None, multiple_of: int = 1
    ) -> None:
        self.costs = costs
        self._padded = padded
        self._most = most
        self._multiple_of = multiple_of
        self._order = sorted(range(len(costs)), key=lambda index: -costs[index])
        self._sorted = [costs[index] for index in self._order]
        self._sums = [0.0, *itertools.accumulate(self._sorted)]

    def cost(self, indices: Sequence[int]) -> float:
        """What these samples cost as one micro-batch."""
        costs = [self.costs[index] for index in indices]
        return max(costs, default=0.0) * len(costs) if self._padded else math.fsum(costs)

    def pack(self, budget: float = math.inf, at_least: int = 1) -> list[list[int]]:
        """Pack all samples, the dearest first; samples that cost the same stay in order.

        Args:
            budget: The most that a micro-batch may cost, unless it is one sample.
            at_least: The fewest micro-batches, if there are as many samples.
        """
        if not self.costs:
            return []
        bounds = self._cut(budget)
        if self._multiple_of == 1 and self._sorted[0] <= budget:  # else it would give free samples to one that is alone
            bounds = self._even(bounds)
        parts = [self._order[start:stop] for start, stop in itertools.pairwise(bounds)]
        while len(parts) < min(at_least, len(self.costs)):
            max_cost = max(range(len(parts)), key=lambda number: (len(parts[number]) > 1, self.cost(parts[number])))
            parts[max_cost : max_cost + 1] = self.split(parts[max_cost])
        return parts

    def split(self, indices: Sequence[int]) -> list[list[int]]:
        """Split a micro-batch of two or more samples in two that cost about the same."""
        order = list(indices)
        sums = list(itertools.accumulate(self.costs[index] for index in order))
        half = bisect.bisect_left(sums, sums[-1] / 2) + 1 if sums[-1] else len(order) // 2
        cut = min(half, len(order) - 1)
        if cut > self._multiple_of:
            cut -= cut % self._multiple_of
        return [order[:cut], order[cut:]]

    def _cost_of_run(self, start: int, stop: int) -> float:
        if self._padded:
            return self._sorted[start] * (stop - start)
        return math.fsum(self._sorted[start:stop])

    def _max_cost(self, bounds: Sequence[int]) -> float:
        """What the dearest of all runs costs."""
        return max(itertools.starmap(self._cost_of_run, itertools.pairwise(bounds)))

    def _reach(self, start: int, budget: float) -> int:
        """Where the longest run from `start` ends that costs no more than `budget`, or is a single sample."""
        stop = len(self.costs)
        if self._padded and self._cost_of_run(start, stop) > budget:
            stop = start + int(budget / self._sorted[start])
        elif not self._padded:
            stop = bisect.bisect_right(self._sums, self._sums[start] + budget, start) - 1
        while stop > start + 1 and self._cost_of_run(start, stop) > budget:  # the sums are rounded
            stop -= 1
        return max(stop, start + 1)

    def _cut(self, budget: float) -> list[int]:
        """Fill one micro-batch after another, up to the budget."""
        bounds, count = [0], len(self.costs)
        while (start := bounds[-1]) < count:
            stop = self._reach(start, budget)
            if self._most is not None:
                stop = min(stop, start + self._most)
            if stop < count and stop - start > self._multiple_of:
                stop -= (stop - start) % self._multiple_of
            bounds.append(stop)
        return bounds

    def _even(self, bounds: list[int]) -> list[int]:
        """As many micro-batches as these, about as dear as each other."""
        # The smallest budget that needs no more of them.
        low, high = self._sorted[0], self._max_cost(bounds)
        while high - low > _TIGHT * high:
            middle = (low + high) / 2
            tighter = self._cut(middle)
            if len(tighter) > len(bounds):
                low = middle
            else:
                bounds, high = tighter, min(middle, self._max_cost(tighter))
        # Samples that cost the same: 4, 3 and 3 rather than 4, 4 and 2.
        size, larger = divmod(len(self.costs), len(bounds) - 1)
        even = [size * number + min(number, larger) for number in range(len(bounds))]
        return even if self._max_cost(even) <= self._max_cost(bounds) else bounds


# ---- What a device's memory has shown to hold: costs that ran, costs that did not, and the line through measured peaks

MARGIN = 0.05  # of the free memory, which stays free where a cost is tried that has not run yet
BARRED = 50  # batches for which a cost that failed is not tried again
_POINTS = 32
_STATE = ("ran", "ran_bytes", "failed", "failed_in", "batches", "splits")


class Learned:
    """What was learnt about the costs of micro-batches.

    Bytes are those beyond what was alive before the micro-batch, so that what else is allocated later counts.

    Attributes:
        ran: The largest cost that ran; 0 if none did.
        ran_bytes: What it took, if that was measured.
        failed: The smallest cost that ran out of memory and is barred; inf if none is.
        failed_in: How many batches had run before.
        batches: How many batches have run.
        splits: In how many of them memory ran out.
    """

    def __init__(self) -> None:
        self.ran = 0.0
        self.ran_bytes: float | None = None
        self.failed = math.inf
        self.failed_in = 0
        self.batches = 0
        self.splits = 0
        self._points: deque[tuple[float, float]] = deque(maxlen=_POINTS)  # costs and their bytes

    # ---- what happens

    def record(self, cost: float, nbytes: float | None) -> None:
        """A micro-batch of this cost ran; `nbytes` is what it took, if that was measured."""
        if nbytes is not None:
            self._points.append((cost, nbytes))
        if cost >= self.ran:
            self.ran, self.ran_bytes = cost, nbytes
        if cost >= self.failed:
            self.failed = math.inf

    def fail(self, cost: float) -> None:
        """A micro-batch of this cost ran out of memory, or took more than there is."""
        self.failed, self.failed_in = min(self.failed, cost), self.batches
        if self.ran >= self.failed:
            below = (point for point in self._points if point[0] < self.failed)
            self.ran, self.ran_bytes = max(below, default=(0.0, None))

    def end_batch(self, split: bool) -> None:
        """Count a batch, in which memory ran out or not."""
        self.batches += 1
        self.splits += split

    # ---- what to try

    def known_to_fit(self, cost: float, free: float | None = None) -> bool:
        """Whether a micro-batch of this cost has run, and has room.

        Args:
            cost: Its cost.
            free: Bytes that it may take; None if that is not known.
        """
        if not 0 < cost <= self.ran or free is None or self.ran_bytes is None or self.ran_bytes <= free:
            return 0 < cost <= self.ran
        expected = self.expect(cost)
        return expected is None or expected <= free

    def expect(self, cost: float) -> float | None:
        """The bytes that the line through the peaks expects of a cost; None without a line."""
        line = self._line()
        return None if line is None else line[0] + line[1] * cost

    def budget(self, free: float | None) -> float:
        """The largest cost to try.

        Args:
            free: Bytes that a micro-batch may take; None if that is not known.
        """
        line = self._line()
        barred = math.inf if self.failed == math.inf else max(self.ran, (self.ran + self.failed) / 2)
        if free is None or line is None:  # errors alone say what does not fit
            return min(barred, max(self.ran, self.failed / 2))
        base, slope = line
        fits = math.inf if slope == 0 else ((1 - MARGIN) * free - base) / slope
        if self.ran_bytes is not None and self.ran_bytes <= free:
            fits = max(fits, self.ran)
        if fits >= self.failed and self.batches - self.failed_in >= BARRED:
            self.failed = barred = math.inf
        return max(0.0, min(fits, barred))

    def _line(self) -> tuple[float, float] | None:
        """Intercept and slope of the line through the measured peaks, raised until none lies above it."""
        if not self._points:
            return None
        costs, peaks = zip(*self._points, strict=True)
        mean_cost, mean_peak = sum(costs) / len(costs), sum(peaks) / len(peaks)
        spread = sum((cost - mean_cost) ** 2 for cost in costs)
        if spread == 0:  # through zero
            return 0.0, max(peaks) / mean_cost if mean_cost else 0.0
        slope = sum((cost - mean_cost) * (peak - mean_peak) for cost, peak in self._points) / spread
        slope = max(slope, 0.0)
        return max(peak - slope * cost for cost, peak in self._points), slope

    # ---- checkpoints and people

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**{name: getattr(self, name) for name in _STATE}, "points": [list(point) for point in self._points]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name in _STATE:
            setattr(self, name, state[name])
        self._points = deque(((cost, nbytes) for cost, nbytes in state["points"]), maxlen=_POINTS)

    def __str__(self) -> str:
        found = [f"cost {self.ran:g} ran"] if self.ran else []
        found += [f"{self.failed:g} did not"] if self.failed < math.inf else []
        return ", ".join(found) or "nothing yet"
