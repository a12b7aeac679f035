"""What a device's memory has shown to hold: costs that ran, costs that did not, and the line through measured peaks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

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

    def see(self, cost: float, nbytes: float | None) -> None:
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

    def proven(self, cost: float) -> bool:
        """Whether a micro-batch of this cost has run."""
        return 0 < cost <= self.ran

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
