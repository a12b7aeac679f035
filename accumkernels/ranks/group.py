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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.parameters import NamedParameter
from ..buffers.store import Store
from ..ops.schema import State
from ..window.state import Window
from ..window.verdict import Verdict, judge

_BROADCAST_BYTES = 32 * 2**20  # tensors are broadcast together up to about this many bytes


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
            if sum(t.nbytes for t in of_kind[-1]) >= _BROADCAST_BYTES:
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
