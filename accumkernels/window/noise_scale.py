"""The critical batch size, from gradient norms that the accumulate pass measures anyway.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An Empirical Model of Large-Batch Training", 2018,
arXiv:1812.06162, appendix A.1, here for any number of micro-batches of unequal weights.

Let micro-batch i be the mean over `w_i` independent samples whose gradients have mean G and covariance Sigma. With
`W = sum w_i` and `gbar = sum w_i g_i / W`::

    E |g_i|^2  = |G|^2 + tr(Sigma) / w_i      hence  E sum w_i |g_i|^2 = W |G|^2 + K tr(Sigma)
    E |gbar|^2 = |G|^2 + tr(Sigma) / W        hence  E W |gbar|^2      = W |G|^2 +   tr(Sigma)

so that for K >= 2 these are unbiased::

    tr(Sigma) = (sum w_i |g_i|^2 - W |gbar|^2) / (K - 1)
    |G|^2     = |gbar|^2 - tr(Sigma) / W

The ratio tr(Sigma) / |G|^2 is the simple noise scale: the batch size up to which a larger batch still pays. A ratio of
two noisy numbers is biased, so each is averaged over windows before the division.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buffers.flat import SquaredNorms
from ..buffers.parameters import move
from ..ops.schema import State
from ..ranks.base import Ranks


class _Sums(enum.IntEnum):
    """Indices into the running sums, fp64 `[4]`."""

    GRAD = 0
    TRACE = 1
    WEIGHT = 2  # number of windows in the averages, or less with a half-life
    WINDOWS = 3


class NoiseScale:
    """A measurement of the critical batch size, in the unit of `weight`. It is read from the device only when asked.

    `float()` gives `trace / grad_squared_norm`: nan before the first window that counts, and negative while the
    estimate of `|G|^2` is negative, which means that more windows are needed.
    """

    def __init__(self, averages: Tensor) -> None:
        self._averages = averages

    @functools.cached_property
    def _values(self) -> list[float]:
        return self._averages.tolist()

    def _mean(self, index: int) -> float:
        total = self._values[_Sums.WEIGHT]
        return self._values[index] / total if total else math.nan

    @property
    def grad_squared_norm(self) -> float:
        """`|G|^2`, the squared norm of the true gradient, averaged over windows."""
        return self._mean(_Sums.GRAD)

    @property
    def trace(self) -> float:
        """`tr(Sigma)`, the summed variance of one sample's gradient, averaged over windows."""
        return self._mean(_Sums.TRACE)

    @property
    def windows(self) -> int:
        """The number of windows measured: stepped ones with at least two micro-batches of positive weight."""
        return int(self._values[_Sums.WINDOWS])

    def tensor(self) -> Tensor:
        """Return `float()`'s value as a 0-d fp64 tensor, without reading it."""
        return self._averages[_Sums.TRACE] / self._averages[_Sums.GRAD]

    def __float__(self) -> float:
        square = self.grad_squared_norm
        return self.trace / square if square else math.nan

    def __repr__(self) -> str:
        return (
            f"NoiseScale({float(self):.6g}, grad_squared_norm={self.grad_squared_norm:.6g}, trace={self.trace:.6g}, "
            f"windows={self.windows})"
        )


class NoiseMeter:
    """Keeps the sums behind `NoiseScale` on the device.

    Args:
        half_life: Number of windows after which a measurement counts half; None: all count the same.
        on: Whether to measure windows from the first one on.
        ranks: Tell how many rows of squares there are, if each rank has its own.

    Attributes:
        on: Whether windows are measured that open from now on.
    """

    def __init__(self, half_life: float | None, on: bool, ranks: Ranks) -> None:
        self.on = on
        self._ranks = ranks
        self._keep = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._sums: Tensor | None = None

    def turn_on(self) -> None:
        """Measure from the next window on."""
        self._ranks.check_noise_scale()
        self.on = True

    def succeed(self, before: NoiseMeter) -> None:
        """Go on from where another one has stopped."""
        self._sums = before._sums
        if before.on:
            self.turn_on()

    def end_window(self, state: Tensor, skip: Tensor, sums: Tensor) -> None:
        """Add a window that ends, unless it is skipped or has fewer than two micro-batches with weight.

        Args:
            state: The accumulator's state, fp64 `[4]`.
            skip: 0-d, 1.0 where the step does not happen.
            sums: Those of the window's `SquaredNorms`, or their sum over ranks.
        """
        weight, used = state[State.WEIGHT], state[State.USED]
        of_micro_batches, of_sum = sums
        of_mean = of_sum / weight.square()
        trace = (of_micro_batches - weight * of_mean) / (used - 1)
        window = torch.stack([of_mean - trace / weight, trace, torch.ones_like(trace)])
        counts = (used >= 2) & (skip == 0) & torch.isfinite(window).all()
        if self._sums is None:
            self._sums = torch.zeros(4, dtype=torch.float64, device=state.device)
        averaged = self._sums[: _Sums.WINDOWS]
        averaged.copy_(torch.where(counts, averaged * self._keep + window, averaged))
        self._sums[_Sums.WINDOWS] += counts

    def state_dict(
        self, norms: SquaredNorms | None, device: torch.device, joined: Iterable[Tensor] | None = None
    ) -> dict[str, object]:
        """Return the averages and the open window's sums, with one row for each rank that has its own.

        Args:
            norms: The window's, if it is measured.
            device: The first device.
            joined: The window's sums over all ranks, if the state covers all of them; collective then.
        """
        squares = None
        if norms is not None or (joined is not None and self.on):
            total = (norms or SquaredNorms()).sums(device)
            if joined is not None:
                total = self._ranks.joined(total)
                total[1] = sum(move(sum_.double().square().sum(), device) for sum_ in joined)
            squares = self._ranks.gather_rows(total).tolist()
        return {
            "on": self.on,
            "measuring": norms is not None,
            "averages": None if self._sums is None else self._sums.tolist(),
            "squares": squares,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> SquaredNorms | None:
        """Load a `state_dict`, with averages on `device`, and return what belongs to its window."""
        self.on = state["on"]
        averages, rows = (
            None if state[key] is None else torch.tensor(state[key], dtype=torch.float64, device=device)
            for key in ("averages", "squares")
        )
        self._sums = averages
        if not state["measuring"]:
            return None
        if rows is None:
            return SquaredNorms()
        row, ranks = self._ranks.shard, self._ranks.shards
        if len(rows) != ranks:  # the sharding differs from the saved one, so only the sum matters
            rows = torch.nn.functional.pad(rows.sum(0, keepdim=True), (0, 0, 0, ranks - 1))
        return SquaredNorms.of(rows[row].clone())

    def read(self) -> NoiseScale:
        """Take a snapshot of the averages."""
        return NoiseScale(torch.zeros(4, dtype=torch.float64) if self._sums is None else self._sums.clone())
