"""What every kind of ranks can do for a window, and what they exchange at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..buffers.norms import total_norm
from ..buffers.parameters import NamedParameter
from .sender import Sender


class LocalStats(NamedTuple):
    """What one rank knows of its window when it ends; tensors are on the first device.

    Attributes:
        state: fp64 `[4]`, see `ops.schema.State`.
        touched: For each segment, in the order of buffers, 1 where it holds a sum.
        dropped: Whether the window was dropped here.
        squares: fp64 0-d, `sum w_i |g_i|^2`; None where it is not measured.
        divisor: fp64 0-d that replaces the sum of weights; None for that sum.
        weighed_after: Whether any weight other than 1 came after its backward, where it is too late for gradients that
            backward has reduced over ranks.
        micro_batches: How many this rank ran.
        window: The window's number.
        loss: Makes fp64 `[2]`, the weighted sum of losses and the sum of their weights; None where no loss is known.
        norms: How many norms the step clips by: 0, 1 for that of all parameters, 1 + n for a list of n parts.
        limit: fp64 0-d, what it clips to, added up over parts; None without any.
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
        touched: As in `LocalStats`, by any rank; None where the host did not look and this rank's own is right.
        dropped: Whether any rank dropped it; None where only the device knows.
        weight: The sum of weights; None where only the device knows.
        error: What ranks disagree about; to be raised once nobody waits for this rank any more.
        loss: As `LocalStats.loss` makes it, summed over ranks; None where this rank's own is right.
    """

    state: Tensor
    divisor: Tensor | None
    squares: Tensor | None
    touched: Sequence[int] | None
    dropped: bool | None
    weight: float | None
    error: str | None = None
    loss: Tensor | None = None


def different_windows(numbers: Sequence[float]) -> str | None:
    """That ranks, each in the window of such a number, do not end the same one, in words."""
    if len(set(numbers)) == 1:
        return None
    return (
        f"ranks are in different windows, by rank {[int(n) for n in numbers]}: load states on all ranks that were "
        "saved in the same window, and end each window on all ranks"
    )


def different_limits(norms: Sequence[float], limits: Sequence[float], place: str = "rank") -> str | None:
    """That ranks do not clip alike, as their `LocalStats`s say, in words.

    Each norm is a collective where parameters are sharded or on several stages, and elsewhere replicas would diverge.
    """
    if len(set(norms)) == 1 and len(set(limits)) == 1:
        return None
    given = [
        "none" if n == 0 else f"{limit}" if n == 1 else f"a list of {int(n) - 1} for {limit} together"
        for n, limit in zip(norms, limits, strict=True)
    ]
    return f"max_norm must be the same on all ranks; by {place} it is {', '.join(given)}"


class Ranks:
    """The ranks that share windows. As it stands: one process, which communicates nothing.

    Attributes:
        size: How many ranks share a window.
        rank: Which of them this is.
        ends_together: Whether the end of a window is collective, so that a rank without micro-batches takes part.
        reduces_sums: Whether flat buffers are reduced when the window ends.
        sharded: Whether parameters are DTensors, of which a rank accumulates its local shard.
        judged_together: Whether ranks hold different parts of the same gradients, so that all of them are judged.
        only_in_grad: Whether gradients are right in `.grad` alone, after others have reduced or divided them there:
            nothing is to be taken inside modules.
        stage: Which rank of a pipeline this is; each has other parameters.
        begun: Whether parts of the open window were sent, so that nothing can be added to them.
        sender: Decides what is sent while a backward runs.
    """

    size = 1
    rank = 0
    ends_together = False
    reduces_sums = False
    sharded = False
    judged_together = False
    only_in_grad = False
    stage = 0
    begun = False
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

    def open_window(self) -> None:
        """Nothing of the next window was sent yet."""

    def already_sent(self, buffer: FlatBuffer, segments: Iterable[int]) -> str | None:
        """The name of a segment among these that was sent; None if none was."""
        return None

    def send_complete(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """Note that segments are complete, and send what may go while backward still runs."""

    @property
    def awaited(self) -> Set[tuple[FlatBuffer, int]] | None:
        """Segments whose gradients other ranks wait for, in a micro-batch that sends; None: all of them."""
        return frozenset()

    def mark_last(self) -> None:
        """The micro-batch that begins was said to be the last, whatever becomes of it."""

    def end_last(self) -> None:
        """The micro-batch that was said to be the last is complete: send everything that was not sent."""

    # ---- at its end

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine what all ranks report; collective."""
        state = torch.zeros_like(report.state) if report.dropped else report.state
        return GlobalStats(state, report.divisor, report.squares, None, None, None)

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
        """The norm over all touched segments of all ranks, or `only` those with these `id`s; 0-d fp64 on `device`."""
        return total_norm(buffers, norm_type, device, only)

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

    @property
    def shards(self) -> int:
        """How many rows `gather_rows` returns."""
        return 1

    @property
    def shard(self) -> int:
        """This rank's row in `gather_rows`."""
        return 0


class SingleProcess(Ranks):
    """A process that ends its windows by itself."""
