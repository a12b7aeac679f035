"""What goes to other ranks before a window ends: decided here, of what captures report while the last backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from ..buffers.flat import FlatBuffer

_Place = tuple[FlatBuffer, int]  # a segment
_Bucket = Sequence[tuple[FlatBuffer, Any]]  # what follows the buffer has the indices of segments, `segments`


class Sender:
    """Sends nothing, as from one process.

    Attributes:
        begun: Whether parts of the open window were sent, so that nothing can be added to them.
    """

    begun = False

    def sink(self, sums: Any, captures: Sequence[Any], sends: bool) -> Any:
        """What captures are to report to while a backward runs.

        Args:
            sums: The sink that adds gradients.
            captures: Those that report.
            sends: Whether it is the window's last backward, and all gradients come in it.
        """
        return sums

    def check_not_sent(self, bucket: _Bucket) -> None:
        """Refuse gradients of segments that were sent.

        Raises:
            RuntimeError: names the parameter.
        """

    def end_last(self) -> None:
        """The micro-batch that was said to be the last is complete: send everything that was not sent."""


class ChunkSender(Sender):
    """Sends chunks of flat buffers as the last backward completes them.

    Args:
        chunks: Knows which segments are complete, and sends the chunks that are.
    """

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    @property
    def begun(self) -> bool:  # type: ignore[override]
        """See `Sender`."""
        return self._chunks.begun

    def sink(self, sums: Any, captures: Sequence[Any], sends: bool) -> Any:
        """See `Sender`."""
        return _Sending(self, self._chunks, sums, captures) if sends else _Checking(self, sums)

    def check_not_sent(self, bucket: _Bucket) -> None:
        """See `Sender`."""
        for buffer, captured in bucket:
            self.check_segments_not_sent(buffer, captured.segments)

    def check_segments_not_sent(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """See `check_not_sent`."""
        late = self._chunks.already_sent(buffer, segments)
        if late is not None:
            raise RuntimeError(
                f"{late!r} got a gradient after last=True had sent its sum: in the last micro-batch, a parameter "
                "may get one only (reentrant checkpointing of a layer that is called twice makes more: "
                "use_reentrant=False, no last=True, or in a trainer's adapter release='microbatch')"
            )

    def end_last(self) -> None:
        """See `Sender`."""
        self._chunks.end_last()


class _Checking:
    """A sink of gradients that may come too late."""

    awaited: Set[_Place] | None = frozenset()

    def __init__(self, sender: ChunkSender, sums: Any) -> None:
        self._sender = sender
        self._sums = sums

    def multiplier(self, micro_batch: Any) -> Any:
        """See `Sink` in capture/captures.py, as of the others."""
        return self._sums.multiplier(micro_batch)

    def check_writable(self, place: _Place) -> None:
        self._sender.check_segments_not_sent(place[0], [place[1]])

    def leaf_ran(self, place: _Place, pending: bool) -> bool:
        return False

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        self._sender.check_not_sent(bucket)
        self._sums.add(bucket, micro_batch)


class _Sending(_Checking):
    """A sink that sends what becomes complete in the last backward."""

    def __init__(self, sender: ChunkSender, chunks: Any, sums: Any, captures: Sequence[Any]) -> None:
        super().__init__(sender, sums)
        self.awaited = chunks.awaited
        self._chunks = chunks
        self._captures = captures
        self._leaves_ran: set[_Place] = set()

    def leaf_ran(self, place: _Place, pending: bool) -> bool:
        """Send a segment that nothing more comes to; a part of it may still be in a bucket."""
        self._leaves_ran.add(place)
        if not pending:
            self._chunks.send_complete(place[0], [place[1]])
        awaited = self._chunks.awaited
        return awaited is None or place in awaited

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        super().add(bucket, micro_batch)
        for buffer, captured in bucket:
            complete = [index for index in captured.segments if self._is_complete((buffer, index))]
            self._chunks.send_complete(buffer, complete)

    def _is_complete(self, place: _Place) -> bool:
        """Whether no more gradients of this backward come to a segment that got one."""
        if any(capture.reports(place) for capture in self._captures):
            return place in self._leaves_ran
        return not any(capture.in_parts(place) for capture in self._captures)
