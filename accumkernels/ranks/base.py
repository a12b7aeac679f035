"""The interface of every kind of ranks, and the values that they exchange at a window's end."""

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
from .weight_unit import SHARED_KEY


class LocalStats(NamedTuple):
    """One rank's statistics of its window when it ends; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, see `ops.schema.State`.
        touched: For each segment, in the order of buffers, 1 if it holds a sum.
        dropped: Whether this rank dropped the window.
        squares: fp64 `[2]`, `sum w_i |g_i|^2` and the squared norm of the sum; None if they are not measured.
        divisor: fp64 0-d that replaces the sum of weights; None for that sum.
        weighed_after: Whether any weight other than 1 came after its backward, too late for gradients that backward has
            already reduced over ranks.
        micro_batches: How many this rank ran.
        window: The window's number.
        resumed: Whether the window was loaded inside: with micro-batches of the run that saved it.
        loss: Makes fp64 `[2]`, the weighted sum of losses and the sum of their weights; None if no loss is known.
        norms: How many norms the step clips by: 0, 1 for the norm of all parameters, 1 + n for a list of n parts.
        limit: fp64 0-d, the clipping norm, added up over parts; None without clipping.
        averaged: Whether the sums are already averages over all ranks: the window was loaded as finalized.
        idle: For each segment, in the order of buffers, 1 if its parameter is frozen and could give it back; empty to
            give nothing back.
    """

    state: Tensor
    touched: bytes
    dropped: bool
    squares: Tensor | None
    divisor: Tensor | None
    weighed_after: bool = False
    micro_batches: int = 0
    window: int = 0
    resumed: bool = False
    loss: Callable[[], Tensor | None] = lambda: None
    norms: int = 0
    limit: Tensor | None = None
    averaged: bool = False
    idle: bytes = b""

    @property
    def loss_sums(self) -> Tensor:
        """Return the result of `loss`, or zeros if no loss is known, with the same length on every rank."""
        loss = self.loss()
        return torch.zeros_like(self.state[:2]) if loss is None else loss


class GlobalStats(NamedTuple):
    """All ranks' statistics of the window; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, zeros if any rank dropped the window.
        divisor: fp64 0-d, or None.
        squares: fp64 0-d, nan if not every rank measured it; None if this one did not.
        loss: The result of `LocalStats.loss`, summed over ranks; None if this rank's own is right.
        touched: As in `LocalStats`, by any rank; None if the host did not look and this rank's own is right.
        dropped: Whether any rank dropped it; None if only the device knows.
        weight: The sum of weights; None if only the device knows.
        error: What ranks disagree about; raise it once nobody waits for this rank any more.
        idle: As in `LocalStats`: the segments that all ranks that sum them give back when the window ends.
    """

    state: Tensor
    divisor: Tensor | None
    squares: Tensor | None
    loss: Tensor | None = None
    touched: Sequence[int] | None = None
    dropped: bool | None = None
    weight: float | None = None
    error: str | None = None
    idle: bytes = b""


