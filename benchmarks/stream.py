"""The memory limit of an accumulation on this machine: a plain loop that the system's compiler builds (stream.cpp)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def build() -> Callable[[Tensor, Tensor], None]:
    """Compile the loop; returns `stream(accumulator, gradient)` for a contiguous fp32 and a 16-bit tensor."""
    source = Path(__file__).with_name("stream.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "stream.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).stream_6_to_4
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = None

    def stream(accumulator: Tensor, gradient: Tensor) -> None:
        assert accumulator.is_contiguous() and gradient.is_contiguous() and gradient.element_size() == 2
        n = min(accumulator.numel(), gradient.numel())
        function(accumulator.data_ptr(), gradient.data_ptr(), n, torch.get_num_threads())

    return stream
