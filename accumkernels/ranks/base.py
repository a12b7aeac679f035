"""What every kind of ranks can do for a window, and what they exchange at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter
from .sender import Sender


class LocalStats(NamedTuple):
    """What one rank knows of its window when it ends; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, see `ops.schema.State`.
        touched: For each segment, in the order of buffers, 1 where it holds a sum.
        dropped: Whether the window was dropped here.
        squares: fp64 `[2]`, `sum w_i |g_i|^2` and the squared norm of the sum; None where they are not measured.
        divisor: fp64 0-d that replaces the sum of weights; None for that sum.
        weighed_after: Whether any weight other than 1 came after its backward, where it is too late for gradients that
            backward has reduced over ranks.
        micro_batches: How many this rank ran.
        window: The window's number.
        loss: Makes fp64 `[2]`, the weighted sum of losses and the sum of their weights; None where no loss is known.
        norms: How many norms the step clips by: 0, 1 for that of all parameters, 1 + n for a list of n parts.
        limit: fp64 0-d, what it clips to, added up over parts; None without any.
        averaged: Whether the sums are averages already, of all ranks: the window was loaded as finalized.
    """

    state: Tensor
    touched: bytes
    dropped: bool
    squares: Tensor | None
    divisor: Tensor | None
    weighed_after: bool = False
    micro_batches: int = 0
    window: int = 0
    loss: Callable[[], Tensor | None] = lambda: None
    norms: int = 0
    limit: Tensor | None = None
    averaged: bool = False

    @property
    def loss_sums(self) -> Tensor:
        """What `loss` makes, zeros where none is known: of the same length on every rank."""
        loss = self.loss()
        return torch.zeros_like(self.state[:2]) if loss is None else loss


class GlobalStats(NamedTuple):
    """What all ranks know of the window together; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, zeros where any rank dropped the window.
        divisor: fp64 0-d, or None.
        squares: fp64 0-d, nan where not every rank measured it; None where this one did not.
        loss: As `LocalStats.loss` makes it, summed over ranks; None where this rank's own is right.
        touched: As in `LocalStats`, by any rank; None where the host did not look and this rank's own is right.
        dropped: Whether any rank dropped it; None where only the device knows.
        weight: The sum of weights; None where only the device knows.
        error: What ranks disagree about; to be raised once nobody waits for this rank any more.
    """

    state: Tensor
    divisor: Tensor | None
    squares: Tensor | None
    loss: Tensor | None = None
    touched: Sequence[int] | None = None
    dropped: bool | None = None
    weight: float | None = None
    error: str | None = None


class Look(Protocol):
    """What the end of a window does to its sums, at the moments that ranks choose.

    Attributes:
        unchecked: Whether something was added to the sums without a look for an overflow.
        checks: Whether an overflow matters.
        divides: Whether sums that are reduced are divided at once.
    """

    unchecked: bool
    checks: bool
    divides: bool

    def check(self, norm: Tensor | None) -> Tensor:
        """Look for that overflow; `norm` of the sums, or its square, spares a pass. Returns the state afterwards."""

    def norm(self) -> Tensor:
        """The norm of the sums of all ranks as they are, fp64 0-d; collective where parameters are not all here."""

    def begin_reducing(self) -> None:
        """From here on, a failure loses the sums."""

    def agree(self, stats: GlobalStats) -> None:
        """Take over what all ranks know of the window."""

    def see(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
        """These parts of sums are reduced: measure them, and divide them."""

    def squared_norm(self) -> Tensor:
        """Of everything seen, before it was divided; inf where only the division was to tell of an overflow."""


class Ended(NamedTuple):
    """What ranks found at the end of a window; tensors are fp64, on the first device.

    Attributes:
        stats: What all know together.
        norm: 0-d, of the sums of all ranks; None where nothing is clipped by it.
        squares: As in `LocalStats`, of all ranks.
        overflow: 0-d, not 0 where a sum over ranks is not finite, though each rank's may be; None: nobody looked.
        divided: Whether sums were divided.
    """

    stats: GlobalStats
    norm: Tensor | None
    squares: Tensor | None
    overflow: Tensor | None = None
    divided: bool = False


def end_reduced(ranks: Ranks, report: LocalStats, look: Look) -> Ended:
    """End a window whose sums are reduced now: all ranks agree first, and each part is looked at when it is there.

    Raises:
        RuntimeError: ranks disagree; only when the last collective is over, since all of them have to come to it.
    """
    look.begin_reducing()
    stats = ranks.all_reduce_stats(report)
    look.agree(stats)
    ranks.reduce(look.see)
    if stats.error is not None:
        raise RuntimeError(stats.error)
    if report.norms != 1 and stats.squares is None and not look.checks:
        look.check(None)
        return Ended(stats, None, None, divided=look.divides)
    of_sum = ranks.sum_over_shards(look.squared_norm())
    look.check(of_sum)
    return Ended(
        stats,
        norm=of_sum.sqrt() if report.norms == 1 else None,
        # nan where a rank did not measure, and then the window does not count
        squares=None if stats.squares is None else torch.stack([stats.squares, of_sum]),
        # each rank's sum was finite; theirs together may not be
        overflow=(~torch.isfinite(of_sum)).double() if look.checks else None,
        divided=look.divides,
    )


class Ranks:
    """The ranks that share windows: what all kinds have in common, and the right thing where nothing is to be done.

    Attributes:
        size: How many ranks share a window.
        rank: Which of them this is.
        shards: How many of them hold different parts of the same gradients.
        shard: Which of these this is.
        stage: Which rank of a pipeline this is; each has other parameters.
        ends_together: Whether another rank may have micro-batches where this one has none, which then takes part.
        reduces_sums: Whether flat buffers are reduced when the window ends.
        sharded: Whether parameters are DTensors, of which a rank accumulates its local shard.
        judged_together: Whether ranks hold different parts of the same gradients, so that all of them are judged. Those
            are right in `.grad` alone, where others have reduced or divided them: nothing is taken inside modules.
        sender: Decides what is sent while a backward runs.
    """

    size = 1
    rank = 0
    shards = 1
    shard = 0
    stage = 0
    ends_together = False
    reduces_sums = False
    sharded = False
    judged_together = False
    sender = Sender()

    def __str__(self) -> str:
        return ""

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """Refuse parameters whose gradients these ranks would not reduce."""

    def check_noise_scale(self) -> None:
        """Refuse to measure the noise scale where squares of shards do not add up."""

    # ---- while a window is open

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Reduce these flat buffers from now on; the list may grow between windows."""

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """Let ranks take these tensors from rank 0 after each window, in place of the module's buffers."""

    # ---- at its end

    def end_window(self, report: LocalStats, look: Look) -> Ended:
        """End a window together, whatever that takes: compare reports, reduce sums, measure them.

        Where sums are whole before, since they need no reduction or backward has done it, what nobody has looked at is
        checked first, so that every rank reports it. A window that was loaded with averages, which are those of all
        ranks, is not reduced again.

        Args:
            report: What this rank knows.
            look: What is to be done to the sums.

        Raises:
            RuntimeError: ranks disagree, in the same words on all of them.
        """
        if self.reduces_sums:
            return SingleProcess().end_window(report, look) if report.averaged else end_reduced(self, report, look)
        norm = None
        clips = report.norms == 1
        if look.unchecked:
            norm = look.norm() if clips else None
            report = report._replace(state=look.check(norm))
        stats = self.all_reduce_stats(report)
        if stats.error is not None:
            raise RuntimeError(stats.error)
        if self.judged_together:
            look.agree(stats)
        squares = None if report.squares is None else self.sum_over_shards(report.squares)
        if clips and norm is None:
            norm = look.norm()
        return Ended(stats, norm, squares)

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine what all ranks report; collective."""
        raise NotImplementedError

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Reduce what was not reduced, and hand every part of a touched segment to `look` when it is there."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over ranks that hold different parts of the same gradients, in place."""
        return tensor

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over ranks that hold different parts of the same gradients, in place."""
        return tensor

    def total_norm(
        self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
    ) -> Tensor:
        """The norm over all touched segments of all ranks, or `only` those with these `id`s; 0-d fp64 on `device`.

        Nothing is read back. Orders 2 and inf take one deterministic pass of the `norm_` op; for other orders torch's
        own `torch.nn.utils.get_total_norm` is asked.
        """
        if norm_type not in (2.0, math.inf):
            views = [view for buffer in buffers for view in buffer.touched_views(only)]
            return move(torch.nn.utils.get_total_norm(views, norm_type), device, torch.float64)
        parts = []
        for buffer in buffers:
            part = torch.zeros((), dtype=torch.float64, device=buffer.device)
            buffer.ops.norm_(part, buffer.touched_views(only), ord=norm_type)
            parts.append(part if part.device == device else move(part, device))
        if len(parts) == 1:
            return parts[0].sqrt_() if norm_type == 2.0 else parts[0]
        joined = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
        return joined.sum().sqrt_() if norm_type == 2.0 else joined.amax()

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """What ranks have together of something that windows sum up: its sum, or mean where gradients are means.

        Args:
            tensor: Of the same shape on all ranks; changed.
            largest: Their elementwise maximum instead.
        """
        return tensor

    def gather_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks that hold different parts of the same gradients, this one's at `shard`."""
        return row.unsqueeze(0)


class SingleProcess(Ranks):
    """A process that ends its windows by itself, and communicates nothing."""

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """See `Ranks`; what this one reports."""
        state = torch.zeros_like(report.state) if report.dropped else report.state
        squares = None if report.squares is None else report.squares[0]
        return GlobalStats(state, report.divisor, squares)
