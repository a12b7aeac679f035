"""The interface of every kind of ranks, and the values that they exchange at a window's end."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter, move, worst
from .group import Group, difference
from .sender import Sender, Sent

SHARED_KEY = "accumkernels/unit of weights"


class LocalStats(NamedTuple):
    """One rank's statistics of its window when it ends; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, see `ops.schema.State`.
        touched: For each segment, in the order of buffers, 1 if it holds a sum.
        dropped: Whether this rank dropped the window.
        squares: fp64 `[2]`, `sum w_i |g_i|^2` and the squared norm of the sum; None if they are not measured.
        weights: With squares, a number that tells whether micro-batches have the same weights on all ranks.
        divisor: fp64 0-d that replaces the sum of weights; None for that sum.
        sent: What it has sent before the end.
        weighed_after: Whether any weight other than 1 came after its backward, too late for gradients that backward has
            already reduced over ranks.
        micro_batches: How many this rank ran.
        window: The window's number.
        resumed: Whether the window was loaded inside: with micro-batches of the run that saved it.
        loaded: See `Window`.
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
    sent: Sent
    weighed_after: bool = False
    micro_batches: int = 0
    window: int = 0
    resumed: bool = False
    loaded: int = 0
    loss: Callable[[], Tensor | None] = lambda: None
    norms: int = 0
    limit: Tensor | None = None
    averaged: bool = False
    idle: bytes = b""
    weights: float | Tensor = 0.0

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
        squares: fp64 0-d, nan if not every rank measured it, or none could; None if this one did not.
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


