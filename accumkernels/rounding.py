"""Gradients of 16-bit parameters: rounded from the fp32 sums, since torch wants `.grad` in the parameter's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import FlatBuffer, Segment


class RoundedGradients:
    """The `.grad`s of one window that are copies; those of other parameters are views of the buffer."""

    def __init__(self) -> None:
        self._grads: dict[int, Tensor] = {}

    def get(self, segment: Segment) -> Tensor | None:
        """The rounded gradient of a segment; None where its view serves as it is."""
        return self._grads.get(id(segment.param))

    def update(self, buffer: FlatBuffer) -> Tensor:
        """Round what `buffer` holds now.

        Returns:
            fp64 `[1]`, 1.0 where a value became infinite (or was not finite before).
        """
        overflow = torch.zeros(1, dtype=torch.float64, device=buffer.device)
        segments = [s for s in buffer.touched_segments() if s.dtype != buffer.dtype]
        for s in segments:
            if id(s.param) not in self._grads:
                self._grads[id(s.param)] = torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device)
        if segments:
            outputs = [self._grads[id(s.param)] for s in segments]
            buffer.ops.scaled_copy_(outputs, [buffer.views[s.index] for s in segments], found_inf=overflow)
        return overflow
