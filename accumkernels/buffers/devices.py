"""Device scalars on several devices: making and moving them, and the worst of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to another device without waiting, except to the CPU: there the host would read what has not arrived."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, 1-d, of a tensor that may be changed outside inference mode too."""
    if not torch.is_inference_mode_enabled():  # the context takes four times as long as the tensor
        return torch.empty(numel, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)


def is_known_zero(scalar: Tensor) -> bool:
    """Whether the host can see, without waiting, that a 0-d tensor is zero."""
    return scalar.is_cpu and scalar.tolist() == 0  # not item(): tolist() is no op


def worst(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The elementwise maximum of tensors of one shape on any devices, on `device`; a copy."""
    return torch.stack([move(tensor, device) for tensor in tensors]).amax(0)
