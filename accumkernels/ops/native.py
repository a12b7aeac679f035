"""The ops in C++ (CPU) and CUDA C++, from the library `accumkernels/_native.so`.

Importing this module never fails. `load_error` says why the library did not load, and `unavailable` why it does not
work on a device.
"""

from __future__ import annotations

import ctypes
import functools
import json
import platform
import re
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..ops import reference  # noqa: F401  declares the ops before the library registers its kernels for them

# ---- Loads the native library, and checks the file first, since the system loader's messages mislead.
#
# The loader says "No such file or directory" of a library for another processor, and a truncated file kills the
# process.

OLDEST_TORCH = (2, 10)  # the library is built for its stable ABI
_HEADER = struct.Struct("<16s2HI3QI6H")  # of 64-bit little-endian ELF
_MACHINES = {21: "ppc64le", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # its e_machine, as platform.machine() says


def load(path: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """Load the library, which registers its kernels; returns (library, None) or (None, the cause in one sentence)."""
    cause = _torch_too_old() or _not_for_this_machine(path)
    if cause is not None:
        return None, cause
    try:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        library.accumkernels_build_info.restype = ctypes.c_char_p
        library.accumkernels_cpu_instruction_set.restype = ctypes.c_char_p
        library.accumkernels_probe.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        pointers, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 3
        library.accumkernels_multiplies.argtypes = [ctypes.c_int]
        library.accumkernels_add_product.argtypes = [*pointers, ctypes.c_int, *sizes, ctypes.c_float, ctypes.c_int]
        library.accumkernels_add_product.restype = None
    except (OSError, RuntimeError, AttributeError) as error:
        said = str(error.__cause__ or error).partition("\n")[0]  # torch wraps what the loader says
        return None, f"{path.name} does not load with torch {torch.__version__}: {said}"
    return library, None


def _torch_too_old() -> str | None:
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"the native library needs torch {oldest} or newer, and this is torch {torch.__version__}"


def _not_for_this_machine(path: Path) -> str | None:
    """Check in the file's header that it is complete and built for this processor; returns what is wrong."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except FileNotFoundError:
        if sys.platform != "linux":
            return f"{path.name} is missing: compiled kernels are for Linux, and this is {platform.system()}"
        if (path.parent.parent / "setup.py").exists():
            return f"{path.name} is missing: {path.parent.parent} has sources, which hide what is installed"
        return f"{path.name} is missing: accumkernels was installed without its compiled library"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if not header.startswith(b"\x7fELF"):
        return f"{path.name} is not a shared library ({size} bytes that do not begin as one)"
    if len(header) < _HEADER.size:
        return f"{path.name} is cut short: {size} bytes"
    _, _, machine, _, _, _, section_table, _, _, _, _, section_size, sections, _ = _HEADER.unpack(header)
    made_for, here = _MACHINES.get(machine), platform.machine()
    if made_for is not None and here in _MACHINES.values() and made_for != here:
        return f"{path.name} is built for {made_for}, and this is {here}"
    end = section_table + section_size * sections  # the last thing in the file
    return f"{path.name} is cut short: {size} of {end} bytes" if size < end else None


LIBRARY_PATH = Path(__file__).resolve().parent.parent / "_native.so"

_library, load_error = load(LIBRARY_PATH)

_OPERANDS = {torch.bfloat16: 1, torch.float32: 2}  # of products, DType in csrc/core/args.h

# The ops themselves. Whoever is in a hurry gives arguments in the order of the schema: for each that is looked up by
# its name the dispatcher takes its time.
accumulate_ = torch.ops.accumkernels.accumulate_.default
check_finite_ = torch.ops.accumkernels.check_finite_.default
norm_ = torch.ops.accumkernels.norm_.default
scaled_copy_ = torch.ops.accumkernels.scaled_copy_.default
decide_ = torch.ops.accumkernels.decide_.default


def build_info() -> dict[str, Any] | None:
    """What the library was built from and for ("version", "cuda", "archs", ...); None if it is not loaded."""
    if _library is None:
        return None
    info: dict[str, Any] = json.loads(_library.accumkernels_build_info())
    return info


def cpu_instruction_set() -> str | None:
    """The CPU kernels' instruction set on this machine: "avx512", "avx2" or "portable"; None without the library."""
    return None if _library is None else str(_library.accumkernels_cpu_instruction_set().decode())


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether `add_product_` works here: fp32 on x86 processors with AVX2, bf16 with AVX512_BF16."""
    operands = _OPERANDS.get(dtype)
    return _library is not None and operands is not None and bool(_library.accumkernels_multiplies(operands))


def unavailable(device: torch.device) -> str | None:
    """Why native kernels do not work on `device`, in one sentence; None if they do."""
    if load_error is not None:
        return load_error
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"there are no native kernels for device type {device.type!r}"
    if torch.version.hip is not None:  # AMD GPUs are "cuda" devices too, and the probe would ask for an NVIDIA GPU
        return f"there are no native kernels for AMD GPUs (this torch uses ROCm {torch.version.hip})"
    if not devices.is_available(device):
        return f"torch {torch.__version__} finds no CUDA device"
    return _probe(devices.with_index(device).index)


@functools.cache
def _probe(index: int) -> str | None:
    """Try the library on one GPU: the driver may be too old, or the architecture's image missing."""
    assert _library is not None
    message = ctypes.create_string_buffer(512)
    failed = _library.accumkernels_probe(index, message, len(message))
    return message.value.decode(errors="replace") if failed else None


def add_product_(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """`view = beta * view + alpha * grad.T @ input`; sums in fp32.

    Args:
        view: fp32 `[rows, columns]`, contiguous, on the CPU.
        grad: bf16 or fp32 `[tokens, rows]`.
        input: `[tokens, columns]`, of the same dtype.
        alpha: Of the product.
        beta: 0 or 1; with 0, what was there is overwritten, unread.
    """
    assert _library is not None
    grad, input = grad.contiguous(), input.contiguous()
    pointers = view.data_ptr(), grad.data_ptr(), input.data_ptr()
    operands = _OPERANDS[grad.dtype]
    _library.accumkernels_add_product(*pointers, operands, *view.shape, grad.shape[0], alpha, beta != 0)
