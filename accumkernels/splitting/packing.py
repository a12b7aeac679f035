"""Packs samples into micro-batches: few, none dearer than a budget, and all of them about as dear."""

from __future__ import annotations

import math
from collections.abc import Sequence

_TIGHT = 0.01  # of the budget: how near to the evenest split the search goes


class Packer:
    """Packs the samples of one batch. The same costs and limits make the same micro-batches, on every machine.

    Args:
        costs: Of each sample.
        padded: Whether a micro-batch costs its dearest sample times their number; else it costs their sum.
        most: The most samples of a micro-batch; None: any number.
        multiple_of: Sizes are multiples of it where the limits allow, but for the last one of its kind.
    """

    def __init__(
        self, costs: Sequence[float], *, padded: bool = False, most: int | None = None, multiple_of: int = 1
    ) -> None:
        self._costs = costs
        self._padded = padded
        self._most = most
        self._multiple_of = multiple_of

    def cost(self, indices: Sequence[int]) -> float:
        """What these samples cost as one micro-batch."""
        if self._padded:
            return max(self._costs[index] for index in indices) * len(indices)
        return math.fsum(self._costs[index] for index in indices)

    def pack(self, indices: Sequence[int], budget: float = math.inf, at_least: int = 1) -> list[list[int]]:
        """Pack samples, the dearest first; in micro-batches of equal samples they stay in order.

        Args:
            indices: The samples.
            budget: The most that a micro-batch may cost, unless it is one sample.
            at_least: The fewest micro-batches, if there are as many samples.
        """
        order = sorted(indices, key=lambda index: -self._costs[index])
        parts = self._cut(order, budget)
        number = max(len(parts), min(at_least, len(order)))
        if len(parts) < number:
            parts = _evenly(order, number)
        # The smallest budget that needs no more micro-batches makes them about as dear.
        low, high = 0.0, max(map(self.cost, parts))
        while high - low > _TIGHT * high:
            middle = (low + high) / 2
            tighter = self._cut(order, middle)
            if len(tighter) > number:
                low = middle
            else:
                high = middle
                parts = tighter if len(tighter) == number else parts
        # Samples that cost the same: 4, 3 and 3 rather than 4, 4 and 2.
        even = _evenly(order, number)
        if self._multiple_of == 1 and max(map(self.cost, even)) <= max(map(self.cost, parts)):
            return even
        return parts

    def split(self, indices: Sequence[int]) -> list[list[int]]:
        """Split a micro-batch of two or more samples in two that cost about the same."""
        order = list(indices)
        half, total = math.fsum(self._costs[index] for index in order) / 2, 0.0
        for cut in range(1, len(order)):
            total += self._costs[order[cut - 1]]
            if total >= half:
                break
        return [order[:cut], order[cut:]]

    def _cut(self, order: Sequence[int], budget: float) -> list[list[int]]:
        """Fill one micro-batch after another, up to the budget."""
        parts: list[list[int]] = []
        start = 0
        while start < len(order):
            first, total, stop = self._costs[order[start]], 0.0, start
            while stop < len(order) and (self._most is None or stop - start < self._most):
                total += self._costs[order[stop]]
                if stop > start and (first * (stop - start + 1) if self._padded else total) > budget:
                    break
                stop += 1
            size = stop - start
            if stop < len(order) and size > self._multiple_of:
                size -= size % self._multiple_of
            parts.append(list(order[start : start + size]))
            start += size
        return parts


def _evenly(order: Sequence[int], number: int) -> list[list[int]]:
    """Micro-batches whose numbers of samples differ by one at most, the larger ones first."""
    size, larger = divmod(len(order), number)
    starts = [size * index + min(index, larger) for index in range(number + 1)]
    return [list(order[start:stop]) for start, stop in zip(starts, starts[1:], strict=False)]
