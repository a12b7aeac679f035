"""What optimizers get to see: `.grad` as views of the flat buffers, or as copies rounded to 16 bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.dtensors import shaped_like
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store


class Handout:
    """The gradients of one finished window.

    Gradients of 16-bit parameters without masters are rounded from the fp32 sums anew after each change, since torch
    wants `.grad` in the parameter's dtype, unless its `grad_dtype` says otherwise; all others are views.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounded: dict[int, Tensor] = {}

    def divide(self, divisor: Tensor) -> None:
        """Divide the sums by a 0-d tensor."""
        for buffer in self._store.buffers:
            buffer.divide(move(divisor, buffer.device, buffer.dtype))

    def multiply(self, coefficient: Tensor) -> None:
        """Multiply what was handed out."""
        for buffer in self._store.buffers:
            scale = move(coefficient, buffer.device, buffer.dtype)
            for piece in buffer.touched_ranges():
                piece.mul_(scale)
        self.round()

    def round(self) -> Tensor | None:
        """Round the gradients of 16-bit parameters.

        Returns:
            fp64 `[1]` on the first device, 1.0 where one is not finite; None where there are none to round.
        """
        if not self._store.rounds:
            return None
        overflows = [move(self._round(buffer), self._store.device) for buffer in self._store.buffers]
        return torch.cat(overflows).amax(0, keepdim=True)

    def _round(self, buffer: FlatBuffer) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.float64, device=buffer.device)
        segments = [
            s for s in buffer.touched_segments() if buffer.dtype not in (s.dtype, getattr(s.param, "grad_dtype", None))
        ]
        for s in segments:
            if id(s.param) not in self._rounded:
                self._rounded[id(s.param)] = torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device)
        if segments:
            outputs = [self._rounded[id(s.param)] for s in segments]
            buffer.ops.scaled_copy_(outputs, [buffer.views[s.index] for s in segments], found_inf=overflow)
        return overflow

    def give(self) -> None:
        """Set `.grad` of every parameter that got a gradient in the window."""
        for buffer, segment in self._store.touched():
            rounded = self._rounded.get(id(segment.param))
            grad = buffer.views[segment.index] if rounded is None else rounded
            target = self._store.target(segment.param)
            target.grad = shaped_like(grad, target) if buffer.sharded else grad
