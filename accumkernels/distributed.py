"""Ranks that end their windows together: one small collective for all scalars, then the flat buffers in chunks.

What a window costs in communication is independent of its micro-batches. At its end every rank

* puts its sum of weights, flags and touched segments in one fp64 vector, which is summed (`Ranks.agree`): all ranks
  then divide by the same number, and all step or all skip;
* sums the flat buffers, chunk by chunk, several in flight, so that looking at one chunk (norm, overflow, division)
  overlaps with the communication of the next (`Reduction`).

The collectives and their sizes are the same on every rank, whatever its window was like: buffers are reduced whole,
segments that a rank did not touch as zeros. With `release="backward"` the chunks come first, since the last micro-batch
may send them while its backward runs; otherwise the vector does, so that the divisor is there when the chunks are.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .devices import move
from .layout import FlatBuffer
from .ops.schema import State
from .parameters import NamedParameter
from .store import Store
from .verdict import Verdict, judge
from .window import Window

CHUNK_BYTES = 32 * 2**20  # of a flat buffer: long enough for bandwidth, short enough that several are in flight
_IN_FLIGHT = 4  # chunks whose narrower copies are alive; those that are reduced in place need no limit


class Agreement(NamedTuple):
    """What all ranks know of a window, on the first device.

    Attributes:
        verdict: The same on every rank.
        state: fp64 `[4]`, of all ranks together (`State`).
        of_micro_batches: fp64 0-d, `sum w_i |g_i|^2`.
        all_measure: bool 0-d, whether every rank measured it.
        error: What ranks disagree about, where the host has looked; to be raised when nobody waits for this rank.
    """

    verdict: Verdict
    state: Tensor
    of_micro_batches: Tensor
    all_measure: Tensor
    error: str | None


class Ranks:
    """The process group of an accumulator.

    Args:
        group: A `torch.distributed.ProcessGroup`.
        comm_dtype: What fp32 sums are communicated in.
        shared: Tells which tensors are to be those of rank 0 after every window: a module's buffers.
    """

    def __init__(self, group: Any, comm_dtype: torch.dtype, shared: Callable[[], list[Tensor]]) -> None:
        self.size: int = torch.distributed.get_world_size(group)
        self.rank: int = torch.distributed.get_rank(group)
        self._group = group
        self._comm_dtype = comm_dtype
        self._shared = shared
        self._source = torch.distributed.get_global_rank(group, 0)
        self._placed = 0  # segments at the last agreement

    def __str__(self) -> str:
        narrow = "" if self._comm_dtype == torch.float32 else f", sums sent in {self._comm_dtype}"
        return f"rank {self.rank} of {self.size}{narrow}"

    # ---- at construction

    def check_alike(self, named: Sequence[NamedParameter], **options: object) -> None:
        """Check that all ranks build the same accumulator, on devices that the group can communicate from; collective.

        Args:
            named: The parameters.
            **options: Arguments that decide what is communicated, and when.

        Raises:
            RuntimeError: on all ranks, with the first difference; or the group cannot reduce tensors of a device.
        """
        description = [f"{key}={value!r}" for key, value in {**options, "comm_dtype": self._comm_dtype}.items()]
        description += [
            f"{e.name!r} {tuple(e.param.shape)} {e.param.dtype}{'' if e.param.requires_grad else ' frozen'}"
            for e in named
        ]
        digest = int.from_bytes(hashlib.blake2b("\n".join(description).encode(), digest_size=7).digest(), "big")
        alike = True
        for device in dict.fromkeys(entry.param.device for entry in named):
            both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
            try:
                torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=self._group)
            except RuntimeError as error:
                backend = torch.distributed.get_backend(self._group)
                raise RuntimeError(
                    f"process_group ({backend}): a tensor on {device} was not reduced: {error}"
                ) from error
            largest, smallest = both.tolist()
            alike = alike and largest == -smallest
        if alike:
            return
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, [*description, "no more parameters"], group=self._group)
        for rank, theirs in enumerate(everyones):
            for a, b in zip(everyones[0], theirs, strict=False):
                if a != b:
                    raise RuntimeError(f"process_group: rank 0 has {a}, rank {rank} has {b}; all ranks must be alike")

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into the tensors of all ranks; collective."""
        batches: dict[tuple[torch.device, torch.dtype], list[list[Tensor]]] = {}
        for tensor in tensors:
            of_kind = batches.setdefault((tensor.device, tensor.dtype), [[]])
            if sum(t.nbytes for t in of_kind[-1]) >= CHUNK_BYTES:
                of_kind.append([])
            of_kind[-1].append(tensor.detach())
        for batch in (batch for of_kind in batches.values() for batch in of_kind):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            if flat.numel():  # as bytes: gloo does not know every dtype
                torch.distributed.broadcast(flat.view(torch.uint8), self._source, group=self._group)
            if self.rank != 0:
                for tensor, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    # ---- at the end of a window

    def share(self) -> None:
        """Let all ranks have rank 0's module buffers; collective where there are any."""
        self.broadcast(self._shared())

    def agree(self, window: Window, store: Store, squares: Tensor | None, divisor: Tensor | None) -> Agreement:
        """Judge a window together; collective.

        Afterwards the store's state and touched segments, and what the host knows of the window, are those of all
        ranks. The host reads the result where it does not wait for a device (on the CPU), or where it cannot know
        without: a segment is untouched here, which others may have touched, or the layout grew.

        Args:
            window: This rank's.
            store: Its flat buffers.
            squares: fp64 0-d, this rank's `sum w_i |g_i|^2`; None where it is not measured.
            divisor: fp64 0-d, the same on all ranks; None for the sum of weights.

        Raises:
            RuntimeError: parameters were unfrozen on some ranks only.
        """
        device = store.device
        touched = bytearray().join(buffer.touched for buffer in store.buffers)
        placed = len(touched)
        untouched_here = not all(touched)
        touched += bytes(len(store.named) - placed)  # of the same length on every rank, whatever is frozen
        layouts = [0] * self.size
        layouts[self.rank] = placed
        host = torch.tensor(
            [window.dropped, squares is not None, *touched, *layouts], dtype=torch.float64, device="cpu"
        )
        divisors = torch.zeros(self.size, dtype=torch.float64, device=device)
        if divisor is not None:
            divisors[self.rank] = divisor
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        vector = torch.cat(
            [store.state(), zero if squares is None else squares.reshape(1), move(host, device), divisors]
        )
        torch.distributed.all_reduce(vector, group=self._group)

        sizes = [len(State), 1, 1, 1, len(touched), self.size, self.size]
        state, of_micro_batches, dropped, measuring, _, _, divisors = vector.split(sizes)
        differs = (divisors != divisors[0]).any()
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag] = ((state[flag] > 0) | differs).double()
        state = torch.where(dropped > 0, 0.0, state)  # as if it were empty
        error = None
        if device.type == "cpu" or untouched_here or placed != self._placed:
            host_state, _, (any_dropped,), _, counts, layouts, given = (p.tolist() for p in vector.cpu().split(sizes))
            if len(set(layouts)) > 1:
                raise RuntimeError(
                    f"parameters were unfrozen on some ranks only: by rank, {[int(n) for n in layouts]} are accumulated"
                )
            for buffer in store.buffers:
                own, counts = counts[: len(buffer.segments)], counts[len(buffer.segments) :]
                buffer.touched = bytearray(count > 0 for count in own)
            window.dropped = any_dropped > 0
            window.host_weight = host_state[State.WEIGHT]
            if len(set(given)) > 1:
                error = f"divisor must be that of the whole window, over all ranks; by rank it is {given} (0.0: none)"
        else:
            window.decided_on_device = True
        self._placed = placed
        if store.states:
            store.states[device].copy_(state)
        return Agreement(
            verdict=judge(state, None if divisor is None else divisors[0]),
            state=state,
            of_micro_batches=of_micro_batches[0],
            all_measure=measuring[0] == self.size,
            error=error,
        )

    def send(self, piece: Tensor) -> tuple[Tensor, Any]:
        """Begin to sum a range of a flat buffer over all ranks; what is sent, and what to wait for."""
        narrow = piece.dtype == torch.float32 and self._comm_dtype != torch.float32
        sent = piece.to(self._comm_dtype) if narrow else piece
        return sent, torch.distributed.all_reduce(sent, group=self._group, async_op=True)


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
