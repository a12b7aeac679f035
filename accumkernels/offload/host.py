"""Host memory that sums may be in: what that cannot be combined with, whether there is enough, and slots for copies."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..buffers.flat import buffer_dtype
from ..buffers.parameters import NamedParameter, is_dtensor
from ..devices import current_stream, module
from ..errors import logger
from ..ops.reference import flat

_log = logger(__name__)

# ---- What sums in host memory cannot be combined with, and whether there is memory for them

_POLICY = "its CPUOffloadPolicy keeps shards, their gradients and the optimizer's state in host memory"
_CGROUPS = Path("/sys/fs/cgroup")


def check_parameters(named: Sequence[NamedParameter], group: object, is_stage: bool) -> None:
    """Refuse parameters and ranks that sums in host memory are not for.

    Args:
        named: All parameters.
        group: The process group of the sums; None: this process is alone.
        is_stage: Whether they belong to a stage of a pipeline.

    Raises:
        ValueError: says why, and what to do instead.
    """
    if any(is_dtensor(entry.param) for entry in named):
        raise ValueError(f"cpu_offload=True with FSDP2: {_POLICY}; leave cpu_offload out, and shard with that policy")
    if is_stage:
        raise ValueError(
            "cpu_offload=True with the stages of a pipeline: their schedules end a window together, and none waits for "
            "gradients on their way to host memory; leave cpu_offload out, or split the model over more stages"
        )
    if group is not None:
        raise ValueError(
            "cpu_offload=True with a process group (or DistributedDataParallel): sums are reduced over ranks where "
            f"they are, and in host memory that would be slow. Leave cpu_offload out and use FSDP2: {_POLICY}"
        )
    trainable = [entry.param for entry in named if entry.param.requires_grad] or [entry.param for entry in named]
    if all(param.device.type == "cpu" for param in trainable):
        raise ValueError(
            "cpu_offload=True with a model on the CPU, whose sums and optimizer state are in host memory anyway: move "
            "the model to its device before, or pass master_weights=True for fp32 masters alone"
        )


def host_bytes(params: Sequence[Tensor]) -> int:
    """Bytes of host memory that sums, masters and slots of parameters take, without the optimizer's state."""
    wide = {p: buffer_dtype(p.dtype).itemsize for p in params}
    return sum(p.numel() * (2 * wide[p] + p.dtype.itemsize) for p in params)


def check_memory(params: Sequence[Tensor]) -> None:
    """Refuse what would fill the machine's memory, before the system ends a process for it.

    Raises:
        RuntimeError: has the bytes needed and available.
    """
    needed, available = host_bytes(params), available_bytes()
    if available is not None and needed > available:
        count = sum(p.numel() for p in params)
        raise RuntimeError(
            f"cpu_offload=True: sums, masters and slots of {count:,} trainable parameters take "
            f"{needed / 2**30:,.1f} GiB of host memory ({needed:,} bytes), and the optimizer's state comes on top; "
            f"{available / 2**30:,.1f} GiB are available ({available:,} bytes). Train fewer parameters (freeze layers, "
            "LoRA), add memory, or close what else uses it"
        )


def available_bytes() -> int | None:
    """Bytes of host memory that this process may still take; None if nothing says so."""
    found = [_free_of_machine(), _free_of_group()]
    return min((number for number in found if number is not None), default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        names: Any = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        if "SC_AVPHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _free_of_group() -> int | None:
    """What a container's limit leaves (cgroups v2); its page cache can be freed."""
    try:
        limit, used = (int((_CGROUPS / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = (_CGROUPS / "memory.stat").read_text().split()
        return limit - used + int(cached[cached.index("inactive_file") + 1])
    except (OSError, ValueError):  # the first number is "max" where there is no limit
        return None


# ---- Pinned memory, one slot per parameter: gradients pass through it on their way out, weights on their way back

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
