"""Where gradients are taken: the one place that reads and clears `.grad`.

A capture hands over, for one flat buffer, the gradients that are ready and the segments they belong to. It knows
nothing of windows, weights or ops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import FlatBuffer


class Captured(NamedTuple):
    """Gradients of one flat buffer, in memory order, and the indices of their segments."""

    segments: list[int]
    grads: list[Tensor]


class AfterBackward:
    """Takes every `.grad` once backward has finished (`release="microbatch"`)."""

    def take(self, buffer: FlatBuffer) -> Captured:
        """Collect the gradients of a buffer; they stay in `.grad` until `release`, so that a failed op loses nothing.

        Raises:
            RuntimeError: a gradient is sparse or has another number of elements than its segment.
        """
        indices: list[int] = []
        grads: list[Tensor] = []
        segments = buffer.segments
        for index, param in enumerate(buffer.params):
            grad = param.grad
            if grad is None:
                continue
            segment = segments[index]
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {segment.name!r} is sparse; only dense gradients can be accumulated"
                )
            if grad.numel() != segment.numel:
                raise RuntimeError(
                    f"the gradient of {segment.name!r} has {grad.numel()} elements, its parameter had {segment.numel} "
                    "at construction"
                )
            indices.append(index)
            grads.append(segment.in_memory_order(grad))
        return Captured(indices, grads)

    def release(self, buffer: FlatBuffer, captured: Captured) -> None:
        """Drop the `.grad`s that `take` collected."""
        params = buffer.params
        for index in captured.segments:
            params[index].grad = None

    def discard(self, buffer: FlatBuffer) -> None:
        """Drop every `.grad` of the buffer's parameters."""
        for param in buffer.params:
            param.grad = None
