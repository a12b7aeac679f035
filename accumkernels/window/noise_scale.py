"""The critical batch size, from norms of gradients that the accumulate pass measures anyway.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An Empirical Model of Large-Batch Training", 2018,
arXiv:1812.06162, appendix A.1, here for any number of micro-batches of unequal weights.

Let micro-batch i be the mean over `w_i` independent samples whose gradients have mean G and covariance Sigma. With
`W = sum w_i` and `gbar = sum w_i g_i / W`::

    E |g_i|^2  = |G|^2 + tr(Sigma) / w_i      hence  E sum w_i |g_i|^2 = W |G|^2 + K tr(Sigma)
    E |gbar|^2 = |G|^2 + tr(Sigma) / W        hence  E W |gbar|^2      = W |G|^2 +   tr(Sigma)

so that these are unbiased, for K >= 2::

    tr(Sigma) = (sum w_i |g_i|^2 - W |gbar|^2) / (K - 1)
    |G|^2     = |gbar|^2 - tr(Sigma) / W

The ratio tr(Sigma) / |G|^2 is the simple noise scale, the batch size up to which a larger batch still pays. The ratio
of two noisy numbers is biased, therefore each is averaged over windows before they are divided.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.flat import FlatBuffer
from ..ops.schema import State
from ..ranks.base import Ranks


class _Sums(enum.IntEnum):
    """Indices into the running sums, fp64 `[4]`."""

    GRAD = 0
    TRACE = 1
    WEIGHT = 2  # of the windows in the averages: their number, or less with a half-life
    WINDOWS = 3


class NoiseScale:
    """A measurement of the critical batch size, in the unit of `weight`. Nothing is read from the device until asked.

    `float()` of it is `trace / grad_squared_norm`: nan before the first window that counts, and negative while the
    estimate of `|G|^2` is, which means that more windows are needed.
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
        """`|G|^2`, the squared norm of the true gradient; averaged over windows."""
        return self._mean(_Sums.GRAD)

    @property
    def trace(self) -> float:
        """`tr(Sigma)`, the summed variance of one sample's gradient; averaged over windows."""
        return self._mean(_Sums.TRACE)

    @property
    def windows(self) -> int:
        """Windows measured: stepped ones with at least two micro-batches of positive weight."""
        return int(self._values[_Sums.WINDOWS])

    def tensor(self) -> Tensor:
        """`float()` of it as a 0-d fp64 tensor, without reading it."""
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
    """Keeps the sums behind `NoiseScale`, on the device.

    Args:
        half_life: Windows after which a measurement counts half; None: all count the same.
        on: Whether windows are measured from the first on.
        ranks: Tell how many rows of squares there are, where each rank has its own.

    Attributes:
        on: Whether windows are measured, from the next `open_window` on.
    """

    def __init__(self, half_life: float | None, on: bool, ranks: Ranks) -> None:
        self.on = on
        self._ranks = ranks
        self._keep = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._sums: Tensor | None = None
        self._squares: dict[torch.device, Tensor] = {}
        self.measuring = False
        self._serial = 0  # of the micro-batch under way
        self._seen: dict[FlatBuffer, set[int]] = {}  # segments that got their gradient in it

    def turn_on(self, now: bool) -> None:
        """Measure from the next window on, or from the open one on (`now`), to which nothing was added yet."""
        self._ranks.check_noise_scale()
        self.on = True
        if now:
            self.open_window()

    def open_window(self) -> None:
        """Forget the squares of the window that ended."""
        self.measuring = self.on
        for squares in self._squares.values():
            squares.zero_()
        self._serial, self._seen = 0, {}

    def squares(self, device: torch.device) -> Tensor | None:
        """What the accumulate pass adds to on `device`, as `sq_norm` of `accumulate_`; None where nothing measures."""
        if not self.measuring:
            return None
        if device not in self._squares:
            self._squares[device] = torch.zeros(2, dtype=torch.float64, device=device)
        return self._squares[device]

    def see(self, buffer: FlatBuffer, segments: Sequence[int], serial: int) -> None:
        """Note whose gradients the accumulate pass adds for micro-batch `serial`.

        Its squared norm is the sum of those of its buckets, unless a parameter's gradient comes in several parts: then
        the window does not count.
        """
        if not self.measuring:
            return
        if serial != self._serial:
            self._serial, self._seen = serial, {}
        seen = self._seen.setdefault(buffer, set())
        if not seen.isdisjoint(segments):
            self._squares[buffer.device].fill_(torch.nan)
        seen.update(segments)

    def sums(self, device: torch.device) -> Tensor | None:
        """fp64 `[2]`: `sum w_i |g_i|^2` of the window and the squared norm of its sum; None where nothing measures."""
        return self._total(device) if self.measuring else None

    def _total(self, device: torch.device) -> Tensor:
        parts = [move(squares, device) for squares in self._squares.values()]
        return torch.stack(parts).sum(0) if parts else torch.zeros(2, dtype=torch.float64, device=device)

    def end_window(self, state: Tensor, skip: Tensor, sums: Tensor | None) -> None:
        """Take in a window that ends, if it is not skipped and has two or more micro-batches with weight.

        Args:
            state: The accumulator's state, fp64 `[4]`.
            skip: 0-d, 1.0 where the step does not happen.
            sums: As `sums()` gives them, or those of all ranks together.
        """
        if sums is None:
            return
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

    def state_dict(self, device: torch.device, joined: Iterable[Tensor] | None = None) -> dict[str, object]:
        """The averages, and the sums of the window that is open: one row for each rank that has its own.

        Args:
            device: The first device.
            joined: The window's sums over all ranks, where the state is to be that of all; collective then.
        """
        squares = None
        if self._squares or (joined is not None and self.on):
            total = self._total(device)
            if joined is not None:
                total = self._ranks.joined(total)
                total[1] = sum(move(sum_.double().square().sum(), device) for sum_ in joined)
            squares = self._ranks.gather_rows(total).tolist()
        return {
            "on": self.on,
            "measuring": self.measuring,
            "averages": None if self._sums is None else self._sums.tolist(),
            "squares": squares,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a `state_dict`, with averages on `device`."""
        self.on, self.measuring = state["on"], state["measuring"]
        averages, rows = (
            None if state[key] is None else torch.tensor(state[key], dtype=torch.float64, device=device)
            for key in ("averages", "squares")
        )
        self._sums = averages
        self._squares = {}
        if rows is not None:
            row, ranks = self._ranks.shard, self._ranks.shards
            if len(rows) != ranks:  # parameters are cut otherwise than when saved: only the sum matters
                rows = torch.nn.functional.pad(rows.sum(0, keepdim=True), (0, 0, 0, ranks - 1))
            self._squares[device] = rows[row].clone()

    def read(self) -> NoiseScale:
        """A snapshot of the averages."""
        return NoiseScale(torch.zeros(4, dtype=torch.float64) if self._sums is None else self._sums.clone())
