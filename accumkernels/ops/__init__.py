"""The ops behind FusedAccumulator, in three backends with the same signatures.

`schema` declares `torch.ops.accumkernels.*`; `reference` (plain torch), `native` (C++ and CUDA C++) and `triton` each
have a function for every op in it. `select` chooses a backend, once
per device.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Literal, get_args

import torch

from ..errors import one_of
from . import native, reference, triton

Backend = Literal["auto", "native", "triton", "reference"]
BACKENDS: tuple[str, ...] = get_args(Backend)
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
    one_of(backend, "backend", BACKENDS)
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return native  # the dispatcher's ops, which do nothing to fake tensors, with a library or none
    if backend == "reference":
        return reference
    if backend != "auto":
        module: ModuleType = {"native": native, "triton": triton}[backend]
        cause = module.unavailable(device)
        if cause is not None:
            raise RuntimeError(f"backend={backend!r} is not available on {device}: {cause}")
        return module

    cause = native.unavailable(device)
    if cause is None:
        return native
    fallback = triton if device.type != "cpu" and triton.unavailable(device) is None else reference
    if (device.type, cause) not in _warned:
        _warned.add((device.type, cause))
        warnings.warn(
            f"accumkernels: the {name(fallback)} backend is used on {device} because native kernels are not available: "
            f"{cause} (AK04)",
            RuntimeWarning,
            stacklevel=4,
        )
    return fallback


def name(module: ModuleType) -> str:
    """What `select` takes for a module that it returned."""
    return module.__name__.rpartition(".")[2]
