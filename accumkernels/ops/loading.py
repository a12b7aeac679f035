"""Loads the native library, and checks the file first, since the system loader's messages mislead.

The loader says "No such file or directory" of a library for another processor, and a truncated file kills the process.
"""

from __future__ import annotations

import ctypes
import platform
import re
import struct
from pathlib import Path

import torch

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
