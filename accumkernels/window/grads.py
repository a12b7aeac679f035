"""The gradients that optimizers see: views of the flat buffers as `.grad`, or copies rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..buffers.devices import move, worst
from ..buffers.dtensors import shaped_like
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store


class WindowGrads:
    """The gradients of one finished window.

    Gradients of 16-bit parameters without masters are rounded from the fp32 sums after each change, since torch wants
    `.grad` in the parameter's dtype unless `grad_dtype` says otherwise. All other gradients are views.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounded: dict[int, Tensor] = {}

    def divide(self, divisor: Tensor, *, only: Set[int] | None = None, but: Set[int] = frozenset()) -> None:
        """Divide sums by a 0-d tensor; a true division, like `grad / K`.

        Args:
            divisor: On any device.
            only: ids of the tensors (parameters or masters) whose sums to divide; None for all.
            but: ids of the tensors whose sums to leave alone.
        """
        for buffer in self._store.buffers:
            segments = buffer.touched_segments()
            if only is not None or but:
                targets = [(s, id(self._store.target(s.param))) for s in segments]
                segments = [s for s, t in targets if t not in but and (only is None or t in only)]
            by = move(divisor, buffer.device, buffer.dtype)
            for piece in buffer.ranges(segments):
                piece.div_(by)

    def multiply(self, coefficient: Tensor, only: Set[int] | None = None) -> None:
        """Multiply the gradients handed out; `only` those of the tensors with these ids, None for all."""
        for buffer in self._store.buffers:
            segments = buffer.touched_segments()
            if only is not None:
                segments = [s for s in segments if id(s.param) in only]
            scale = move(coefficient, buffer.device, buffer.dtype)
            for piece in buffer.ranges(segments):
                piece.mul_(scale)
        if self._store.rounds:
            self.round()

    def round(self) -> Tensor:
        """Round the gradients of 16-bit parameters.

        Returns:
            fp64 `[1]` on the first device, 1.0 where one is not finite.
        """
        return worst(map(self._round, self._store.buffers), self._store.device)

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

    def assign_grads(self) -> None:
        """Set `.grad` of every parameter that got a gradient in the window."""
        for buffer in self._store.buffers:
            segments, views = buffer.touched_segments(), buffer.hand_out()
            if segments is not buffer.segments:
                views = [views[s.index] for s in segments]
            if self._store.masters is None and not self._rounded and not buffer.sharded:
                for segment, view in zip(segments, views, strict=True):
                    segment.param.grad = view
                continue
            for segment, view in zip(segments, views, strict=True):
                rounded = self._rounded.get(id(segment.param))
                grad = view if rounded is None else rounded
                target = self._store.target(segment.param)
                target.grad = shaped_like(grad, target) if buffer.sharded else grad


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Compute the factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients of norm `norm` by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
