"""Data parallel windows: one small collective for all scalars, and the flat buffers in chunks.

What a window costs in communication is independent of its micro-batches. At its end every rank

* puts its sum of weights, flags and touched segments in one fp64 vector, which is summed (`agree`): all ranks then
  divide by the same number, and all step or all skip;
* sums the flat buffers, chunk by chunk, several in flight, so that looking at one chunk (norm, overflow, division)
  overlaps with the communication of the next (`reduce`).

The collectives and their sizes are the same on every rank, whatever its window was like: buffers are reduced whole,
segments that a rank did not touch as zeros. With `release="backward"` the chunks come first, since the last micro-batch
may send them while its backward runs; otherwise the vector does, so that the divisor is there when the chunks are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.flat import FlatBuffer
from ..ops.schema import State
from .alone import Agreement, Alone, Report
from .group import Group

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


class Reduction(Alone):
    """Ranks that each hold all parameters, and reduce their flat buffers once per window.

    Chunks are sent in their order, which is the same on every rank: with `early`, each as soon as the last micro-batch
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
        self._group = group
        self._parameters = parameters
        self._early = early
        self._buffers: Sequence[FlatBuffer] = ()
        self._placed = 0  # segments at the last agreement
        self._chunks: list[_Chunk] = []
        self._chunked = 0  # buffers that have chunks
        self.open_window()

    def __str__(self) -> str:
        return str(self._group)

    # ---- while a window is open

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Alone`."""
        self._buffers = buffers

    def open_window(self) -> None:
        """See `Alone`."""
        self._sent = 0
        self._waited = 0
        self._flying: deque[tuple[_Chunk, Tensor, Any]] = deque()
        self._complete: dict[FlatBuffer, set[int]] = {}

    @property
    def begun(self) -> bool:
        """See `Alone`."""
        return self._sent > 0

    def already_sent(self, buffer: FlatBuffer, segments: Iterable[int]) -> str | None:
        """See `Alone`."""
        sent = {i for chunk in self._chunks[: self._sent] if chunk.buffer is buffer for i in chunk.segments}
        return next((buffer.segments[index].name for index in segments if index in sent), None)

    def send_complete(self, buffer: FlatBuffer, segments: Iterable[int]) -> None:
        """See `Alone`; sends all chunks that are complete up to the first that is not."""
        self._list_chunks()
        self._complete.setdefault(buffer, set()).update(segments)
        while self._sent < len(self._chunks):
            chunk = self._chunks[self._sent]
            complete = self._complete.get(chunk.buffer, ())
            if not all(index in complete for index in chunk.segments):
                break
            self._send()

    def send_all(self) -> None:
        """See `Alone`."""
        self._clear_untouched()
        while self._sent < len(self._chunks):
            self._send()

    def _clear_untouched(self) -> None:
        """Segments that this rank did not touch hold what earlier windows left; other ranks may have touched them."""
        self._list_chunks()
        stale = [part for chunk in self._chunks[self._sent :] for part in chunk.parts(touched=False)]
        if stale:
            torch._foreach_zero_(stale)

    def _list_chunks(self) -> None:
        """The layout only grows, between windows."""
        for buffer in self._buffers[self._chunked :]:
            self._chunks += _chunks(buffer)
        self._chunked = len(self._buffers)

    # ---- at its end

    def agree(self, report: Report) -> Agreement:
        """Combine what all ranks report; collective.

        The host reads the result where it does not wait for a device (on the CPU), or where it cannot know without: a
        segment is untouched here, which others may have touched, or the layout grew.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        # Every rank issues its collectives in one order: the chunks come first where a backward may have sent some.
        if self._early:
            self.send_all()
        else:
            self._clear_untouched()

        # One vector of the same length on every rank, whatever is frozen where: all of it is summed.
        device = report.state.device
        placed = len(report.touched)
        layouts = [0] * self.size
        layouts[self.rank] = placed
        flags = [report.dropped, report.squares is not None, *report.touched, *bytes(self._parameters - placed)]
        host = torch.tensor([*flags, *layouts], dtype=torch.float64, device="cpu")
        divisors = torch.zeros(self.size, dtype=torch.float64, device=device)
        if report.divisor is not None:
            divisors[self.rank] = report.divisor
        squares = torch.zeros_like(report.state[:1]) if report.squares is None else report.squares.reshape(1)
        vector = torch.cat([report.state, squares, move(host, device), divisors])
        self._group.sum(vector)

        # What the device alone can conclude: a window that any rank dropped is empty, divisors that differ overflow.
        sizes = [len(State), 1, 1, 1, self._parameters, self.size, self.size]
        state, squares, dropped, measuring, _, _, divisors = vector.split(sizes)
        differs = (divisors != divisors[0]).any()
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag] = ((state[flag] > 0) | differs).double()
        agreement = Agreement(
            state=torch.where(dropped > 0, 0.0, state),
            divisor=None if report.divisor is None else divisors[0],
            squares=None if report.squares is None else torch.where(measuring[0] == self.size, squares[0], torch.nan),
            touched=None,
            dropped=None,
            weight=None,
        )

        # What the host concludes, where it may look.
        grown, self._placed = placed != self._placed, placed
        if device.type != "cpu" and all(report.touched) and not grown:
            return agreement
        host_state, _, (any_dropped,), _, counts, layouts, given = (p.tolist() for p in vector.cpu().split(sizes))
        if len(set(layouts)) > 1:
            raise RuntimeError(
                f"parameters were unfrozen on some ranks only: by rank, {[int(n) for n in layouts]} are accumulated"
            )
        error = None
        if len(set(given)) > 1:
            error = f"divisor must be that of the whole window, over all ranks; by rank it is {given} (0.0: none)"
        return agreement._replace(
            touched=[count > 0 for count in counts[:placed]],
            dropped=any_dropped > 0,
            weight=host_state[State.WEIGHT],
            error=error,
        )

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """See `Alone`; `look` works on a chunk while the next are on their way. Then module buffers are shared."""
        for index, chunk in enumerate(self._chunks):
            while self._sent < min(index + _IN_FLIGHT, len(self._chunks)):
                self._send()
            while self._waited <= index:
                self._wait()
            look(chunk.buffer, chunk.parts(touched=True))
        self._group.share()

    def _send(self) -> None:
        chunk = self._chunks[self._sent]
        self._flying.append((chunk, *self._group.send(chunk.tensor)))
        self._sent += 1
        while len(self._flying) > _IN_FLIGHT and self._flying[0][1].dtype != chunk.buffer.dtype:
            self._wait()

    def _wait(self) -> None:
        chunk, sent, work = self._flying.popleft()
        work.wait()
        if sent.dtype != chunk.buffer.dtype:
            chunk.tensor.copy_(sent)
        self._waited += 1
