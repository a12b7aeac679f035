"""What a device's memory has shown to hold: costs that ran, costs that did not, and the line through measured peaks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

MARGIN = 0.05  # of the memory, which stays free where a cost is tried that has not run yet
BARRED = 50  # windows for which a cost that failed is not tried again
_POINTS = 32


class Learned:
    """What was learnt about the costs of micro-batches.

    Peaks are bytes beyond those that were alive before the micro-batch, so that what else is allocated later counts.

    Attributes:
        ran: The largest cost that ran.
        failed: The smallest cost that ran out of memory and is barred; inf if none is.
        splits: Windows in which memory ran out, of all `windows`.
    """

    def __init__(self) -> None:
        self.ran = 0.0
        self.failed = math.inf
        self.windows = 0
        self.splits = 0
        self._ran_bytes: float | None = None
        self._failed_in = 0
        self._points: deque[tuple[float, float]] = deque(maxlen=_POINTS)

    # ---- what happens

    def see(self, cost: float, nbytes: float | None) -> None:
        """A micro-batch of this cost ran; `nbytes` is its peak if it was measured."""
        if nbytes is not None:
            self._points.append((cost, nbytes))
        if cost >= self.ran:
            self.ran, self._ran_bytes = cost, nbytes if nbytes is not None else self._ran_bytes
        if cost >= self.failed:  # it was tried since the line said so
            self.failed = math.inf

    def fail(self, cost: float) -> None:
        """A micro-batch of this cost ran out of memory, or beyond the limit."""
        self.failed, self._failed_in = min(self.failed, cost), self.windows
        if self.ran >= self.failed:
            self.ran, self._ran_bytes = 0.0, None

    def end_window(self, split: bool) -> None:
        """Count a window, in which memory ran out or not."""
        self.windows += 1
        self.splits += split

    # ---- what to try

    def proven(self, cost: float) -> bool:
        """Whether a micro-batch of this cost has run."""
        return cost <= self.ran

    def expect(self, cost: float) -> float | None:
        """The bytes that the line through the peaks expects of a cost; None without a line."""
        line = self._line()
        return None if line is None else line[0] + line[1] * cost

    def budget(self, whole: float, free: float | None) -> float:
        """The largest cost to try, of a batch that costs `whole`.

        Args:
            whole: What the batch costs as one micro-batch.
            free: Bytes that a micro-batch may take; None if that is not known.
        """
        line = self._line()
        if free is None or line is None:  # errors alone say what does not fit
            return whole if whole < self.failed else self.ran or self.failed / 2
        usable = free - MARGIN * max(free, 0.0)
        fits = math.inf if line[1] <= 0 else max(0.0, (usable - line[0]) / line[1])
        if self._ran_bytes is not None and self._ran_bytes <= free:
            fits = max(fits, self.ran)
        if self.failed < math.inf:
            if self.windows - self._failed_in >= BARRED and fits >= self.failed:
                self.failed = math.inf
            else:
                fits = min(fits, max(self.ran, math.nextafter(self.failed, 0.0)))
        return fits

    def _line(self) -> tuple[float, float] | None:
        """Intercept and slope of the line through the measured peaks, raised until none lies above it."""
        if not self._points:
            return None
        costs, peaks = zip(*self._points, strict=True)
        mean_cost, mean_peak = sum(costs) / len(costs), sum(peaks) / len(peaks)
        spread = sum((cost - mean_cost) ** 2 for cost in costs)
        if spread == 0:  # through zero
            return 0.0, max(peaks) / costs[0] if costs[0] else 0.0
        slope = sum((c - mean_cost) * (p - mean_peak) for c, p in self._points) / spread
        slope = max(slope, 0.0)
        return max(peak - slope * cost for cost, peak in self._points), slope

    # ---- checkpoints and people

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        names = ("ran", "failed", "windows", "splits", "_ran_bytes", "_failed_in")
        return {**{name.lstrip("_"): getattr(self, name) for name in names}, "points": [list(p) for p in self._points]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name in ("ran", "failed", "windows", "splits"):
            setattr(self, name, state[name])
        self._ran_bytes, self._failed_in = state["ran_bytes"], state["failed_in"]
        self._points = deque(map(tuple, state["points"]), maxlen=_POINTS)

    def __str__(self) -> str:
        found = [f"cost {self.ran:g} ran"] if self.ran else []
        found += [f"{self.failed:g} did not"] if self.failed < math.inf else []
        return ", ".join(found) or "nothing yet"
