"""Device scalars on several devices: moving them, and the worst of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to another device without waiting, except to the CPU, where the host would read the copy too early."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


def worst(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """The elementwise maximum of tensors of one shape on any devices, as a copy on `device`."""
    return torch.stack([move(tensor, device) for tensor in tensors]).amax(0)
