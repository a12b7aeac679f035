"""Cuts flat buffers into the chunks that are reduced over ranks, and orders them.

The cuts never change, since the bits of a sum over ranks depend on them. The order is at first the layout's, and then
the order in which rank 0's gradients came in an early window, so that no chunk waits for one whose gradients come later
or never.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer

# Long enough for bandwidth, yet short, because the link waits until backward has completed a whole chunk.
CHUNK_BYTES = 16 * 2**20
Place = tuple[FlatBuffer, int]  # a segment


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a flat buffer, the segments that overlap it, and the dtype in which it is sent."""

    buffer: FlatBuffer
    start: int
    end: int
    segments: range
    sent_in: torch.dtype

    @functools.cached_property
    def places(self) -> frozenset[Place]:
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
        end = min(start + size, buffer.numel)
        inside = [s for s in buffer.segments if s.offset < end and s.offset + s.numel > start]
        dtype = buffer.dtype
        if dtype == torch.float32:
            bf16 = inside and all(s.dtype == torch.bfloat16 for s in inside)
            dtype = sent_in if isinstance(sent_in, torch.dtype) else torch.bfloat16 if bf16 else dtype
        indices = [s.index for s in inside]
        segments = range(min(indices, default=0), max(indices, default=-1) + 1)
        chunks.append(Chunk(buffer, start, end, segments, dtype))
    count = len(chunks)
    for index in sorted({0, count - 2, count - 1} & set(range(count)), reverse=True):
        if chunks[index].segments:
            chunks[index : index + 1] = _quarters(chunks[index])
    return chunks


def as_they_come(
    chunks: Sequence[Chunk], buffers: Sequence[FlatBuffer], came: Sequence[float]
) -> tuple[list[Chunk], set[Place]]:
    """Sort chunks by when their gradients are complete; returns also the segment that completes each chunk.

    Incomplete chunks go last.

    Args:
        chunks: All of them.
        buffers: The flat buffers.
        came: For each segment, in the order of buffers, when its gradient came; 0 if none did.
    """
    positions = dict(zip(((b, s.index) for b in buffers for s in b.segments), came, strict=True))

    def last(chunk: Chunk) -> tuple[float, Place | None]:
        if not chunk.places or not all(map(positions.__getitem__, chunk.places)):
            return math.inf, None
        place = max(chunk.places, key=positions.__getitem__)
        return positions[place], place

    found = [(*last(chunk), chunk) for chunk in chunks]
    in_order = sorted(found, key=lambda entry: entry[0])  # stable: ties stay in the order of the layout
    return [chunk for _, _, chunk in in_order], {place for _, place, _ in found if place is not None}


def _quarters(chunk: Chunk) -> Iterator[Chunk]:
    """Cut the chunk into up to four, between segments."""
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
            yield Chunk(chunk.buffer, start, end, range(min(held), max(held) + 1), chunk.sent_in)
            start = end
