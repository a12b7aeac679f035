"""Packs samples into micro-batches: few, none dearer than a budget, and all of them about as dear."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

_TIGHT = 0.01  # of the dearest micro-batch: how near to the evenest packing the search goes


class _Sorted:
    """Samples by their costs, the dearest first; micro-batches are runs of them, given by their bounds."""

    def __init__(self, indices: Sequence[int], costs: Sequence[float], padded: bool) -> None:
        self.indices = sorted(indices, key=lambda index: -costs[index])
        self.costs = [costs[index] for index in self.indices]
        self._padded = padded
        self._sums = [0.0, *itertools.accumulate(self.costs)]

    def cost(self, start: int, stop: int) -> float:
        """What a run costs as one micro-batch."""
        if self._padded:
            return self.costs[start] * (stop - start)
        return math.fsum(self.costs[start:stop])

    def dearest(self, bounds: Sequence[int]) -> float:
        """What the dearest of all runs costs."""
        return max(itertools.starmap(self.cost, itertools.pairwise(bounds)))

    def reach(self, start: int, budget: float) -> int:
        """Where the longest run from `start` ends that costs no more than `budget`, or is a single sample."""
        stop = len(self.costs)
        if self._padded and self.costs[start] * (stop - start) > budget:
            stop = start + int(budget / self.costs[start])
        elif not self._padded:
            stop = bisect.bisect_right(self._sums, self._sums[start] + budget, start) - 1
        while stop > start + 1 and self.cost(start, stop) > budget:  # the sums are rounded
            stop -= 1
        return max(stop, start + 1)

    def runs(self, bounds: Sequence[int]) -> list[list[int]]:
        """The samples of each run."""
        return [self.indices[start:stop] for start, stop in itertools.pairwise(bounds)]


class Packer:
    """Packs the samples of one batch. The same costs and limits make the same micro-batches, on every machine.

    Args:
        costs: Of each sample.
        padded: Whether a micro-batch costs its dearest sample times their number; else it costs their sum.
        most: The most samples of a micro-batch; None: any number.
        multiple_of: Sizes are multiples of it where the limits allow, except the last one; if it is not 1, they are few
            rather than even.
    """

    def __init__(
        self, costs: Sequence[float], *, padded: bool = False, most: int | None = None, multiple_of: int = 1
    ) -> None:
        self._costs = costs
        self._padded = padded
        self._most = most
        self._multiple_of = multiple_of

    def __len__(self) -> int:
        return len(self._costs)

    def cost(self, indices: Sequence[int]) -> float:
        """What these samples cost as one micro-batch."""
        costs = [self._costs[index] for index in indices]
        return max(costs, default=0.0) * len(costs) if self._padded else math.fsum(costs)

    def pack(self, budget: float = math.inf, at_least: int = 1) -> list[list[int]]:
        """Pack all samples, the dearest first; samples that cost the same stay in order.

        Args:
            budget: The most that a micro-batch may cost, unless it is one sample.
            at_least: The fewest micro-batches, if there are as many samples.
        """
        if not self._costs:
            return []
        order = _Sorted(range(len(self)), self._costs, self._padded)
        bounds = self._cut(order, budget)
        if self._multiple_of == 1 and order.costs[0] <= budget:  # else it would give free samples to one that is alone
            bounds = self._even(order, bounds)
        parts = order.runs(bounds)
        while len(parts) < min(at_least, len(self)):
            dearest = max(range(len(parts)), key=lambda number: (len(parts[number]) > 1, self.cost(parts[number])))
            parts[dearest : dearest + 1] = self.split(parts[dearest])
        return parts

    def split(self, indices: Sequence[int]) -> list[list[int]]:
        """Split a micro-batch of two or more samples in two that cost about the same."""
        order = list(indices)
        sums = list(itertools.accumulate(self._costs[index] for index in order))
        half = bisect.bisect_left(sums, sums[-1] / 2) + 1 if sums[-1] else len(order) // 2
        cut = min(half, len(order) - 1)
        if cut > self._multiple_of:
            cut -= cut % self._multiple_of
        return [order[:cut], order[cut:]]

    def _cut(self, order: _Sorted, budget: float) -> list[int]:
        """Fill one micro-batch after another, up to the budget."""
        bounds, count = [0], len(self)
        while (start := bounds[-1]) < count:
            stop = order.reach(start, budget)
            if self._most is not None:
                stop = min(stop, start + self._most)
            if stop < count and stop - start > self._multiple_of:
                stop -= (stop - start) % self._multiple_of
            bounds.append(stop)
        return bounds

    def _even(self, order: _Sorted, bounds: list[int]) -> list[int]:
        """As many micro-batches as these, about as dear as each other."""
        # The smallest budget that needs no more of them.
        low, high = order.costs[0], order.dearest(bounds)
        while high - low > _TIGHT * high:
            middle = (low + high) / 2
            tighter = self._cut(order, middle)
            if len(tighter) > len(bounds):
                low = middle
            else:
                bounds, high = tighter, min(middle, order.dearest(tighter))
        # Samples that cost the same: 4, 3 and 3 rather than 4, 4 and 2.
        size, larger = divmod(len(self), len(bounds) - 1)
        even = [size * number + min(number, larger) for number in range(len(bounds))]
        return even if order.dearest(even) <= order.dearest(bounds) else bounds
