"""The sums of a window, added up over ranks chunk by chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..window.state import Window
from .group import Agreement, Ranks

CHUNK_BYTES = 32 * 2**20  # of a flat buffer: long enough for bandwidth, short enough that several are in flight
_IN_FLIGHT = 4  # chunks whose narrower copies are alive; those that are reduced in place need no limit


class _Chunk(NamedTuple):
    """A range of a flat buffer, and the segments that it holds some part of."""

    buffer: FlatBuffer
    start: int
    end: int
    segments: range

    @property
    def tensor(self) -> Tensor:
        """The range, padding between segments included."""
        return self.buffer.tensor[self.start : self.end]

    def parts(self, touched: bool) -> list[Tensor]:
        """The parts of segments that hold a sum, or of those that do not; padding is in neither."""
        of_kind = (self.buffer.segments[i] for i in self.segments if bool(self.buffer.touched[i]) is touched)
        ranges = ((max(s.offset, self.start), min(s.offset + s.numel, self.end)) for s in of_kind)
        return [self.buffer.tensor[start:end] for start, end in ranges]


def _chunks(buffer: FlatBuffer) -> list[_Chunk]:
    size = CHUNK_BYTES // buffer.dtype.itemsize
    chunks = []
    for start in range(0, buffer.numel, size):
        end = min(start + size, buffer.numel)
        inside = [s.index for s in buffer.segments if s.offset < end and s.offset + s.numel > start]
        chunks.append(_Chunk(buffer, start, end, range(min(inside, default=0), max(inside, default=-1) + 1)))
    return chunks


class Reduction:
    """Sums the flat buffers of one accumulator over its ranks, once per window.

    Chunks are sent in their order, which is the same on every rank: with `release="backward"` each as soon as the last
    micro-batch has added its part to it and to all before it, the rest at the end of the window.

    Args:
        ranks: Whom to sum with.
        store: The flat buffers.
        early: Whether the last micro-batch of a window may send chunks; the same on all ranks.
    """

    def __init__(self, ranks: Ranks, store: Store, early: bool) -> None:
        self._ranks = ranks
        self._store = store
        self._early = early
        self._chunks: list[_Chunk] = []
        self._buffers = 0  # that have chunks
        self.open_window()

    def open_window(self) -> None:
        """Nothing is sent."""
        self._sent = 0
        self._waited = 0
        self._flying: deque[tuple[_Chunk, Tensor, Any]] = deque()
        self._complete: dict[FlatBuffer, set[int]] = {}

    @property
    def begun(self) -> bool:
        """Whether any part of this window was sent, so that nothing can be added to it."""
        return self._sent > 0

    def sent(self, buffer: FlatBuffer, segments: Iterable[int]) -> str | None:
        """The name of a segment that was sent, so that no gradient can be added to it any more; None if none was."""
        sent = {i for chunk in self._chunks[: self._sent] if chunk.buffer is buffer for i in chunk.segments}
        return next((buffer.segments[index].name for index in segments if index in sent), None)

    def extend(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """Note that segments are complete, and send all chunks that are."""
        self._list_chunks()
        self._complete.setdefault(buffer, set()).update(segments)
        while self._sent < len(self._chunks):
            chunk = self._chunks[self._sent]
            complete = self._complete.get(chunk.buffer, ())
            if not all(index in complete for index in chunk.segments):
                break
            self._send()

    def send_all(self) -> None:
        """Send what is not sent."""
        self._clear_untouched()
        while self._sent < len(self._chunks):
            self._send()

    def _clear_untouched(self) -> None:
        """Segments that this rank did not touch hold what earlier windows left; other ranks may have touched them."""
        self._list_chunks()
        stale = [part for chunk in self._chunks[self._sent :] for part in chunk.parts(touched=False)]
        if stale:
            torch._foreach_zero_(stale)

    def agree(self, window: Window, squares: Tensor | None, divisor: Tensor | None) -> Agreement:
        """`Ranks.agree`, in its place among the collectives: after the chunks where a backward may send them."""
        if self._early:
            self.send_all()
        else:
            self._clear_untouched()
        return self._ranks.agree(window, self._store, squares, divisor)

    def finish(self, work: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """Wait for every chunk, and hand over its parts of touched segments while the next are on their way.

        Then module buffers are shared.
        """
        for index, chunk in enumerate(self._chunks):
            while self._sent < min(index + _IN_FLIGHT, len(self._chunks)):
                self._send()
            while self._waited <= index:
                self._wait()
            work(chunk.buffer, chunk.parts(touched=True))
        self._ranks.share()

    def _list_chunks(self) -> None:
        """The layout only grows, between windows."""
        for buffer in self._store.buffers[self._buffers :]:
            self._chunks += _chunks(buffer)
        self._buffers = len(self._store.buffers)

    def _send(self) -> None:
        chunk = self._chunks[self._sent]
        self._flying.append((chunk, *self._ranks.send(chunk.tensor)))
        self._sent += 1
        while len(self._flying) > _IN_FLIGHT and self._flying[0][1].dtype != chunk.buffer.dtype:
            self._wait()

    def _wait(self) -> None:
        chunk, sent, work = self._flying.popleft()
        work.wait()
        if sent.dtype != chunk.buffer.dtype:
            chunk.tensor.copy_(sent)
        self._waited += 1