class Look(Protocol):
    """Operations on a window's sums at its end, at the moments that ranks choose.

    Attributes:
        unchecked: Whether anything was added to the sums without a check for overflow.
        checks: Whether an overflow matters.
        divides: Whether to divide reduced sums at once.
    """

    unchecked: bool
    checks: bool
    divides: bool

    def check(self, norm: Tensor | None) -> Tensor:
        """Check for that overflow; the sums' `norm`, or its square, spares a pass. Returns the state afterwards."""

    def norm(self) -> Tensor:
        """Compute the norm of the undivided sums of all ranks, fp64 0-d; collective if parameters are distributed."""

    def begin_reducing(self) -> None:
        """Note that from here on, a failure loses the sums."""

    def agree(self, stats: GlobalStats) -> None:
        """Take over all ranks' statistics of the window."""

    def see(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
        """Measure and divide these parts of sums, which are reduced."""

    def squared_norm(self) -> Tensor:
        """Return the squared norm of everything seen, undivided; inf if only the division could show an overflow."""


class Ended(NamedTuple):
    """The results of ranks at the end of a window; tensors are fp64, on the first device.

    Attributes:
        stats: All ranks' statistics.
        norm: 0-d, of the sums of all ranks; None if nothing is clipped by it.
        squares: As in `LocalStats`, of all ranks.
        overflow: 0-d, not 0 if a sum over ranks is not finite, though each rank's may be; None: nobody looked.
        divided: Whether sums were divided.
    """

    stats: GlobalStats
    norm: Tensor | None
    squares: Tensor | None
    overflow: Tensor | None = None
    divided: bool = False


def end_reduced(ranks: Ranks, report: LocalStats, look: Look) -> Ended:
    """End a window whose sums are reduced now: all ranks agree first, and each part is inspected when it arrives.

    Raises:
        RuntimeError: ranks disagree; raised only after the last collective, which all of them must reach.
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
        # nan if a rank did not measure; the window then does not count
        squares=None if stats.squares is None else torch.stack([stats.squares, of_sum]),
        # each rank's sum was finite, but their total may not be
        overflow=(~torch.isfinite(of_sum)).double() if look.checks else None,
        divided=look.divides,
    )


class Ranks:
    """The ranks that share windows: the common part of all kinds, and methods that suffice if nothing must be done.

    Attributes:
        size: How many ranks share a window.
        rank: This rank's number among them.
        shards: How many of them hold different parts of the same gradients.
        shard: This rank's number among the shards.
        stage: This rank's number in a pipeline, whose ranks have different parameters.
        ends_together: Whether another rank may have micro-batches when this one has none, which must then take part.
        reduces_sums: Whether flat buffers are reduced when the window ends.
        sharded: Whether parameters are DTensors, of which a rank accumulates its local shard.
        judged_together: Whether ranks hold different parts of the same gradients, and judge them together. These are
            right only in `.grad`, once others have reduced or divided them, so nothing is taken inside modules.
        sender: Decides what to send while a backward runs.
        weight_key: Of the unit that weights in losses are counted in, see weight_unit.py.
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
    weight_key = SHARED_KEY

    def __str__(self) -> str:
        return ""

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """Refuse parameters whose gradients these ranks would not reduce."""

    def check_noise_scale(self) -> None:
        """Refuse to measure the noise scale if squares of shards do not add up."""

    # ---- while a window is open

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Reduce these flat buffers from now on, the same on all ranks; the list may grow between windows."""

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """Make ranks take these tensors, instead of the module's buffers, from rank 0 after each window."""

    # ---- at the end of a window

    def end_window(self, report: LocalStats, look: Look) -> Ended:
        """End a window together in all its steps: compare reports, reduce sums, measure them.

        If sums are whole before, because they need no reduction or backward has reduced them, unchecked ones are
        checked first, so that every rank reports it. A window loaded with averages, which cover all ranks, is not
        reduced again.

        Args:
            report: This rank's statistics.
            look: Operations on the sums.

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
        """Combine all ranks' reports; collective."""
        raise NotImplementedError

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Reduce what was not reduced, and pass every part of a touched segment to `look` when it arrives."""

    def maximum(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over ranks that hold different parts of the same gradients, in place."""
        return tensor

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """Sum over ranks that hold different parts of the same gradients, in place."""
        return tensor

    def total_norm(
        self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
    ) -> Tensor:
        """Norm over all touched segments of all ranks, or `only` those with these `id`s; 0-d fp64 on `device`.

        Nothing is read back. Orders 2 and inf take one deterministic pass of the `norm_` op; other orders use
        `torch.nn.utils.get_total_norm`.
        """
        if norm_type not in (2.0, math.inf):
            views = [view for buffer in buffers for view in buffer.touched_views(only)]
            norm = torch.nn.utils.get_total_norm(views, norm_type) if views else torch.zeros(())
            return move(norm, device, torch.float64)
        parts = []
        for buffer in buffers:
            part = torch.zeros((), dtype=torch.float64, device=buffer.device)
            buffer.ops.norm_(part, buffer.touched_views(only), ord=norm_type)
            parts.append(part if part.device == device else move(part, device))
        if len(parts) == 1:
            return parts[0].sqrt_() if norm_type == 2.0 else parts[0]
        joined = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
        return joined.sum().sqrt_() if norm_type == 2.0 else joined.amax()

    def norm_to_clip(self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device) -> Tensor:
        """Compute `total_norm`, if no rank that takes part in it ends the window without it.

        Raises:
            RuntimeError: one does; on the CPU, where the host may look.
        """
        return self.total_norm(buffers, norm_type, device)

    def end_without_clipping(self, device: torch.device) -> None:
        """Note that a window that was finalized here ends without `norm_to_clip`; raises as that does."""

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """Combine over ranks what windows sum up: by sum, or by mean if gradients are means.

        Args:
            tensor: Of the same shape on all ranks; changed.
            largest: Take the elementwise maximum instead.
        """
        return tensor

    def gather_rows(self, row: Tensor) -> Tensor:
        """Gather a row from each rank that holds another part of the same gradients, this one's at `shard`."""
        return row.unsqueeze(0)


class SingleProcess(Ranks):
    """A process that ends its windows by itself, and communicates nothing."""

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """See `Ranks`; returns this process's own report."""
        state = torch.zeros_like(report.state) if report.dropped else report.state
        squares = None if report.squares is None else report.squares[0]
        return GlobalStats(state, report.divisor, squares, idle=report.idle)
