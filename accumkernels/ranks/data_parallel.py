"""Data parallel windows: one small collective for all scalars, and the flat buffers in chunks.

What a window costs in communication is independent of its micro-batches. At its end every rank

* puts its sum of weights, flags and touched segments in one fp64 vector, which is summed
  (`all_reduce_stats`): all ranks then divide by the same number, and all step or all skip;
* sums the flat buffers, chunk by chunk, several in flight, so that looking at one chunk (norm, overflow, division)
  overlaps with the communication of the next (`reduce`).

The collectives and their sizes are the same on every rank, whatever its window was like: buffers are reduced whole,
segments that a rank did not touch as zeros. With `release="backward"` the chunks come first, since the last micro-batch
may send them while its backward runs; otherwise the vector does, so that the divisor is there when the chunks are.
What goes out in backward goes over a group of the library's own: a collective of the user's may come in between.

The order of chunks is that of the layout at first, and then that in which rank 0's gradients came in an early window:
no chunk waits for one whose gradients come later, or never. Where chunks are cut never changes, since the bits of a sum
over ranks depend on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..ops.schema import State
from .base import Ended, GlobalStats, LocalStats, Look, Ranks, SingleProcess, end_reduced
from .group import Group
from .packing import Packer, different_limits, different_windows
from .sender import ChunkSender

# Of a flat buffer: long enough for bandwidth, and short, since a link waits until backward has completed a whole one.
CHUNK_BYTES = 16 * 2**20
_IN_FLIGHT = 4  # chunks whose narrower copies are alive; those that are reduced in place need no limit


_LEARNING = 2  # windows in which rank 0 may show in which order gradients come; the host reads these back


_Place = tuple[FlatBuffer, int]  # a segment


@dataclasses.dataclass(frozen=True, eq=False)
class _Chunk:
    """A range of a flat buffer, the segments that it holds some part of, and what it is sent in."""

    buffer: FlatBuffer
    start: int
    end: int
    segments: range
    sent_in: torch.dtype

    @functools.cached_property
    def places(self) -> frozenset[_Place]:
        """The segments."""
        return frozenset((self.buffer, index) for index in self.segments)

    @property
    def tensor(self) -> Tensor:
        """The range, padding between segments included."""
        return self.buffer.tensor[self.start : self.end]

    def parts(self, touched: bool) -> list[Tensor]:
        """The parts of segments that hold a sum, or of those that do not; padding is in neither."""
        of_kind = (self.buffer.segments[i] for i in self.segments if bool(self.buffer.touched[i]) is touched)
        ranges = ((max(s.offset, self.start), min(s.offset + s.numel, self.end)) for s in of_kind)
        return [self.buffer.tensor[start:end] for start, end in ranges]


def _chunks(buffer: FlatBuffer, sent_in: torch.dtype | str) -> list[_Chunk]:
    """Cut a buffer in ranges of at most `CHUNK_BYTES`, the same in every window: sums depend on where they are cut.

    The link is idle before the first is complete. Nothing hides the last, nor what a slow link still has to send of the
    one before. These are cut up further.
    """
    size = CHUNK_BYTES // buffer.dtype.itemsize
    chunks = []
    for start in range(0, buffer.numel, size):
        end = min(start + size, buffer.numel)
        inside = [s for s in buffer.segments if s.offset < end and s.offset + s.numel > start]
        dtype = buffer.dtype
        if dtype == torch.float32:
            bf16 = inside and all(s.dtype == torch.bfloat16 for s in inside)
            dtype = sent_in if isinstance(sent_in, torch.dtype) else torch.bfloat16 if bf16 else dtype
        indices = [s.index for s in inside]
        segments = range(min(indices, default=0), max(indices, default=-1) + 1)
        chunks.append(_Chunk(buffer, start, end, segments, dtype))
    count = len(chunks)
    for index in sorted({0, count - 2, count - 1} & set(range(count)), reverse=True):
        if chunks[index].segments:
            chunks[index : index + 1] = _quarters(chunks[index])
    return chunks


def _as_they_come(
    chunks: Sequence[_Chunk], buffers: Sequence[FlatBuffer], came: Sequence[float]
) -> tuple[list[_Chunk], set[_Place]]:
    """The chunks in the order in which their gradients are complete, and of each the segment that completes it.

    Those that are not complete go last.

    Args:
        chunks: All of them.
        buffers: The flat buffers.
        came: For each segment, in the order of buffers, when its gradient came; 0 where none did.
    """
    positions = dict(zip(((b, s.index) for b in buffers for s in b.segments), came, strict=True))

    def last(chunk: _Chunk) -> tuple[float, _Place | None]:
        if not chunk.places or not all(map(positions.__getitem__, chunk.places)):
            return math.inf, None
        place = max(chunk.places, key=positions.__getitem__)
        return positions[place], place

    found = [(*last(chunk), chunk) for chunk in chunks]
    in_order = sorted(found, key=lambda entry: entry[0])  # stable: otherwise in the order of the layout
    return [chunk for _, _, chunk in in_order], {place for _, place, _ in found if place is not None}


def _quarters(chunk: _Chunk) -> Iterator[_Chunk]:
    """The chunk in up to four, cut between segments."""
    size = -(-(chunk.end - chunk.start) // 4)
    inside = [s for s in chunk.buffer.segments[chunk.segments.start : chunk.segments.stop] if s.offset > chunk.start]
    start = chunk.start
    for segment in [*inside, None]:
        end = chunk.end if segment is None else segment.offset
        if end - start >= size or (segment is None and end > start):
            held = [
                s.index
                for s in chunk.buffer.segments[chunk.segments.start : chunk.segments.stop]
                if s.offset < end and s.offset + s.numel > start
            ]
            yield _Chunk(chunk.buffer, start, end, range(min(held), max(held) + 1), chunk.sent_in)
            start = end


class DataParallel(Ranks):
    """Ranks that each hold all parameters, and reduce their flat buffers once per window.

    Chunks are sent in one order, which is the same on every rank: with `early`, each as soon as the last micro-batch
    has added its part to it and to all before it, the rest at the end of the window.

    Args:
        group: Whom to sum with.
        parameters: How many parameters the accumulator has, frozen ones too.
        early: Whether the last micro-batch of a window may send chunks; the same on all ranks.
    """

    ends_together = True
    reduces_sums = True

    def __init__(self, group: Group, parameters: int, early: bool) -> None:
        self.size = group.size
        self.rank = group.rank
        self.sender = ChunkSender(weakref.proxy(self))
        self._group = group
        self._parameters = parameters
        self._early = early
        self._buffers: Sequence[FlatBuffer] = ()
        self._known = 0
        self._placed = 0  # segments at the last agreement
        self._agreements = 0  # since the layout last grew
        self._chunks: list[_Chunk] = []
        self._chunked = 0  # buffers that have chunks
        self._agreed = 0  # of the chunks, the first ones: all ranks are known to have them
        self._came: Sequence[float] = ()  # see `_as_they_come`; empty while that is not known
        self._awaited: Set[_Place] = frozenset()  # of each chunk, the segment that comes last
        self.open_window()

    def __str__(self) -> str:
        return str(self._group)

    # ---- while a window is open

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Ranks`."""
        self._buffers = buffers
        self._known = len(buffers)  # of the buffers, the first ones: ranks have compared their parameters

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """See `Ranks`."""
        self._group.share_from(shared)

    def open_window(self) -> None:
        """See `Ranks`."""
        self.begun = False
        self._sent = 0
        self._waited = 0
        self._flying: deque[tuple[_Chunk, Tensor, Any]] = deque()
        self._complete: dict[_Place, int] = {}  # segments, and when each was
        self._gone: set[_Place] = set()  # segments of which some part was sent
        self._marked = False  # whether the last micro-batch was said to be

    def already_sent(self, buffer: FlatBuffer, segments: Iterable[int]) -> str | None:
        """See `Ranks`."""
        return next((buffer.segments[index].name for index in segments if (buffer, index) in self._gone), None)

    def send_complete(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """See `Ranks`; sends all chunks that are complete up to the first that is not."""
        self._list_chunks()
        for index in segments:
            self._complete.setdefault((buffer, index), len(self._complete) + 1)
        complete = self._complete.keys()
        while self._group.own and self._sent < self._agreed and self._chunks[self._sent].places <= complete:
            self._send()

    @property
    def awaited(self) -> Set[_Place] | None:
        """See `Ranks`; all until it is known which come last, so that rank 0 learns in which order they do."""
        if not self._group.own:
            return frozenset()
        self._list_chunks()
        return None if not self._came and self._agreements < _LEARNING else self._awaited

    def mark_last(self) -> None:
        """See `Ranks`."""
        self._marked = True

    def end_last(self) -> None:
        """See `Ranks`."""
        self._marked = True
        if self._group.own:
            self._send_all()

    def _send_all(self) -> None:
        self._clear_untouched()
        while self._sent < self._agreed:
            self._send()

    def _clear_untouched(self) -> None:
        """Segments that this rank did not touch hold what earlier windows left; other ranks may have touched them."""
        self._list_chunks()
        stale = [part for chunk in self._chunks[self._sent :] for part in chunk.parts(touched=False)]
        if stale:
            torch._foreach_zero_(stale)

    def _list_chunks(self) -> None:
        """The layout only grows, between windows."""
        if self._chunked < len(self._buffers):
            self._agreements, self._came = 0, ()
            chunks = [_chunks(buffer, self._group.comm_dtype) for buffer in self._buffers]
            self._chunks = [chunk for of_buffer in chunks for chunk in of_buffer]
            # What was unfrozen here, other ranks may not have: that goes out only when the vector has said so.
            self._agreed = sum(map(len, chunks[: self._known]))
            self._awaited = {(chunk.buffer, chunk.segments[-1]) for chunk in self._chunks if chunk.segments}
            self._chunked = len(self._buffers)

    # ---- at its end

    def end_window(self, report: LocalStats, look: Look) -> Ended:
        """See `Ranks`; collective, unless the window was loaded with averages, which are those of all ranks."""
        return SingleProcess().end_window(report, look) if report.averaged else end_reduced(self, report, look)

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine what all ranks report; collective.

        The host reads the result where it does not wait for a device (on the CPU), or where it cannot know without: a
        segment is untouched here, which others may have touched, or the layout grew.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        # Every rank issues its collectives in one order: the chunks come first where a backward may have sent some.
        if self._early:
            self._send_all()
        else:
            self._clear_untouched()

        # One vector of the same length on every rank, whatever is frozen where: all of it is summed.
        device = report.state.device
        placed = len(report.touched)
        frozen = [0.0] * (self._parameters - placed)
        came: list[float] = [0.0] * placed
        if self.rank == 0 and self._agreements < _LEARNING:
            came = [self._complete.get((b, s.index), 0) for b in self._buffers for s in b.segments]
        packer = Packer(self.rank, self.size, device)
        packer.add(
            state=report.state,
            squares=None if report.squares is None else report.squares[0],
            loss=report.loss_sums,
            dropped=report.dropped,
            measuring=report.squares is not None,
            marked=self._marked,
            unmarked=not self._marked and report.micro_batches > 0 and not report.dropped,
            touched=[*report.touched, *frozen],
            came=[*came, *frozen],
        )
        packer.add_by_rank(
            placed=placed, window=report.window, norms=report.norms, divisor=report.divisor, limit=report.limit
        )
        packed = packer.reduce(self._group.sum)

        # What the device alone can conclude: a window that any rank dropped is empty; where windows, norms, divisors or
        # limits differ, that counts as overflow.
        differs = packed.differ("window", "norms", "divisor", "limit")
        state, loss = packed["state"], packed["loss"]
        flags = state[State.FOUND_INF :: State.POISONED - State.FOUND_INF]  # these two
        flags.copy_((flags > 0) | differs)
        dropped, measuring = packed["dropped"], packed["measuring"]
        agreement = GlobalStats(
            state=torch.where(dropped > 0, 0.0, state),
            divisor=None if report.divisor is None else packed["divisor"][0, 0],
            squares=None
            if report.squares is None
            else torch.where(measuring[0] == self.size, packed["squares"][0], torch.nan),
            touched=None,
            dropped=None,
            weight=None,
            loss=torch.where(dropped > 0, 0.0, loss),
        )

        # What the host concludes, where it may look.
        grown, self._placed = placed != self._placed, placed
        self._agreements += 1
        learning = self._agreements <= _LEARNING
        if device.type != "cpu" and all(report.touched) and not grown and not learning and report.divisor is None:
            return agreement
        found = packed.on_host()
        if len(set(found["placed"])) > 1:
            raise RuntimeError(
                "parameters were unfrozen on some ranks only: by rank, "
                f"{[int(n) for n in found['placed']]} are accumulated"
            )
        self._known, self._agreed = len(self._buffers), len(self._chunks)
        if learning and any(found["came"]) and not self._came:
            self._came = found["came"][:placed]
        return agreement._replace(
            touched=[count > 0 for count in found["touched"][:placed]],
            dropped=found["dropped"][0] > 0,
            weight=found["state"][State.WEIGHT],
            error=_disagreement(found),
        )

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """See `Ranks`; `look` works on chunks while the next are on their way. Then module buffers are shared.

        It gets half of those that are left at a time: few calls, the last of which has one chunk. Narrower copies are
        few, so that their chunks are looked at one by one: the link would wait for a look at many.
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
        self._group.share()
        if self._came and self._agreements <= _LEARNING:
            self._chunks, self._awaited = _as_they_come(self._chunks, self._buffers, self._came)

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """See `Ranks`; collective."""
        self._group.sum(tensor, largest)
        return tensor

    # ---- inside

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


def _disagreement(found: dict[str, list[float]]) -> str | None:
    """What ranks disagree about, in words."""
    differ = different_windows(found["window"])
    if differ is not None:
        return differ
    if len(set(found["divisor"])) > 1:
        return f"divisor must be that of the whole window, over all ranks; by rank it is {found['divisor']} (0.0: none)"
    (marked,), (unmarked,) = found["marked"], found["unmarked"]
    if marked and unmarked:
        return (
            f"the last micro-batch was marked (last=True, acc.window) on {int(marked)} ranks, and not on "
            f"{int(unmarked)} others that ran micro-batches: mark it on all of them, or on none"
        )
    return different_limits(found["norms"], found["limit"])
