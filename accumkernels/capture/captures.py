"""What takes gradients: one protocol for `.grad`, buckets, the autocast route and fused weights.

An accumulator holds those that it uses. Around each backward they are told of the micro-batch and of a sink, which adds
what they hand over while it runs; afterwards they are drained of what is left. They report to the sink what they added
and what is complete, and decide nothing about windows, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple, Protocol

from torch import Tensor

from ..buffers.flat import FlatBuffer


class MicroBatch(NamedTuple):
    """A micro-batch, from where it enters the accumulator until it is counted.

    Attributes:
        weight: What it counts in the window's sum of weights: a number, or fp64 0-d on the first device.
        tag: Its serial number, which kernels store in the flags of parameters whose gradients are not finite.
        last: Whether it is the window's last on this rank, whose sums may be sent while its backward runs.
        loss: Its plain loss, for the window's metrics.
        ran_backward: Whether the accumulator ran its backward; otherwise, no gradient means that there was none.
        loss_weight: What its loss was multiplied by before backward, as `weight` is given; None: it was left as it is.
        unit: The unit of `loss_weight`, which is `weight / unit` but for rounding; None where `loss_weight` is 0, and
            no rank had another weight when it was put there.
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
    """Where gradients go while a backward runs.

    Attributes:
        awaited: Segments whose gradients are to be handed over at once, with all that is pending; None: every one.
    """

    awaited: Set[Place] | None

    def add(self, bucket: Bucket, micro_batch: MicroBatch) -> None:
        """Add gradients to the flat buffers."""

    def multiplier(self, micro_batch: MicroBatch) -> float | Tensor | None:
        """What the ops that compute weight gradients multiply them by as they add them: the weight over the loss scale.

        None: the micro-batch needs gradients of its own.
        """

    def check_writable(self, place: Place) -> None:
        """Refuse an addition to a segment that is on its way to other ranks."""

    def leaf_ran(self, place: Place, pending: bool) -> bool:
        """Take note that no more gradients come to a segment in this backward.

        Args:
            place: The segment.
            pending: Whether one of them has not been handed over yet.

        Returns:
            Whether what is pending is to be handed over now.
        """


class Capture:
    """Takes gradients of backwards; by itself, none.

    Attributes:
        added: Whether gradients of the micro-batch under way were taken with their weight, which cannot change now.
        broken: Whether gradients of a backward that raised may be in the sums.
    """

    added = broken = False

    def begin(self, micro_batch: MicroBatch, sink: Sink) -> None:
        """A backward begins; what is taken early goes to the sink."""

    def end(self, failed: bool) -> None:
        """The backward has ended, or raised."""

    def drain(self) -> list[Bucket]:
        """What is left to add, in this order; it is kept until `forget`, so that a failed op loses nothing."""
        return []

    def forget(self) -> None:
        """Forget what was taken: the micro-batch was counted."""

    def discard(self) -> bool:
        """Forget the micro-batch under way; whether some of it may be in the sums, so that the window is broken."""
        broken = self.added
        self.forget()
        return broken

    def is_ready(self) -> bool:
        """Put back what an interrupted forward has left in modules; False where a backward was interrupted."""
        return True

    def set_listening(self, listening: bool) -> None:
        """Whether what backward makes is taken; else it is left to torch."""

    def reports(self, place: Place) -> bool:
        """Whether `Sink.leaf_ran` will say when all gradients of a segment have come."""
        return False

    def in_parts(self, place: Place) -> bool:
        """Whether a segment's gradient may come in parts, and nothing says which is the last."""
        return False

    def remove(self) -> None:
        """Take off every hook."""
