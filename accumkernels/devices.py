"""Accelerators: what `torch.accelerator` says of any, and a table of what only some kinds have.

Work on an accelerator is queued on streams. What one stream computes is ready for another only if that one waits, and
memory that one has allocated may be used again while another still reads it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_, methodcaller
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

# ---- What only some kinds of devices have


class _Kind(NamedTuple):
    """What a kind of device has beside the interface of torch.accelerator; the defaults are right for any.

    Attributes:
        raw_stream: The current stream's handle, by index of the device, in a twentieth of the time that asking for the
            stream takes.
        is_capturing: Whether the current stream of the current device is being captured, where `torch.Stream` does not
            say so itself (torch 2.10).
        adds_products: Whether `torch.addmm` with `out_dtype` adds products of 16-bit operands to fp32 sums. torch 2.10
            already takes sums that are wider than the operands ("self dtype must match either out_dtype or mat1
            dtype"); other kinds got it later, or have not run it.
        seeds_all: Whether random generators are of the kind, and not of each device.
    """

    raw_stream: Callable[[int], int] | None = None
    is_capturing: Callable[[], bool] | None = None
    adds_products: bool = False
    seeds_all: bool = False


_KINDS = {
    "cuda": _Kind(
        raw_stream=getattr(torch._C, "_cuda_getCurrentRawStream", None),
        is_capturing=torch.cuda.is_current_stream_capturing,
        adds_products=True,
    ),
    "xpu": _Kind(raw_stream=getattr(torch._C, "_xpu_getCurrentRawStream", None)),
    "mps": _Kind(seeds_all=True),
}
_ANY = _Kind()


def _kind(device: torch.device) -> _Kind:
    return _KINDS.get(device.type, _ANY)


def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch.addmm` with `out_dtype` adds products of 16-bit operands of `dtype` to fp32 sums, and fast."""
    if not _kind(device).adds_products or torch.version.hip is not None:  # not run on ROCm
        return False
    return dtype == torch.float16 or multiplies_bf16(device)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether an accelerator multiplies bf16 itself; GPUs before NVIDIA's Ampere emulate it, slowly."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def bytes_per_second(device: torch.device) -> float:
    """The bandwidth of an accelerator's memory; that of an RTX 3060 where torch does not know its clock and width."""
    known = device.type == "cuda" and torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(device) if known else None
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * 1e3 * kilohertz * bits / 8 or 360e9  # two transfers in each cycle of this clock


def counts_memory(device: torch.device) -> bool:
    """Whether an accelerator's allocator counts the bytes in use, and knows how many are free."""
    if not is_current(device.type) or not torch.accelerator.is_available():
        return False
    try:
        torch.accelerator.memory_stats(device)
        torch.accelerator.get_memory_info(device)
    except RuntimeError:  # a NotImplementedError is one, too
        return False
    return True


def memory_fraction(device: torch.device) -> float | None:
    """The part of an accelerator's memory that its allocator may take; None where it has no such limit."""
    get = getattr(module(device), "get_per_process_memory_fraction", None)
    return None if get is None else get(device)


def set_memory_fraction(device: torch.device, fraction: float) -> None:
    """Set what `memory_fraction` returned as a number."""
    module(device).set_per_process_memory_fraction(fraction, device)


def idle_bytes_of_graphs(device: torch.device) -> int:
    """Bytes that the allocator has reserved for CUDA graphs and that no tensor takes: ordinary tensors cannot."""
    if device.type != "cuda":
        return 0
    index = with_index(device).index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


# ---- Which devices there are


def module(device: torch.device) -> ModuleType:
    """Torch's module of a kind of device, such as `torch.xpu`."""
    found: ModuleType = torch.get_device_module(device)
    return found


def _kinds() -> list[torch.device]:
    """The kinds of accelerators that this process may have, that of torch.accelerator first."""
    found = torch.accelerator.current_accelerator()
    return [torch.device(kind) for kind in dict.fromkeys(([] if found is None else [found.type]) + list(_KINDS))]


def is_available(device: torch.device) -> bool:
    """Whether torch can use an accelerator, apart from its index."""
    if is_current(device.type):
        return torch.accelerator.is_available()
    # Torch has no module of some kinds.
    return getattr(getattr(torch, device.type, None), "is_available", lambda: False)()


def default() -> torch.device:
    """The accelerator that there is, else the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def accelerators() -> list[torch.device]:
    """Every device that torch can use beside the CPU."""
    return [device for kind in _kinds() if is_available(kind) for device in _all(kind)]


def _all(kind: torch.device) -> list[torch.device]:
    count = torch.accelerator.device_count() if is_current(kind.type) else module(kind).device_count()
    return [torch.device(kind.type, index) for index in range(count)]


def with_index(device: torch.device) -> torch.device:
    """A device of one kind by its index: the current one if none is given; the CPU has none."""
    if device.index is not None or not is_accelerator(device):
        return device
    current = torch.accelerator.current_device_index() if is_current(device.type) else module(device).current_device()
    return torch.device(device.type, current)


@functools.cache
def is_accelerator(device: torch.device) -> bool:
    """Whether a device is an accelerator that torch knows, whose work is queued on streams; the CPU is none."""
    return device.type in _KINDS or is_current(device.type)


def is_current(kind: str) -> bool:
    """Whether a kind of device is the one that torch.accelerator speaks of."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == kind


@functools.cache
def obstacle(device: torch.device) -> str | None:
    """Why no gradients can be accumulated on a device, in words; None if they can.

    Weights, loss scales and norms are counted in fp64, without which a window of many micro-batches would lose some.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():
            ones = torch.ones(2, dtype=torch.float64, device=device)
            works = (ones + ones).dtype == torch.float64
    except (RuntimeError, TypeError, NotImplementedError) as error:
        works, cause = False, f": {str(error).partition(chr(10))[0]}"
    else:
        cause = ""
    return None if works else f"{device} has no fp64, in which weights and norms are counted{cause}"


# ---- Random generators


def random_state(device: torch.device) -> Tensor:
    """The state of a device's random generator."""
    get: Callable[..., Tensor] = module(device).get_rng_state
    return get() if _kind(device).seeds_all else get(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's random generator."""
    module(device).set_rng_state(*((state,) if _kind(device).seeds_all else (state, device)))


def with_random_state() -> list[torch.device]:
    """Every device beside the CPU whose random generator may have been used.

    CUDA has none before it is initialized, and to ask which devices there are would forbid the process to fork.
    """
    return [device for kind in _kinds() if _is_initialized(kind) and is_available(kind) for device in _all(kind)]


def _is_initialized(kind: torch.device) -> bool:
    return getattr(getattr(torch, kind.type, None), "is_initialized", lambda: True)()


# ---- Streams


def _stream_id(index: int) -> int:
    return torch._C._accelerator_getStream(index).stream_id


@functools.cache
def _stream_id_of(device: torch.device) -> Callable[[], int]:
    """The question for one device's current stream: to find it takes longer than its answer, per gradient."""
    return functools.partial(_kind(device).raw_stream or _stream_id, device.index)


def stream_id(device: torch.device) -> int:
    """Return a number of the current stream, different for each of a device, in a tenth of the stream's own time."""
    return _stream_id_of(device)()


def current_stream(device: torch.device) -> torch.Stream:
    """The current stream of a device that has streams."""
    if is_current(device.type):
        return torch.accelerator.current_stream(device)
    stream: torch.Stream = module(device).current_stream(device)  # of a GPU beside an accelerator of another kind
    return stream


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured in a graph."""
    return is_accelerator(device) and captures(current_stream(device), device)


def captures(stream: torch.Stream, device: torch.device) -> bool:
    """Whether a stream of a device is being captured in a graph."""
    ask: Callable[[], bool] | None = getattr(stream, "is_capturing", None)
    if ask is not None:
        return ask()
    current = _kind(device).is_capturing
    if current is None:
        return False
    with stream:
        return current()


class Streams:
    """The streams that computed some tensors; a reader on another stream waits for all of them.

    Attributes:
        seen: By index of the device and number of the stream; empty on CPUs.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], torch.Stream] = {}

    def record(self, device: torch.device) -> None:
        """Note the current stream of a device that has streams, before the tensor that it computes is passed on."""
        key = (device.index, stream_id(device))
        if key not in self.seen:
            self.seen[key] = current_stream(device)

    def join(self, device: torch.device | None = None) -> None:
        """Make the current stream of a device wait for those noted, and note it too; None for all devices."""
        for (index, number), stream in list(self.seen.items()):
            if (device is None or index == device.index) and number != stream_id(stream.device):
                current_stream(stream.device).wait_stream(stream)
                self.record(stream.device)


