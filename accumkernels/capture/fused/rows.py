"""Adds an embedding's gradient to its segment row by row, touching only rows of tokens that occur."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows(
    view: Tensor, grad: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool, multiplier: float | Tensor
) -> None:
    """Add `multiplier * grad[t]` to row `indices[t]` for every t.

    Deterministic on a CPU, where rows are added in the order of `indices`, and on a GPU if
    `torch.use_deterministic_algorithms` asks for it.

    Args:
        view: The weight's segment, `[rows, width]`.
        grad: `[..., width]`, of any floating dtype.
        indices: Integers of the same leading dimensions.
        padding_idx: The row that gets nothing; negative for none.
        by_frequency: Divide each row by how often its token occurs.
        multiplier: A number, or 0-d on the device.
    """
    indices = indices.reshape(-1)
    rows = grad.reshape(-1, view.shape[1]).to(view.dtype)
    if by_frequency:
        counts = torch.zeros(view.shape[0], dtype=view.dtype, device=view.device)
        counts.index_add_(0, indices, torch.ones_like(indices, dtype=view.dtype))
        rows = rows / counts[indices].unsqueeze(1)
    if isinstance(multiplier, Tensor):
        rows = rows * multiplier.to(view.dtype)
    elif multiplier != 1:  # not as index_add_'s alpha, which rounds only once: ordinary gradients are rounded here
        rows = rows * multiplier
    if padding_idx >= 0:
        rows = rows.masked_fill((indices == padding_idx).unsqueeze(1), 0)
    view.index_add_(0, indices, rows)
