"""What goes to other ranks: which segments any of them has touched, in which chunks, and what before the window ends.

Which segments any rank has touched takes three numbers while that is as in the last window, else a count per parameter.
If every rank has touched what it touched in the last window, or one of them all that any had touched then and none of
them more, the union is the last one's. Otherwise ranks send counts: in a collective of their own if they did not expect
it, and from then on with everything else, until the union stays the same. So a window has one collective, except the
first one after a change.

Counts also tell which segments every rank could give back, because their parameters are frozen. Where none are sent,
the same is touched as before, so hardly anything was frozen since.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..devices import keep_until_done
from .group import Group

_IDLE = 2.0**-32  # what a segment that a rank could give back adds to its count: exact in fp64, and never a whole one

Fields = dict[str, Sequence[float] | float]


class _Known(NamedTuple):
    """What this rank, and any rank, touched in the last window; and whether the next vector has counts."""

    own: bytes = b""
    any: bytes = b""
    counts: bool = True


class Touched:
    """The agreement of data parallel ranks about which segments hold sums.

    Args:
        parameters: How many parameters the accumulator has, frozen ones too: counts have the same size on every rank,
            whatever is frozen where.
        size: The number of ranks.
    """

    def __init__(self, parameters: int, size: int) -> None:
        self._parameters = parameters
        self._size = size
        self.follow()

    def follow(self) -> None:
        """Begin with a layout of which nothing is known."""
        self._last = _Known()

    def knows(self, own: bytes) -> bool:
        """Whether this rank knows the union without asking: it has touched everything, as before."""
        return not self._last.counts and own == self._last.any and 0 not in own

    def fields(self, own: bytes, idle: bytes = b"") -> Fields:
        """Return the fields of the next vector.

        Args:
            own: For each segment, in the order of buffers, 1 if this rank has touched it.
            idle: The same, 1 if this rank could give it back; empty for none.
        """
        last = self._last
        if last.counts:
            return self._counted(own, idle)
        whole = own == last.any
        beyond = not whole and (len(own) != len(last.any) or bool(_bits(own) & ~_bits(last.any)))
        return {"whole": whole, "beyond": beyond, "changed": own != last.own}

    def combine(
        self,
        own: bytes,
        idle: bytes,
        found: Mapping[str, Sequence[float]],
        sum_: Callable[[Fields], Mapping[str, Sequence[float]]],
    ) -> tuple[bytes, bytes]:
        """Conclude what any rank has touched from the fields' sums; collective if they do not tell.

        Args:
            own: As in `fields`.
            idle: As in `fields`.
            found: The sums.
            sum_: Sums fields over ranks; collective.

        Returns:
            What any rank has touched, as `own`, and what all ranks could give back, as `idle`.
        """
        last = self._last
        settled = not last.counts and not found["beyond"][0] and (found["whole"][0] or not found["changed"][0])
        if settled:
            self._last = last._replace(own=own)
            return last.any, b""
        if not last.counts:
            found = sum_(self._counted(own, idle))
        count = len(own)
        touched = bytes(number >= 1 for number in found["touched"][:count])
        idle = bytes(number == self._size * _IDLE for number in found["touched"][:count])
        self._last = _Known(own, touched, counts=touched != last.any)
        return touched, idle

    def _counted(self, own: bytes, idle: bytes) -> Fields:
        frozen = [0.0] * (self._parameters - len(own))
        touched = [t + i * _IDLE for t, i in zip(own, idle or bytes(len(own)), strict=True)]
        return {"touched": [*touched, *frozen]}


def _bits(touched: bytes) -> int:
    return int.from_bytes(touched, "little")


# ---- Cuts flat buffers into the chunks that are reduced over ranks.
#
# Neither cuts nor order ever change: the bits of a sum over ranks depend on the cuts, and all ranks send chunks in one
# order. It is that of the segments, parameters in reverse order of registration, as DistributedDataParallel and
# Megatron have it: about the order in which backward completes them.

# Long enough for bandwidth, yet short, because the link waits until backward has completed a whole chunk.
CHUNK_BYTES = 16 * 2**20
SegmentKey = tuple[FlatBuffer, int]  # a segment


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a flat buffer, and the dtype in which it is sent."""

    buffer: FlatBuffer
    start: int
    end: int
    sent_in: torch.dtype

    @functools.cached_property
    def segments(self) -> range:
        """Return the indices of the segments that overlap it."""
        held = [s.index for s in self.buffer.segments if s.offset < self.end and s.offset + s.numel > self.start]
        return range(min(held, default=0), max(held, default=-1) + 1)

    @functools.cached_property
    def segment_keys(self) -> frozenset[SegmentKey]:
        """Return the segments."""
        return frozenset((self.buffer, index) for index in self.segments)

    @property
    def tensor(self) -> Tensor:
        """Return the range, with the padding between segments."""
        return self.buffer.tensor[self.start : self.end]

    def parts(self, touched: bool) -> list[Tensor]:
        """Return the parts of segments that hold a sum, or of those that do not; neither includes padding."""
        of_kind = (self.buffer.segments[i] for i in self.segments if bool(self.buffer.touched[i]) is touched)
        ranges = ((max(s.offset, self.start), min(s.offset + s.numel, self.end)) for s in of_kind)
        return [self.buffer.tensor[start:end] for start, end in ranges]