class Inspector(Protocol):
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

    def adopt(self, stats: GlobalStats) -> None:
        """Take over all ranks' statistics of the window."""

    def inspect(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
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


def end_reduced(ranks: Ranks, report: LocalStats, inspector: Inspector) -> Ended:
    """End a window whose sums are reduced now: all ranks agree first, and each part is inspected when it arrives.

    Raises:
        RuntimeError: ranks disagree; raised only after the last collective, which all of them must reach.
    """
    inspector.begin_reducing()
    stats = ranks.all_reduce_stats(report)
    inspector.adopt(stats)
    ranks.reduce(report.sent, inspector.inspect)
    if stats.error is not None:
        raise RuntimeError(stats.error)
    if report.norms != 1 and stats.squares is None and not inspector.checks:
        inspector.check(None)
        return Ended(stats, None, None, divided=inspector.divides)
    of_sum = ranks.sum_over_shards(inspector.squared_norm())
    inspector.check(of_sum)
    return Ended(
        stats,
        norm=of_sum.sqrt() if report.norms == 1 else None,
        # nan if a rank did not measure; the window then does not count
        squares=None if stats.squares is None else torch.stack([stats.squares, of_sum]),
        # each rank's sum was finite, but their total may not be
        overflow=(~torch.isfinite(of_sum)).double() if inspector.checks else None,
        divided=inspector.divides,
    )


class Ranks:
    """The ranks that share windows: the common part of all kinds, and methods that suffice if nothing must be done.

    Attributes:
        size: How many ranks share a window.
        rank: This rank's number among them.
        averaged_over: How many ranks with samples of their own sums and weights are means over; 1: they are totals.
        shards: How many of them hold different parts of the same gradients.
        shard: This rank's number among the shards.
        stage: This rank's number in a pipeline, whose ranks have different parameters.
        has_stages: Whether there is a pipeline, of which a rank may have nothing to train.
        ends_together: Whether another rank may have micro-batches when this one has none, which must then take part.
        reduces_sums: Whether flat buffers are reduced when the window ends.
        rounds: Whether one of several with different parameters may round gradients to 16 bit; then all ask each other
            whether rounding has overflowed.
        sender: Decides what to send while a backward runs.
        unnamed: What is not finite in a dropped micro-batch if none of this rank's gradients is.
        weight_key: Of the unit that weights in losses are counted in, see below.
    """

    size = 1
    rank = 0
    averaged_over = 1
    shards = 1
    shard = 0
    stage = 0
    has_stages = False
    ends_together = False
    reduces_sums = False
    rounds = False
    sender = Sender()
    unnamed = "the weight"
    weight_key = SHARED_KEY

    def __str__(self) -> str:
        return ""

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """Refuse parameters whose gradients these ranks would not reduce."""

    def check_noise_scale(self) -> None:
        """Refuse to measure the noise scale if squares of shards do not add up."""

    def prepare_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Make the scale of a scaler that has none if only another rank may scale losses."""

    # ---- while a window is open

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Reduce these flat buffers from now on, the same on all ranks; the list may grow between windows."""

    # ---- at the end of a window

    def end_window(self, report: LocalStats, inspector: Inspector) -> Ended:
        """End a window together in all its steps: compare reports, reduce sums, measure them.

        If sums are whole before, because they need no reduction or backward has reduced them, unchecked ones are
        checked first, so that every rank reports it. A window loaded with averages, which cover all ranks, is not
        reduced again.

        Args:
            report: This rank's statistics.
            inspector: Operations on the sums.

        Raises:
            RuntimeError: ranks disagree, in the same words on all of them.
        """
        if self.reduces_sums and report.averaged:
            return SingleProcess().end_window(report, inspector)
        if self.reduces_sums:
            return end_reduced(self, report, inspector)
        norm = None
        clips = report.norms == 1
        if inspector.unchecked:
            norm = inspector.norm() if clips else None
            report = report._replace(state=inspector.check(norm))
        stats = self.all_reduce_stats(report)
        if stats.error is not None:
            raise RuntimeError(stats.error)
        if stats.loss is not None:  # other ranks take part
            inspector.adopt(stats)
        squares = None if report.squares is None else self.sum_over_shards(report.squares)
        if squares is not None and stats.squares is not None:
            squares = torch.where(stats.squares.isnan(), torch.nan, squares)  # all ranks know that it does not count
        if clips and norm is None:
            norm = inspector.norm()
        return Ended(stats, norm, squares)

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports; collective."""
        raise NotImplementedError

    def reduce(self, sent: Sent, inspect: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Reduce what was not reduced, and pass every part of a touched segment to `inspect` when it arrives."""

    def worst(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Take the maximum of one tensor per device, and over ranks with other parts of the same gradients."""
        return tensors[0] if len(tensors) == 1 else worst(tensors, device)

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

    # ---- checkpoints, and whatever else ranks must be asked

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """Combine over ranks what windows sum up: by sum, or by mean if gradients are means.

        Args:
            tensor: Of the same shape on all ranks; changed.
            largest: Take the elementwise maximum instead.
        """
        return tensor

    def largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the largest of each integer on any rank; collective."""
        return [int(n) for n in self.joined(torch.tensor(numbers, device=device), largest=True).tolist()]

    def portion(self, averaged_over: float) -> float:
        """Return this rank's part of the sums in a state of all ranks, which are means over `averaged_over` of them."""
        return averaged_over if self.rank == 0 else 0.0

    def gather_rows(self, row: Tensor) -> Tensor:
        """Gather a row from each rank that holds another part of the same gradients, this one's at `shard`."""
        return row.unsqueeze(0)


class PartialRanks(Ranks):
    """Ranks that hold different parts of the same gradients, and therefore decide about them together."""

    unnamed = "the weight, or gradients on another rank"
    _group: Group
    _alike = "meshes of params", "ranks"  # in an error: what they are part of, and what they are
    _compared: int | None = None  # the number of norms for which the host has compared all ranks' reports

    def check_alike(self, **options: object) -> None:
        """Check that accumulators of all ranks end windows alike; collective.

        Raises:
            RuntimeError: on all ranks, with the first difference.
        """
        if found := difference([list(theirs.items()) for theirs in self._group.gather(options)]):
            rank, (key, value), (_, other) = found
            whole, parts = self._alike
            raise RuntimeError(
                f"{whole}: rank 0 has {key}={value!r}, rank {rank} has {other!r}; all {parts} must be alike"
            )

    def prepare_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """See `Ranks`: only the last stage of a pipeline has losses."""
        scaler.scale(torch.zeros((), device=scaler._device))

    def worst(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """See `Ranks`; collective."""
        return self.maximum(worst(tensors, device))

    def _host_reads(self, report: LocalStats) -> bool:
        """Whether the host reads what ranks agree on: on the CPU; elsewhere in windows that may be wrong.

        These are the first window, those with a divisor, and those in which the clipping changes.
        """
        changes, self._compared = self._compared != report.norms, report.norms
        return changes or report.state.device.type == "cpu" or report.divisor is not None


class SingleProcess(Ranks):
    """A process that ends its windows by itself, and communicates nothing."""

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """See `Ranks`; returns this process's own report."""
        state = torch.zeros_like(report.state) if report.dropped else report.state
        squares = None if report.squares is None else report.squares[0]
        return GlobalStats(state, report.divisor, squares, idle=report.idle)


# ---- The unit of weights that go into losses: one power of two for all ranks.
#
# If backward crosses ranks, one rank's gradients are added up on another, so all ranks must weight losses before
# backward, in the same unit. The unit is near the first weight that any rank has, so that a weighted loss is about as
# large as the loss, and a power of two, so that it changes no bits. Ranks agree on it through the store that started
# torch.distributed, not by a collective, because they may begin at different times, or have no micro-batch at all.
#
# An accumulator that all ranks of the job have built together has a unit of its own. All others share one, since ranks
# that have other accumulators, or none, may take part in their backwards.

_built: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # accumulators of all ranks, by the world


class PendingUnit(float):
    """A unit that this rank does not need for its loss, and that another may set while backward runs; nan as a number.

    Attributes:
        key: The unit's key in the store.
    """

    key: str

    @classmethod
    def of(cls, key: str) -> PendingUnit:
        """Make the unit with this key."""
        unit = cls(math.nan)
        unit.key = key
        return unit

    def get(self) -> float:
        """Return the unit; 1 while no rank has had a weight other than 0."""
        return read_unit(self.key) or 1.0


def is_distributed() -> bool:
    """Whether torch.distributed runs."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def backward_may_cross_ranks() -> bool:
    """Whether this process is one of several; nobody can see what a model does in its backward."""
    distributed = torch.distributed  # not by `is_distributed`: every window asks, and a call takes its time
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def next_key(size: int) -> str:
    """Return the key for the unit of an accumulator that `size` ranks are building; all of them call this in one order.

    The constructors communicate, so those of all ranks of the job come in the same order on each of them.
    """
    world = torch.distributed.group.WORLD
    if size < torch.distributed.get_world_size():
        return SHARED_KEY
    _built[world] = number = _built.get(world, 0) + 1
    return f"{SHARED_KEY}/{number}"


def propose_unit(weight: float | Tensor, key: str) -> float:
    """Return the unit with this key, set by the first rank that asks.

    Args:
        weight: This rank's first weight that is not 0; a weight that only the device knows proposes 1.
        key: The unit's key in the store.
    """
    exponent = 0 if isinstance(weight, Tensor) else math.frexp(weight)[1] - 1
    exponent_of_all = store().compare_set(key, "", str(exponent))
    return math.ldexp(1.0, int(exponent_of_all))


def read_unit(key: str) -> float | None:
    """Return the unit with this key; None while no rank has had a weight other than 0."""
    return math.ldexp(1.0, int(store().get(key))) if store().check([key]) else None


def store() -> torch.distributed.Store:
    """Return the default process group's store, for which torch has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()
