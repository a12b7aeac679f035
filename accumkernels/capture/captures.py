"""The protocol of everything that takes gradients: `.grad`, buckets, and hooks on the graph.

An accumulator holds the captures that it uses. Before each backward they get the micro-batch and a sink, which adds
what they hand over while it runs; afterwards the rest is drained. Captures report to the sink what they added and what
is complete, and decide nothing about windows, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

from torch import Tensor

from ..buffers.flat import FlatBuffer


class MicroBatch(NamedTuple):
    """A micro-batch, from where it enters the accumulator until it is counted.

    Attributes:
        weight: Its part of the window's sum of weights: a number, or fp64 0-d on the first device.
        tag: Its serial number, which kernels store in the flags of parameters whose gradients are not finite.
        last: Whether it is the window's last on this rank, so that sums may be sent while its backward runs.
        loss: Its plain loss, for the window's metrics.
        ran_backward: Whether the accumulator ran its backward; otherwise, no gradient means that there was none.
        loss_weight: The factor of its loss before backward, given like `weight`; None: the loss was left as it is.
        unit: The unit of `loss_weight`, which is `weight / unit` up to rounding; None if `loss_weight` is 0 and no rank
            had another weight by then.
    """

    weight: float | Tensor
    tag: int
    last: bool = False
    loss: Tensor | None = None
    ran_backward: bool = False
    loss_weight: float | Tensor | None = None
    unit: float | None = 1.0


class Captured(NamedTuple):
    """Gradients of one flat buffer, as backward left them, and the indices of their segments."""

    segments: list[int]
    grads: list[Tensor]


Bucket = Sequence[tuple[FlatBuffer, Captured]]
Place = tuple[FlatBuffer, int]  # a segment


class Sink(Protocol):
    """Receives gradients while a backward runs.

    Attributes:
        awaited: Segments whose gradients must be handed over at once, with all that is pending; None: every segment.
    """

    awaited: Set[Place] | None

    def add(self, bucket: Bucket, micro_batch: MicroBatch) -> None:
        """Add gradients to the flat buffers."""

    def multiplier(self, micro_batch: MicroBatch) -> float | Tensor | None:
        """Return the factor for ops that compute weight gradients and add them: the weight over the loss scale.

        None: the micro-batch needs gradients of its own.
        """

    def check_writable(self, place: Place) -> None:
        """Refuse an addition to a segment that is being sent to other ranks."""

    def leaf_ran(self, place: Place, pending: bool) -> bool:
        """Note that a segment gets no more gradients in this backward.

        Args:
            place: The segment.
            pending: Whether one of its gradients has not been handed over yet.

        Returns:
            Whether to hand over now what is pending.
        """


class Capture:
    """Takes gradients of backwards; the base class takes none.

    Attributes:
        added: Whether gradients of the current micro-batch were taken with its weight, which cannot change now.
        broken: Whether gradients of a backward that raised may be in the sums.
    """

    added = broken = False

    def end(self, failed: bool) -> None:
        """End a backward, which may have raised."""

    def forget(self) -> None:
        """Forget what was taken, because the micro-batch was counted."""

    def discard(self) -> bool:
        """Forget the current micro-batch; return whether some of it may be in the sums, which breaks the window."""
        broken = self.added
        self.forget()
        return broken

    def set_listening(self, listening: bool) -> None:
        """Take gradients from backward, or leave them to torch."""

    def reports(self, place: Place) -> bool:
        """Whether `Sink.leaf_ran` will report when all gradients of a segment have come."""
        return False

    def remove(self) -> None:
        """Remove every hook."""
