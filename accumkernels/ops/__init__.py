"""The ops behind FusedAccumulator, in three backends with the same signatures.

`schema` declares `torch.ops.accumkernels.*`; `reference` (plain torch), `native` (C++ and CUDA C++) and `triton` each
have functions `accumulate_`, `check_finite_`, `norm_`, `scaled_copy_` and `judge_`. `select` chooses a backend, once
per device; for CUDA tensors native ops come from `native_cuda`.
"""

from __future__ import annotations

import warnings
from types import ModuleType

import torch

from ..ops import native, native_cuda, reference, triton

BACKENDS = ("auto", "native", "triton", "reference")
_warned: set[tuple[str, str]] = set()


def select(backend: str, device: torch.device) -> ModuleType:
    """Choose the module whose functions work on tensors of `device`.

    Args:
        backend: One of `BACKENDS`. "auto" takes native kernels, otherwise Triton's on a GPU, otherwise plain torch, and
            warns once with the cause if it is not native.
        device: Where the tensors are.

    Raises:
        ValueError: `backend` is not one of `BACKENDS`.
        RuntimeError: A backend named explicitly does not work on `device`; the message has the cause.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "reference":
        return reference
    if backend != "auto":
        module: ModuleType = {"native": native, "triton": triton}[backend]
        cause = module.unavailable(device)
        if cause is not None:
            raise RuntimeError(f"backend={backend!r} is not available on {device}: {cause}")
        return _native(device) if module is native else module

    cause = native.unavailable(device)
    if cause is None:
        return _native(device)
    fallback = triton if device.type == "cuda" and triton.unavailable(device) is None else reference
    if (device.type, cause) not in _warned:
        _warned.add((device.type, cause))
        warnings.warn(
            f"accumkernels uses its {name(fallback)} backend on {device} because native kernels are not available: "
            f"{cause}",
            RuntimeWarning,
            stacklevel=4,
        )
    return fallback


def _native(device: torch.device) -> ModuleType:
    return native if device.type == "cpu" else native_cuda


def name(module: ModuleType) -> str:
    """What `select` takes for a module that it returned."""
    return module.__name__.rpartition(".")[2].removesuffix("_cuda")
