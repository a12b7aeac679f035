"""Moving device scalars between devices."""

from __future__ import annotations

import torch
from torch import Tensor


def move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to another device without waiting, except to the CPU: there the host would read what has not arrived."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")
