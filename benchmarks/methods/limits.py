"""What no accumulation can beat on this machine, measured beside it: three loops that do nothing but move memory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..harness.case import Case
from ..harness.measure import Call

MULTIPLY, COPY, STREAM = "limit: flat.mul_(1.0)", "limit: device copy", "limit: streaming loop"
NAMES = (MULTIPLY, COPY, STREAM)


@functools.cache
def _library() -> ctypes.CDLL:
    """stream.cpp, as the system's compiler builds it."""
    source = Path(__file__).with_name("stream.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def _stream_on_cpu(accumulator: Tensor, gradient: Tensor) -> None:
    """Read both and write `accumulator`, both contiguous."""
    function = getattr(_library(), f"stream_{gradient.element_size()}")
    n = ctypes.c_int64(accumulator.numel())
    addresses = (ctypes.c_void_p(accumulator.data_ptr()), ctypes.c_void_p(gradient.data_ptr()))
    function(*addresses, n, ctypes.c_int(torch.get_num_threads()))


def _streaming() -> dict[str, Callable[[Tensor, Tensor], None]]:
    """The streaming loop per device type; without Triton there is none for GPUs."""
    loops: dict[str, Callable[[Tensor, Tensor], None]] = {"cpu": _stream_on_cpu}
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        from .stream_triton import stream

        loops["cuda"] = stream
    return loops


@dataclasses.dataclass(frozen=True)
class Limit:
    """A loop.

    Attributes:
        call: Runs it.
        write: Writes what it reads in place of gradients, as backward would have.
    """

    call: Call
    write: Call


def limits(case: Case) -> dict[str, Limit]:
    """The loops over `case`'s flat buffer."""
    flat_grad = torch.ones_like(case.flat, dtype=case.dtype)  # not zeros: untouched pages would be no memory at all
    source = torch.ones_like(case.flat)
    found = {
        MULTIPLY: Limit(lambda: case.flat.mul_(1.0), case.write),
        COPY: Limit(lambda: case.flat.copy_(source), case.write),
    }
    streaming = _streaming().get(case.device.type)
    if streaming is not None:
        found[STREAM] = Limit(lambda: streaming(case.flat, flat_grad), lambda: flat_grad.fill_(1.0))
    return found


def bytes_per_element(name: str, dtype: torch.dtype) -> int:
    """What the loop of that name moves."""
    return 8 + (dtype.itemsize if name == STREAM else 0)
