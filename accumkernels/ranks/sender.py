"""Decides what goes to other ranks before a window ends, by what captures report while the last backward runs.

Every rank sends chunks in the same order: each as soon as the last micro-batch has added its part to it and to all
chunks before it, the rest at the end of the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from .chunks import Chunk, Place, as_they_come, cut
from .group import Group

_IN_FLIGHT = 4  # chunks whose narrower copies are alive; chunks reduced in place need no limit
_LEARNING = 2  # windows in which rank 0 may show the order of its gradients; the host reads these back

_Bucket = Sequence[tuple[FlatBuffer, Any]]  # after the buffer comes an object whose `segments` are indices


class Sender:
    """Sends nothing, for a single process.

    Attributes:
        begun: Whether parts of the open window were sent, so that nothing can be added to them.
    """

    begun = False

    def open_window(self) -> None:
        """Note that nothing of the next window was sent yet."""

    def mark_last(self) -> None:
        """Note that the user called the coming micro-batch the last, whatever becomes of it."""

    def end_last(self) -> None:
        """Send everything not yet sent, because the last micro-batch is complete."""

    def sink(self, sums: Any, captures: Sequence[Any], sends: bool) -> Any:
        """Return the sink that captures report to while a backward runs.

        Args:
            sums: The sink that adds gradients.
            captures: The captures that report.
            sends: Whether it is the window's last backward, and all gradients come in it.
        """
        return sums

    def check_not_sent(self, bucket: _Bucket) -> None:
        """Refuse gradients of segments that were sent.

        Raises:
            RuntimeError: names the parameter.
        """


class ChunkSender(Sender):
    """Sends chunks of flat buffers as the last backward completes them.

    Args:
        group: The group to sum over.
        early: Whether the last micro-batch of a window may send chunks; the same on all ranks.

    Attributes:
        marked: Whether the user said which micro-batch is the window's last.
    """

    def __init__(self, group: Group, early: bool) -> None:
        self._group = group
        self._early = early
        self.follow(())
        self.open_window()

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Send these flat buffers from now on, which all ranks have; the list may grow between windows."""
        self._buffers = buffers
        self._known = len(buffers)  # number of first buffers whose parameters ranks have compared
        self._agreements = 0  # number since the layout last changed
        self._chunks: list[Chunk] = []
        self._chunked = 0  # number of buffers that have chunks
        self._agreed = 0  # number of first chunks that all ranks are known to have
        self._came: Sequence[float] = ()  # see `as_they_come`; empty while unknown
        self._last: Set[Place] = frozenset()  # each chunk's segment that comes last

    def open_window(self) -> None:
        """See `Sender`."""
        self.begun = False
        self.marked = False
        self._sent = 0
        self._waited = 0
        self._flying: deque[tuple[Chunk, Tensor, Any]] = deque()
        self._complete: dict[Place, int] = {}  # complete segments, and when each became so
        self._gone: set[Place] = set()  # segments of which some part was sent

    # ---- while the last backward runs

    def mark_last(self) -> None:
        """See `Sender`."""
        self.marked = True

    def end_last(self) -> None:
        """See `Sender`."""
        self.marked = True
        if self._group.own:
            self._send_all()

    def sink(self, sums: Any, captures: Sequence[Any], sends: bool) -> Any:
        """See `Sender`."""
        return _Sending(self, sums, captures) if sends else _Checking(self, sums)

    def check_not_sent(self, bucket: _Bucket) -> None:
        """See `Sender`."""
        for buffer, captured in bucket:
            for index in captured.segments:
                self.check_place((buffer, index))

    def check_place(self, place: Place) -> None:
        """See `check_not_sent`."""
        if place in self._gone:
            raise RuntimeError(
                f"{place[0].segments[place[1]].name!r} got a gradient after last=True had sent its sum: in the last "
                "micro-batch, a parameter may get one only (reentrant checkpointing of a layer that is called twice "
                "makes more: use_reentrant=False, no last=True, or in a trainer's adapter release='microbatch')"
            )

    def send_complete(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """Note that segments are complete, and send all complete chunks up to the first incomplete one."""
        self._list_chunks()
        for index in segments:
            self._complete.setdefault((buffer, index), len(self._complete) + 1)
        complete = self._complete.keys()
        while self._group.own and self._sent < self._agreed and self._chunks[self._sent].places <= complete:
            self._send()

    @property
    def awaited(self) -> Set[Place] | None:
        """Segments whose gradients other ranks wait for; None: all, until rank 0 knows the order of its gradients."""
        if not self._group.own:
            return frozenset()
        self._list_chunks()
        return None if not self._came and self.learning else self._last

    # ---- at the end of a window

    def send_before_stats(self) -> None:
        """Send chunks before the vector if a backward may have sent some, so that all ranks keep one order."""
        if self._early:
            self._send_all()
        else:
            self._clear_untouched()

    @property
    def learning(self) -> bool:
        """Whether the next agreement of ranks teaches the order of gradients."""
        return self._agreements < _LEARNING

    def came(self) -> list[float]:
        """For each segment, in the order of buffers, return when its gradient came; 0 if none did or that is known."""
        learns = self.learning
        return [self._complete.get((b, s.index), 0) if learns else 0 for b in self._buffers for s in b.segments]

    def agree(self, came: Sequence[float]) -> None:
        """Note that all ranks have the same layout, and know when gradients came on rank 0; empty if nobody asked."""
        self._agreements += 1
        self._known, self._agreed = len(self._buffers), len(self._chunks)
        if self._agreements <= _LEARNING and any(came) and not self._came:
            self._came = came

    def send_rest(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Send what was not sent, and inspect chunks while the next are on their way.

        Args:
            look: Inspects parts of touched segments, of half the remaining chunks at a time: few calls, the last of
                which has one chunk. Few narrower copies may be alive, so their chunks are inspected one by one: the
                link would wait while many are inspected.
        """
        done, count = 0, len(self._chunks)
        narrower = any(chunk.sent_in != chunk.buffer.dtype for chunk in self._chunks)
        ahead = _IN_FLIGHT if narrower else count
        while done < count:
            end = done + (1 if narrower else max(1, (count - done) // 2))
            while self._sent < min(done + ahead, count):
                self._send()
            while self._waited < end:
                self._wait()
            parts: dict[FlatBuffer, list[Tensor]] = {}
            for chunk in self._chunks[done:end]:
                parts.setdefault(chunk.buffer, []).extend(chunk.parts(touched=True))
            for buffer, of_buffer in parts.items():
                if of_buffer:
                    look(buffer, of_buffer)
            done = end
        if self._came and self._agreements <= _LEARNING:
            self._chunks, self._last = as_they_come(self._chunks, self._buffers, self._came)

    # ---- inside

    def _send_all(self) -> None:
        self._clear_untouched()
        while self._sent < self._agreed:
            self._send()

    def _clear_untouched(self) -> None:
        """Clear segments that this rank did not touch: they hold old sums, and other ranks may have touched them."""
        self._list_chunks()
        stale = [part for chunk in self._chunks[self._sent :] for part in chunk.parts(touched=False)]
        if stale:
            torch._foreach_zero_(stale)

    def _list_chunks(self) -> None:
        """List the chunks of new buffers; they come between windows."""
        if self._chunked < len(self._buffers):
            self._agreements, self._came = 0, ()
            chunks = [cut(buffer, self._group.comm_dtype) for buffer in self._buffers]
            self._chunks = [chunk for of_buffer in chunks for chunk in of_buffer]
            # Other ranks may not have unfrozen the same parameters: send their chunks only after the vector says so.
            self._agreed = sum(map(len, chunks[: self._known]))
            self._last = {(chunk.buffer, chunk.segments[-1]) for chunk in self._chunks if chunk.segments}
            self._chunked = len(self._buffers)

    def _send(self) -> None:
        chunk = self._chunks[self._sent]
        self._flying.append((chunk, *self._group.send(chunk.tensor, chunk.sent_in)))
        self._gone |= chunk.places
        self._sent += 1
        self.begun = True
        while len(self._flying) > _IN_FLIGHT and self._flying[0][1].dtype != chunk.buffer.dtype:
            self._wait()

    def _wait(self) -> None:
        chunk, sent, work = self._flying.popleft()
        work.wait()
        if sent.dtype != chunk.buffer.dtype:
            chunk.tensor.copy_(sent)
        self._waited += 1


class _Checking:
    """A sink that refuses gradients that come too late; see `Sink` in capture/captures.py."""

    awaited: Set[Place] | None = frozenset()

    def __init__(self, sender: ChunkSender, sums: Any) -> None:
        self._sender = sender
        self._sums = sums
        self.multiplier = sums.multiplier
        self.check_writable = sender.check_place

    def leaf_ran(self, place: Place, pending: bool) -> bool:
        return False

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        self._sender.check_not_sent(bucket)
        self._sums.add(bucket, micro_batch)


class _Sending(_Checking):
    """A sink that sends chunks as the last backward completes them."""

    def __init__(self, sender: ChunkSender, sums: Any, captures: Sequence[Any]) -> None:
        super().__init__(sender, sums)
        self.awaited = sender.awaited
        self._captures = captures
        self._leaves_ran: set[Place] = set()

    def leaf_ran(self, place: Place, pending: bool) -> bool:
        """Send a segment that gets nothing more; a part of it may still be in a bucket."""
        self._leaves_ran.add(place)
        if not pending:
            self._sender.send_complete(place[0], [place[1]])
        awaited = self._sender.awaited
        return awaited is None or place in awaited

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        super().add(bucket, micro_batch)
        for buffer, captured in bucket:
            complete = [index for index in captured.segments if self._is_complete((buffer, index))]
            self._sender.send_complete(buffer, complete)

    def _is_complete(self, place: Place) -> bool:
        """Whether a segment that got a gradient gets no more in this backward."""
        for capture in self._captures:
            if capture.reports(place):
                return place in self._leaves_ran
        return True