class StreamOrder:
    """Orders the streams that write something on accelerators, each after the one that wrote last."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[int, torch.Stream]] = {}

    def take(self, device: torch.device) -> None:
        """Make the current stream of a device that has streams write next."""
        number = stream_id(device)
        last = self._last.get(device)
        if last is None or last[0] != number:
            stream = current_stream(device)
            # What ran before a capture began is done by then, and a graph must not wait for it.
            if last is not None and captures(stream, device) == captures(last[1], device):
                stream.wait_stream(last[1])
            self._last[device] = (number, stream)

    def take_all(self, devices: Iterable[torch.device]) -> None:
        """Do so for several devices."""
        for device in devices:
            self.take(device)


# ---- Keeps tensors alive for work that runs on another stream than the one they were allocated on

_FEW = 64  # tensors; this many calls of `record_stream` take as long as the event below
_MOST = 16 * 2**20  # bytes held at any moment for each stream


class _Held(NamedTuple):
    tensors: list[Tensor]
    done: torch.Event  # the kernels that read them have run


_held: dict[tuple[torch.device, int], _Held] = {}  # by device and number of the stream
# Threads that train on one stream share an entry: one must not drop what another has put there since it looked.
_lock = threading.RLock()


def keep_until_done(tensors: Sequence[Tensor]) -> None:
    """Let an accelerator's `tensors` be freed right after the kernels that read them were queued on the current stream.

    Their memory is not reused before all that is queued by now has run: call it after the kernels. On the stream of
    their allocation the caching allocator ensures this by itself, but a tensor does not say which stream that is. Other
    devices need nothing.

    `record_stream` takes half a microsecond, so many small tensors are held with one event instead, until the next call
    that holds some. If the kernels have run by then, nothing more is needed; if the device lags behind, the host has
    time for the calls.
    """
    if not tensors or not is_accelerator(tensors[0].device):
        return
    device = tensors[0].device
    stream = current_stream(device)
    many = len(tensors) > _FEW and sum(map(attrgetter("nbytes"), tensors)) <= _MOST
    if not many or captures(stream, device):  # a capture forbids event queries
        _record(tensors, stream)
        return
    key = (device, stream_id(device))
    with _lock:
        before = _held.get(key)  # alive until the lock is open again: what is freed may run anything
        again = before is not None and len(before.tensors) == len(tensors) and all(map(is_, before.tensors, tensors))
        if before is not None and not again and not before.done.query():
            _record(before.tensors, stream)
        done = torch.Event(device) if before is None else before.done
        done.record(stream)
        _held[key] = _Held(list(tensors), done)


def _record(tensors: Sequence[Tensor], stream: torch.Stream) -> None:
    try:
        deque(map(methodcaller("record_stream", stream), tensors), maxlen=0)  # avoids a Python loop
    except NotImplementedError:  # by a backend without it
        stream.synchronize()
