"""Norms of the window's gradient, from the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from .devices import move
from .flat import FlatBuffer


def total_norm(
    buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
) -> Tensor:
    """The norm over all touched segments, or `only` those of parameters with these `id`s; 0-d fp64 on `device`.

    Nothing is read back.

    Orders 2 and inf take one deterministic pass of the `norm_` op; for other orders torch's own
    `torch.nn.utils.get_total_norm` is asked.
    """
    if norm_type in (2.0, float("inf")):
        parts = []
        for buffer in buffers:
            part = torch.zeros((), dtype=torch.float64, device=buffer.device)
            buffer.ops.norm_(part, _views(buffer, only), ord=norm_type)
            parts.append(part if part.device == device else move(part, device))
        if len(parts) == 1:
            return parts[0].sqrt_() if norm_type == 2.0 else parts[0]
        joined = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
        return joined.sum().sqrt_() if norm_type == 2.0 else joined.amax()
    views = [view for buffer in buffers for view in _views(buffer, only)]
    return move(torch.nn.utils.get_total_norm(views, norm_type), device, torch.float64)


def _views(buffer: FlatBuffer, only: Set[int] | None) -> list[Tensor]:
    if only is None:
        return buffer.touched_views()
    return [buffer.views[s.index] for s in buffer.touched_segments() if id(s.param) in only]


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """What gradients of norm `norm` are multiplied by: `torch.nn.utils.clip_grad_norm_`'s formula."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
