"""The gradients that optimizers see: views of the flat buffers as `.grad`, or copies rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..buffers.devices import move, worst
from ..buffers.dtensors import local_grad, shaped_like
from ..buffers.flat import FlatBuffer
from ..buffers.layout import Segment
from ..buffers.store import Store


class WindowGrads:
    """The gradients of one finished window.

    Gradients of 16-bit parameters without masters are rounded from the fp32 sums after each change, since torch wants
    `.grad` in the parameter's dtype unless `grad_dtype` says otherwise. All other gradients are views.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounded: dict[int, Tensor] = {}
        self._as_rounded: dict[int, tuple[int, int]] = {}  # their versions and addresses when they were last written

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
                with torch.inference_mode(False):  # tensors made in it have no version
                    self._rounded[id(s.param)] = torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device)
        if segments:
            outputs = [self._rounded[id(s.param)] for s in segments]
            buffer.ops.scaled_copy_(outputs, [buffer.views[s.index] for s in segments], found_inf=overflow)
            for s, output in zip(segments, outputs, strict=True):
                self._as_rounded[id(s.param)] = output._version, output.data_ptr()
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

    @torch.no_grad()
    def take_over(self) -> None:
        """Take over what the loop has made of `.grad` since it was set: edited, replaced, None, or new.

        Edits of views are in the buffer already. A replaced `.grad` becomes ours again, with the values of the loop's.
        """
        changed = False
        for buffer in self._store.buffers:
            found = [(s, grad) for s in buffer.segments if (grad := self._changed(buffer, s)) is not None]
            if not found:
                continue
            changed, storage = True, buffer.tensor.untyped_storage()._cdata
            # Another view of the buffer (`a.grad, b.grad = b.grad, a.grad`) must be read before any is written.
            found = [(s, g.clone() if g.untyped_storage()._cdata == storage else g) for s, g in found]
            for segment, grad in found:
                buffer.views[segment.index].copy_(grad)
                buffer.touch(segment.index)
            buffer.renew_handed_out()
        if changed:
            if self._store.rounds:
                self.round()
            self.assign_grads()

    def _changed(self, buffer: FlatBuffer, segment: Segment) -> Tensor | None:
        """The `.grad` that is to be taken over; a segment whose `.grad` is None leaves the window."""
        target, touched = self._store.target(segment.param), buffer.touched[segment.index]
        grad = local_grad(target) if buffer.sharded else target.grad
        if grad is None:
            buffer.touch(segment.index, False)
            return None
        if grad.layout is not torch.strided:
            return segment.in_memory_order(grad)  # which refuses it by its parameter's name
        rounded = self._rounded.get(id(segment.param)) if touched else None
        if rounded is None:
            same = grad.data_ptr() == buffer.views[segment.index].data_ptr() and grad.stride() == segment.stride
        else:
            now = rounded._version, grad.data_ptr()
            same = now == self._as_rounded[id(segment.param)] and grad.stride() == rounded.stride()
        return None if touched and same else grad


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Compute the factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients of norm `norm` by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
