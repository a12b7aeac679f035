"""The ops in C++ (CPU) and CUDA C++, from the library `accumkernels/_native.so`.

Importing this module never fails. `load_error` says why the library did not load, and `unavailable` why it does not
work on a device.
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops import reference  # noqa: F401  declares the ops before the library registers its kernels for them
from .loading import load

LIBRARY_PATH = Path(__file__).resolve().parent.parent / "_native.so"

_library, load_error = load(LIBRARY_PATH)

_OPERANDS = {torch.bfloat16: 1, torch.float32: 2}  # of products, DType in csrc/core/args.h

# The ops themselves, to which CUDA tensors alone need an addition: see native_cuda.py. Whoever is in a hurry gives
# arguments in the order of the schema: for each that is looked up by its name the dispatcher takes its time.
accumulate_ = torch.ops.accumkernels.accumulate_.default
check_finite_ = torch.ops.accumkernels.check_finite_.default
norm_ = torch.ops.accumkernels.norm_.default
scaled_copy_ = torch.ops.accumkernels.scaled_copy_.default
judge_ = torch.ops.accumkernels.judge_.default


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
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return _probe(torch.cuda.current_device() if device.index is None else device.index)


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
