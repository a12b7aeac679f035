"""Pinned host memory, one slot per parameter: gradients pass through it on their way out, weights on their way back."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..devices import current_stream, module
from ..errors import logger
from ..ops.reference import flat
from .checks import check_memory

_log = logger(__name__)
_ALIGNMENT = 512  # bytes; what torch's host allocator aligns to, too
_LARGEST = 2**30  # bytes of a piece of pinned memory
_ROUNDED = 32 * 2**20  # bytes of weights that are rounded before their copy begins


def event(device: torch.device) -> torch.Event:
    """Make an event. A thread that synchronises with it sleeps where the device allows that; otherwise it spins."""
    try:
        return module(device).Event(blocking=True)  # torch.Event ignores the argument
    except (AttributeError, RuntimeError, TypeError):
        return torch.Event(device)


class Slot:
    """One parameter's host memory.

    Attributes:
        memory: uint8 `[bytes of the parameter]`, pinned where that works.
        holder: The micro-batch whose gradient is in it; None: it is free.
    """

    __slots__ = ("holder", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.holder: object = None


class Slots:
    """The slots of one accumulator's parameters.

    Attributes:
        changed: Notified when a slot becomes free; guards all holders.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._slots: dict[int, Slot] = {}  # by id of the parameter
        self._pins = True
        self._underway: list[torch.Event] = []  # of copies from and to slots that the host may not have waited for

    def __getitem__(self, param: Tensor) -> Slot:
        return self._slots[id(param)]

    # ---- memory

    def grow(self, params: Sequence[Tensor]) -> None:
        """Allocate the slots of parameters on devices that have none.

        Raises:
            RuntimeError: There is not enough host memory for these, their sums and masters.
        """
        fresh = [p for p in params if p.device.type != "cpu" and id(p) not in self._slots]
        check_memory(fresh)
        for param, memory in zip(fresh, self._memory([p.nbytes for p in fresh]), strict=True):
            self._slots[id(param)] = Slot(memory)

    def _memory(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Allocate host memory of these bytes each, in few pieces.

        Torch's host allocator rounds pinned memory up to powers of two: pieces of such sizes waste less than a slot.
        """
        rest = sum(map(_aligned, sizes))
        piece, used = torch.empty(0, dtype=torch.uint8, device="cpu"), 0
        for size in sizes:
            if used + size > piece.numel():
                whole = 2 ** max(math.floor(math.log2(min(rest, _LARGEST))), math.ceil(math.log2(max(size, 1))))
                piece, used = self.pinned(whole), 0
            yield piece[used : used + size]
            used += _aligned(size)
            rest -= _aligned(size)

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned memory, uint8 `[nbytes]`; ordinary memory where pinning fails, which is said once."""
        if self._pins:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                _log.warning(
                    "cpu_offload: host memory cannot be pinned (%s): copies are slower, and the host waits for them. "
                    "Raise the limit of locked memory (ulimit -l), or free memory",
                    str(error).partition("\n")[0],
                )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    # ---- who uses it

    def free(self, slots: Iterable[Slot], underway: Iterable[torch.Event]) -> None:
        """Let the next gradients have slots whose gradients were added, or are not wanted any more.

        Copies that are still underway are before the next gradients on their stream; weights must wait for them.
        """
        with self.changed:
            self._underway.extend(underway)
            for slot in slots:
                slot.holder = None
            self.changed.notify_all()

    # ---- weights on their way back

    def send(self, params: Sequence[Tensor], masters: Sequence[Tensor], ops: ModuleType) -> None:
        """Round masters into slots, and copy these to the parameters, on the current streams of their devices.

        A gradient that a copy stream puts into a slot later waits for the current stream, and so for this copy.

        Args:
            params: On devices.
            masters: On the host, of the same shapes; in the parameters' order of dimensions.
            ops: The backend of the masters.

        Raises:
            RuntimeError: A slot holds a gradient that was not added yet.
        """
        if any(self[param].holder is not None for param in params):
            raise RuntimeError(
                "cpu_offload: an optimizer has stepped masters inside a window, whose gradients are on their way: end "
                "the window by acc.step(optimizer) or acc.finalize(optimizer) before, or drop it by acc.zero_()"
            )
        while self._underway:  # all have read the slots, or written to them, before the host writes to them again
            self._underway.pop().synchronize()
        batch: list[tuple[Tensor, Tensor, Tensor]] = []
        waiting = 0
        for param, master in zip(params, masters, strict=True):
            batch.append((param.detach(), self[param].memory.view(param.dtype), master))
            waiting += param.nbytes
            if waiting >= _ROUNDED:
                _send(batch, ops)
                batch, waiting = [], 0
        _send(batch, ops)
        for device in dict.fromkeys(param.device for param in params):
            with current_stream(device):
                self._underway.append(event(device))
                self._underway[-1].record()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _send(batch: Sequence[tuple[Tensor, Tensor, Tensor]], ops: ModuleType) -> None:
    """Round masters into slots, and copy these to the parameters."""
    ops.scaled_copy_([slot for _, slot, _ in batch], [flat(master) for *_, master in batch])
    for param, slot, master in batch:
        # From one dimension to one dimension: other copies may go through a temporary that the host does not wait for.
        same = param.stride() == master.stride()
        dense = param if same else torch.empty_like(master, dtype=param.dtype, device=param.device)
        flat(dense).copy_(slot, non_blocking=True)
        if not same:
            param.copy_(dense)