def cut(buffer: FlatBuffer, sent_in: torch.dtype | str) -> list[Chunk]:
    """Cut a buffer into ranges of at most `CHUNK_BYTES`, the same in every window, since sums depend on the cuts.

    The link is idle until the first chunk is complete. Nothing hides the last chunk, nor what a slow link still has to
    send of the one before. These chunks are cut up further.
    """
    size = CHUNK_BYTES // buffer.dtype.itemsize
    chunks = []
    for start in range(0, buffer.numel, size):
        chunk = Chunk(buffer, start, min(start + size, buffer.numel), buffer.dtype)
        if buffer.dtype == torch.float32:
            bf16 = chunk.segments and all(buffer.segments[i].dtype == torch.bfloat16 for i in chunk.segments)
            dtype = sent_in if isinstance(sent_in, torch.dtype) else torch.bfloat16 if bf16 else buffer.dtype
            chunk = dataclasses.replace(chunk, sent_in=dtype)
        chunks.append(chunk)
    count = len(chunks)
    for index in sorted({0, count - 2, count - 1} & set(range(count)), reverse=True):
        if chunks[index].segments:
            chunks[index : index + 1] = _quarters(chunks[index])
    return chunks


def _quarters(chunk: Chunk) -> Iterator[Chunk]:
    """Cut the chunk into up to four, between segments."""
    size = -(-(chunk.end - chunk.start) // 4)
    offsets = [chunk.buffer.segments[index].offset for index in chunk.segments]
    start = chunk.start
    for end in [*(offset for offset in offsets if offset > start), chunk.end]:
        if end - start >= size or end == chunk.end > start:
            yield dataclasses.replace(chunk, start=start, end=end)
            start = end


# ---- Decides what goes to other ranks before a window ends, by what captures report while the last backward runs.
#
# Every rank sends chunks in the same order: each as soon as the last micro-batch has added its part to it and to all
# chunks before it, the rest at the end of the window.

_IN_FLIGHT = 4  # chunks whose narrower copies are alive; chunks reduced in place need no limit

_Bucket = Sequence[tuple[FlatBuffer, Any]]  # after the buffer comes an object whose `segments` are indices


@dataclasses.dataclass
class Sent:
    """What was sent of one window: once that is anything, nothing can be added to it.

    Attributes:
        marked: Whether the user said which micro-batch is its last, whatever becomes of it.
        count: Number of chunks sent.
        waited: Number of them that have arrived.
        flying: The others: the chunk, what was sent of it, and the work to wait for.
        complete: Segments that get no more gradients.
        segments: Those of which some part was sent.
    """

    marked: bool = False
    count: int = 0
    waited: int = 0
    flying: deque[tuple[Chunk, Tensor, Any]] = dataclasses.field(default_factory=deque)
    complete: set[SegmentKey] = dataclasses.field(default_factory=set)
    segments: set[SegmentKey] = dataclasses.field(default_factory=set)

    def mark(self) -> None:
        """Note that the user called the coming micro-batch the last."""
        self.marked = True

    def check_segment(self, key: SegmentKey) -> None:
        """Refuse gradients of a segment that was sent.

        Raises:
            RuntimeError: names the parameter.
        """
        if key in self.segments:
            raise RuntimeError(
                f"{key[0].segments[key[1]].name!r} got a gradient after last=True had sent its sum: in the last "
                "micro-batch, a parameter may get one only (reentrant checkpointing of a layer that is called twice "
                "makes more: use_reentrant=False, no last=True, or in a trainer's adapter release='microbatch') (AK27)"
            )

    def check(self, bucket: _Bucket) -> None:
        """Refuse gradients of segments that were sent; raises as `check_segment`."""
        for buffer, captured in bucket if self.segments else ():
            for index in captured.segments:
                self.check_segment((buffer, index))


class Sender:
    """Sends nothing, for a single process."""

    def end_last(self, sent: Sent) -> None:
        """Send everything not yet sent, because the last micro-batch is complete."""

    def sink(self, sent: Sent, sums: Any, captures: Any, sends: bool) -> Any:
        """Return the sink that captures report to while a backward runs.

        Args:
            sent: Of the window.
            sums: The sink that adds gradients.
            captures: They report.
            sends: Whether it is the window's last backward, and all gradients come in it.
        """
        return sums


class ChunkSender(Sender):
    """Sends chunks of flat buffers as the last backward completes them.

    Args:
        group: The group to sum over.
        early: Whether the last micro-batch of a window may send chunks; the same on all ranks.
    """

    def __init__(self, group: Group, early: bool) -> None:
        self._group = group
        self._early = early
        self._lock = threading.Lock()  # a backward over several devices completes segments in a thread for each
        self.follow(())

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Send these flat buffers from now on, which all ranks have; the list may grow between windows."""
        self._buffers = buffers
        self._chunks: list[Chunk] = []
        self._list_chunks()
        self._common = len(self._chunks)  # number of first chunks that all ranks are known to have

    # ---- while the last backward runs

    def end_last(self, sent: Sent) -> None:
        """See `Sender`."""
        sent.marked = True
        if self._group.own:
            self._send_all(sent)

    def sink(self, sent: Sent, sums: Any, captures: Any, sends: bool) -> Any:
        """See `Sender`."""
        return _Sending(self, sent, sums, captures) if sends else _Checking(sent, sums)

    def send_complete(
        self, sent: Sent, buffer: FlatBuffer, segments: Iterable[int], wait_for_writers: Callable[[torch.device], None]
    ) -> None:
        """Note that segments are complete, and send all complete chunks up to the first incomplete one.

        Args:
            sent: Of the window.
            buffer: The buffer of the segments.
            segments: The segments.
            wait_for_writers: Makes the current stream of an accelerator wait for all that have written to sums, of
                which several may have written to one chunk, and for the next one to write to them wait for it.
        """
        with self._lock:  # or two threads would send the same chunk
            sent.complete.update((buffer, index) for index in segments)
            if not self._group.own:
                return
            while sent.count < self._common and self._chunks[sent.count].segment_keys <= sent.complete:
                for chunk in (self._chunks[sent.count], *(chunk for chunk, *_ in sent.flying)):
                    if chunk.buffer.queues:
                        wait_for_writers(chunk.buffer.device)
                self._send(sent)

    @property
    def flush_at(self) -> Set[SegmentKey]:
        """Segments whose gradients other ranks wait for: the last of each chunk."""
        self._list_chunks()
        return {(chunk.buffer, chunk.segments[-1]) for chunk in self._chunks if chunk.segments and self._group.own}

    # ---- at the end of a window

    def send_before_stats(self, sent: Sent) -> None:
        """Send chunks before the vector if a backward may have sent some, so that all ranks keep one order."""
        if self._early:
            self._send_all(sent)
        else:
            self._clear_untouched(sent)

    def note_same_layout(self) -> None:
        """Note that all ranks have the same layout."""
        self._common = len(self._chunks)

    def send_rest(self, sent: Sent, inspect: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Send what was not sent, and inspect chunks while the next are on their way.

        Args:
            sent: Of the window.
            inspect: Inspects parts of touched segments, of half the remaining chunks at a time: few calls, the last of
                which has one chunk. Few narrower copies may be alive, so their chunks are inspected one by one: the
                link would wait while many are inspected.
        """
        done, count = 0, len(self._chunks)
        narrower = any(chunk.sent_in != chunk.buffer.dtype for chunk in self._chunks)
        ahead = _IN_FLIGHT if narrower else count
        while done < count:
            end = done + (1 if narrower else max(1, (count - done) // 2))
            while sent.count < min(done + ahead, count):
                self._send(sent)
            while sent.waited < end:
                self._wait(sent)
            parts: dict[FlatBuffer, list[Tensor]] = {}
            for chunk in self._chunks[done:end]:
                parts.setdefault(chunk.buffer, []).extend(chunk.parts(touched=True))
            for buffer, of_buffer in parts.items():
                if of_buffer:
                    inspect(buffer, of_buffer)
            done = end

    # ---- inside

    def _send_all(self, sent: Sent) -> None:
        self._clear_untouched(sent)
        while sent.count < self._common:
            self._send(sent)

    def _clear_untouched(self, sent: Sent) -> None:
        """Clear segments that this rank did not touch: they hold old sums, and other ranks may have touched them."""
        self._list_chunks()
        stale = [part for chunk in self._chunks[sent.count :] for part in chunk.parts(touched=False)]
        if stale:
            torch._foreach_zero_(stale)

    def _list_chunks(self) -> None:
        """List the chunks of new buffers; they come between windows.

        Other ranks may not have unfrozen the same parameters: these chunks go last, after the vector has said so.
        """
        listed = {chunk.buffer for chunk in self._chunks}
        for buffer in reversed(self._buffers):  # the last device has the last layers
            if buffer not in listed:
                self._chunks += cut(buffer, self._group.comm_dtype)

    def _send(self, sent: Sent) -> None:
        chunk = self._chunks[sent.count]
        sent.flying.append((chunk, *self._group.send(chunk.tensor, chunk.sent_in)))
        sent.segments |= chunk.segment_keys
        sent.count += 1
        while len(sent.flying) > _IN_FLIGHT and sent.flying[0][1].dtype != chunk.buffer.dtype:
            self._wait(sent)

    def _wait(self, sent: Sent) -> None:
        chunk, tensor, work = sent.flying.popleft()
        work.wait()
        if tensor.dtype != chunk.buffer.dtype:
            chunk.tensor.copy_(tensor)
            keep_until_done([tensor])  # a backward may have made it on another stream
        sent.waited += 1


class _Checking:
    """A sink that refuses gradients that come too late; see `Sink` in capture/inbox.py."""

    flush_at: Set[SegmentKey] = frozenset()

    def __init__(self, sent: Sent, sums: Any) -> None:
        self._sent = sent
        self._sums = sums
        self.multiplier = sums.multiplier
        self.check_writable = sent.check_segment

    def leaf_ran(self, key: SegmentKey, pending: bool) -> bool:
        return False

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        self._sent.check(bucket)
        self._sums.add(bucket, micro_batch)


class _Sending(_Checking):
    """A sink that sends chunks as the last backward completes them."""

    def __init__(self, sender: ChunkSender, sent: Sent, sums: Any, captures: Any) -> None:
        super().__init__(sent, sums)
        self.flush_at = sender.flush_at
        self._sender = sender
        self._captures = captures
        self._leaves_ran: set[SegmentKey] = set()

    def leaf_ran(self, key: SegmentKey, pending: bool) -> bool:
        """Send a segment that gets nothing more; a part of it may still be in a bucket."""
        self._leaves_ran.add(key)
        if not pending:
            self._send_complete(key[0], [key[1]])
        return key in self.flush_at

    def add(self, bucket: _Bucket, micro_batch: Any) -> None:
        super().add(bucket, micro_batch)
        for buffer, captured in bucket:
            keys = [(buffer, index) for index in captured.segments]
            # Segments that get no more in this backward.
            complete = [key[1] for key in keys if key in self._leaves_ran or not self._captures.reports(key)]
            self._send_complete(buffer, complete)

    def _send_complete(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        self._sender.send_complete(self._sent, buffer, segments, self._captures.inbox.order.take)
