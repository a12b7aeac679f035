"""A simulated accelerator with two devices, for tests of what a CPU cannot show: waits, races and early reads.

    from tests import simulated_device as sim

    sim.load()                       # once, before the first backward of the process
    model = Model().to("sim:0")
    with sim.watch() as seen:
        loss = model(x).sum()
        loss.backward()              # in a thread of the device's, as on a GPU
    seen.check()                     # AssertionError: races, memory freed too soon, pinned memory changed too soon
    assert seen.waits == []          # (what, "file.py:12 function") for each time that the host waited

`sim` is PyTorch's PrivateUse1 backend under another name, so `torch.accelerator`, `torch.Stream`, `torch.Event`,
`torch.autocast("sim")`, `torch.Generator("sim")`, `torch.get_device_module("sim")` and, for ranks, the process group
"cpu:gloo,sim:gloo" work as they do for a GPU.

Kernels are the CPU's, run at once in the order of their launches, so runs repeat bit for bit. What a device would be
free to reorder is kept in vector clocks, one counter per stream: a launch that touches bytes which another stream
wrote, or writes bytes which another stream reads, is a race unless an event, a wait or the host orders the two,
whatever the numbers are. Collectives run on a stream of their group. Memory:

* The host cannot touch it: a read or write by an address ends the process, and says why.
* New and freed memory is NaN (and -1 as integers). A block freed while other streams than the one it was allocated on
  may still use it is reported when that stream allocates next, unless `record_stream` or a wait made it safe.
* `copy_(..., non_blocking=True)` to the host delivers NaN until the host waits for the copy. Pinned memory that the
  host changes before it waited for a copy from it is reported.
* `limit()` and `fail_after()` raise `torch.OutOfMemoryError`.

Waits are `synchronize`, `item`, copies without `non_blocking`, and ops whose result has a size that depends on values
(`nonzero`, indexing with masks). A query (`Event.query`) counts as none, and answers True when it is asked the third
time. A capture (`torch.accelerator.Graph`) refuses waits and what is not of it; its memory is NaN until a replay.

csrc/ is for reading, from the bottom up: clock, races, memory, guard, tensors, ops, copies, capture, collectives.

A process that loads the device has an accelerator for good, so tests run in a process of their own: `conftest.py` does
that for all tests of this folder; to debug one, run pytest with SIMULATED_DEVICE=1 in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tests.simulated_device import build

DEVICES = (torch.device("cpu"),) * 2  # sim:0 and sim:1, once loaded
_TORCH = os.path.dirname(torch.__file__)
_OWN = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("__init__.py", "module.py", "recurrent.py", "group.py")
)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_library: ctypes.CDLL | None = None
_watching: list[Seen] = []


def load() -> None:
    """Build the device if need be, and make it this process's accelerator; at once if it is there already.

    Raises:
        RuntimeError: No compiler, or it failed.
    """
    global _library, DEVICES
    if _library is not None:
        return
    if build.compiler() is None:
        raise RuntimeError("the simulated device needs a C++ compiler: install g++, or name one in CXX")
    path = build.library()
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(path)
    _library = ctypes.CDLL(str(path))
    _library.sim_take_reports.restype = ctypes.c_char_p
    _library.sim_launches.restype = ctypes.c_uint64
    from tests.simulated_device import module, recurrent

    recurrent.register()

    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    DEVICES = (torch.device("sim", 0), torch.device("sim", 1))
    _library.sim_on_wait(_waited)
    atexit.register(_library.sim_on_wait, None)  # threads of autograd may outlive the interpreter


@dataclass
class Seen:
    """What happened on the devices inside `watch`.

    Attributes:
        waits: (what, caller) of each wait of the host: "item", "a copy to the host", "Event.synchronize", ...; the
            caller is the innermost line of Python outside torch, as "file.py:12 function".
        reports: (kind, text): "race", "free" (memory freed too soon), "host" (pinned memory changed too soon),
            "capture" (a graph replayed on memory that is gone).
        launches: How many kernels, copies and allocations.
    """

    waits: list[tuple[str, str]] = field(default_factory=list)
    reports: list[tuple[str, str]] = field(default_factory=list)
    launches: int = 0

    def check(self, kind: str | None = None) -> None:
        """Fail with all reports, or those of one kind."""
        texts = [f"{k}: {text}" for k, text in self.reports if kind in (None, k)]
        assert not texts, f"{len(texts)} reports:\n" + "\n".join(texts[:20])


@contextlib.contextmanager
def watch(lines: bool = False) -> Iterator[Seen]:
    """Record what happens on the devices; work launched before is waited for first, and not judged.

    Args:
        lines: Also record the line of Python behind each launch, for the text of reports; several times slower.
    """
    library = _loaded()
    library.sim_restart()
    library.sim_take_reports()
    seen = Seen(launches=-library.sim_launches())
    _watching.append(seen)
    library.sim_on_launch(_launched if lines else None)
    try:
        yield seen
    finally:
        library.sim_on_launch(None)
        _watching.remove(seen)
        settle()
        seen.launches += library.sim_launches()
        texts = library.sim_take_reports().decode().splitlines()
        seen.reports += [tuple(text.split("\t", 1)) for text in texts]  # type: ignore[misc]


def settle() -> None:
    """Wait for all devices, without counting it: every copy to the host is delivered."""
    _loaded().sim_restart()


def limit(device: int, bytes: int) -> None:
    """From now on, allocations raise `torch.OutOfMemoryError` where a device would have more bytes in use."""
    _loaded().sim_set_limit(device, ctypes.c_size_t(bytes))


def fail_after(device: int, allocations: int) -> None:
    """The allocation after so many more runs out of memory, once; -1: none does."""
    _loaded().sim_fail_after(device, ctypes.c_int64(allocations))


def allocations(device: int) -> int:
    """How many allocations a device has made so far."""
    return torch.accelerator.memory_stats(device)["allocation.all.allocated"]


def touch(tensor: torch.Tensor, write: bool, name: str = "a kernel") -> torch.Tensor:
    """Count as a launch on the current stream that reads or writes a tensor; its bytes, for the host to work on.

    For what stands in for kernels that torch does not know.
    """
    torch.ops.sim.touch(tensor, write, name)
    return torch.ops.sim.host_bytes(tensor)


def _loaded() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("call simulated_device.load() first")
    return _library


def _caller() -> str:
    """The innermost line outside torch and this package's own files."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<", *_OWN)):
            return f"{os.path.relpath(name) if os.path.isabs(name) else name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a thread without Python"


@_CALLBACK
def _waited(what: bytes) -> None:
    for seen in _watching:
        seen.waits.append((what.decode(), _caller()))


@_CALLBACK
def _launched(what: bytes) -> None:
    _loaded().sim_where(_caller().encode())
