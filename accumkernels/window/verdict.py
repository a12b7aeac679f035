"""What a window comes to: its verdict, and the gradients that optimizers see."""

from __future__ import annotations

from collections.abc import Set
from types import ModuleType

import torch
from torch import Tensor

from ..buffers.flat import FlatBuffer, Segment
from ..buffers.parameters import local_grad, move, shaped_like, worst
from ..buffers.store import Store
from ..ops.schema import VerdictField

# ---- A window's verdict: its divisor, and whether to step and to back off


class Verdict:
    """Device scalars of one window, computed by one op call; nothing is read back.

    Args:
        ops: The backend's module.
        state: fp64 `[4]`, see `ops.schema.State`.
        divisor: fp64 0-d that replaces the sum of weights, or None.
        norm: The sums' norm, fp64 0-d, or None.
        max_norm: The norm to clip their average to, fp64 0-d, or None.
        overflow: fp64 of one element; if not 0, a sum is not finite although the state does not show it.

    Attributes:
        exact: fp64, by `ops.schema.VerdictField`.
        single: The same in fp32, each 0-d.
        skip: fp32; 1.0 if the step must not happen.
        found_inf: fp32; 1.0 if the loss scale must back off.
    """

    def __init__(
        self,
        ops: ModuleType,
        state: Tensor,
        divisor: Tensor | None,
        norm: Tensor | None = None,
        max_norm: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> None:
        self._ops = ops
        self._given = (state, divisor, norm, max_norm)
        self._overflow = overflow
        self.exact = torch.empty(len(VerdictField), dtype=torch.float64, device=state.device)
        single = torch.empty(len(VerdictField), dtype=torch.float32, device=state.device)
        ops.decide_(self.exact, single, state, divisor=divisor, norm=norm, max_norm=max_norm, overflow=overflow)
        self.single = single.unbind()  # indexing one by one takes as long as the op
        self.skip = self.single[VerdictField.SKIP]
        self.found_inf = self.single[VerdictField.FOUND_INF]

    def with_overflow(self, overflow: Tensor) -> Verdict:
        """Judge again with an overflow (fp64 of one element, 0 or 1) that showed later."""
        if self._overflow is not None:
            overflow = torch.maximum(overflow.reshape(()), self._overflow.reshape(()))
        return Verdict(self._ops, *self._given, overflow)

    @property
    def empty(self) -> Tensor:
        """bool; whether nothing was accumulated and nothing overflowed, so that the scale stays."""
        return self.single[VerdictField.EMPTY] != 0

    @property
    def divisor(self) -> Tensor:
        """fp64; the divisor of the sums."""
        return self.exact[VerdictField.DIVISOR]

    @property
    def coefficient(self) -> Tensor:
        """fp64; the factor that clips the average."""
        return self.exact[VerdictField.COEFFICIENT]

    @property
    def divide_by(self) -> Tensor:
        """fp64; divisor and coefficient in one."""
        return self.exact[VerdictField.DIVIDE_BY]


def is_known_zero(scalar: Tensor) -> bool:
    """Whether the host can see, without waiting, that a 0-d tensor is zero."""
    return scalar.is_cpu and scalar.tolist() == 0  # not item(): tolist() is no op


# ---- The gradients that optimizers see: views of the flat buffers as `.grad`, or copies rounded to 16 bits


class WindowGrads:
    """The gradients of one finished window.

    Gradients of 16-bit parameters without masters are rounded from the fp32 sums after each change, since torch wants
    `.grad` in the parameter's dtype unless `grad_dtype` says otherwise. All other gradients are views.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rounded: dict[int, Tensor] = {}
        self._as_rounded: dict[int, tuple[int, int]] = {}  # their versions and storages when they were last written

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
        """Multiply the assigned gradients; `only` those of the tensors with these ids, None for all."""
        for buffer in self._store.buffers:
            segments = buffer.touched_segments()
            if only is not None:
                segments = [s for s in segments if id(s.param) in only]
            scale = move(coefficient, buffer.device, buffer.dtype)
            for piece in buffer.ranges(segments):
                piece.mul_(scale)
        if self._store.layout.rounds:
            self.round()

    def round(self) -> Tensor:
        """Round the gradients of 16-bit parameters.

        Returns:
            fp64 `[1]` on the first device, 1.0 where one is not finite.
        """
        self.allocate()
        return worst(map(self._round, self._store.buffers), self._store.layout.device)

    @torch.inference_mode(False)  # tensors made in it have no version
    def allocate(self) -> None:
        """Allocate what `round` writes to."""
        for buffer in self._store.buffers:
            for s in _to_round(buffer):
                if id(s.param) not in self._rounded:
                    new = torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device)
                    self._rounded[id(s.param)] = new

    def _round(self, buffer: FlatBuffer) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.float64, device=buffer.device)
        segments = _to_round(buffer)
        if segments:
            outputs = [self._rounded[id(s.param)] for s in segments]
            buffer.ops.scaled_copy_(outputs, [buffer.views[s.index] for s in segments], found_inf=overflow)
            for s, output in zip(segments, outputs, strict=True):
                self._as_rounded[id(s.param)] = output._version, output.untyped_storage()._cdata
        return overflow

    def assign_grads(self) -> None:
        """Set `.grad` of every parameter that got a gradient in the window."""
        for buffer in self._store.buffers:
            segments, views = buffer.touched_segments(), buffer.expose().views
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
            found = self._changed(buffer)
            if not found:
                continue
            changed, storage = True, buffer.tensor.untyped_storage()._cdata
            # Another view of the buffer (`a.grad, b.grad = b.grad, a.grad`) must be read before any is written.
            found = [(s, g.clone() if g.untyped_storage()._cdata == storage else g) for s, g in found]
            for segment, grad in found:
                buffer.views[segment.index].copy_(grad)
                buffer.touch(segment.index)
            buffer.expose().renew()
        if changed:
            if self._store.layout.rounds:
                self.round()
            self.assign_grads()

    def _changed(self, buffer: FlatBuffer) -> list[tuple[Segment, Tensor]]:
        """The `.grad`s that are to be taken over; a segment whose `.grad` is None leaves the window."""
        found, masters = [], self._store.masters
        for segment in buffer.segments:
            target = segment.param if masters is None else masters.target(segment.param)
            touched, grad = buffer.touched[segment.index], local_grad(target) if buffer.sharded else target.grad
            if grad is None:
                buffer.touch(segment.index, False)
                continue
            if grad.layout is not torch.strided:
                grad = segment.in_memory_order(grad)  # which refuses it by its parameter's name
            rounded = self._rounded.get(id(segment.param)) if touched else None
            if rounded is None:
                same = grad.data_ptr() == buffer.views[segment.index].data_ptr() and grad.stride() == segment.stride
            else:
                now = rounded._version, grad.untyped_storage()._cdata
                same = now == self._as_rounded[id(segment.param)] and grad.stride() == rounded.stride()
            if not (touched and same):
                found.append((segment, grad))
        return found


def _to_round(buffer: FlatBuffer) -> list[Segment]:
    return [s for s in buffer.touched_segments() if buffer.dtype not in (s.dtype, getattr(s.param, "grad_dtype", None))]


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Compute the factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients of norm `norm` by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
