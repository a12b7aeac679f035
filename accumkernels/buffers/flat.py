"""Flat buffers: the segments of one device and dtype, side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_
from sys import getrefcount
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops.schema import State
from .dtensors import is_dtensor, local
from .handed_out import HandedOut, use_count
from .layout import Segment, aligned
from .pages import zeros
from .parameters import NamedParameter


class FlatBuffer:
    """Segments of one device and buffer dtype, side by side in one tensor, and the tables that the ops need.

    Attributes:
        tensor: fp32 or fp64 `[elements]`. Padding between segments is never read.
        segments: in the order of their offsets.
        views: `tensor`'s segments, shaped and strided like the parameters.
        layout: int64 `[segments, 2]` (offset, numel) on the device; `layout_host` the same on the CPU.
        flags: int32 `[segments]`, the serial number of the last micro-batch whose gradient was not finite.
        all_indices: the indices of all segments.
        contiguous: whether all segments are in index order.
        touched: per segment, whether it holds a sum of this window.
        unchecked: segments with a sum that was not checked for overflow, each with the serial number of the last
            micro-batch that was added without a check.
        sharded: whether any parameter is a DTensor.
        ops: the backend's module.

    It has no memory before `allocate`, and none after `release`.
    """

    def __init__(
        self, named: Sequence[NamedParameter | Segment], dtype: torch.dtype, device: torch.device, ops: ModuleType
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self.segments: list[Segment] = []
        end = 0
        for index, entry in enumerate(named):
            p = local(entry.param)
            stride = torch.empty_like(p, device="meta").stride()  # dense, even if p itself is not
            contiguous = torch.empty(p.shape, device="meta").stride() == stride
            of_param = p.shape, stride, p.dtype, p.device
            self.segments.append(
                Segment(index, entry.name, entry.param, *of_param, end, p.numel(), contiguous, p.stride())
            )
            end += aligned(p.numel(), dtype)
        self.numel = end
        self.layout_host = torch.tensor([[s.offset, s.numel] for s in self.segments], dtype=torch.int64, device="cpu")
        self.layout = self.layout_host.to(device)
        self.flags = torch.zeros(len(self.segments), dtype=torch.int32, device=device)
        self.touched = bytearray(len(self.segments))
        self.unchecked: dict[int, int] = {}
        self.params = [s.param for s in self.segments]
        self.sharded = any(map(is_dtensor, self.params))
        self.all_indices = list(range(len(self.segments)))
        self.contiguous = all(s.contiguous for s in self.segments)
        self._alone: dict[int, tuple[Tensor, Tensor]] = {}
        self.release()

    def release(self) -> None:
        """Free the tensor and keep the rest of the buffer. Views that a user has kept keep their memory."""
        self.tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        self.views: list[Tensor] = []
        self._handed_out: HandedOut | None = None
        self._uses: int | None = None  # of the tensor's storage, before this window handed out anything

    def allocate(self) -> None:
        """Allocate the tensor and its views."""
        self.tensor = zeros(self.numel, self.dtype, self.device)
        self.views = [self.tensor.as_strided(s.shape, s.stride, s.offset) for s in self.segments]

    def without(self, gone: Sequence[int]) -> FlatBuffer:
        """Return a buffer of the other segments, which has no memory yet, with their flags.

        Args:
            gone: For each segment, not 0 if it is left out.
        """
        kept = [segment for segment, is_gone in zip(self.segments, gone, strict=True) if not is_gone]
        rest = FlatBuffer(kept, self.dtype, self.device, self.ops)
        rest.flags.copy_(self.flags[[segment.index for segment in kept]])
        return rest

    @property
    def released(self) -> bool:
        """Whether the tensor has to be allocated before it is used."""
        return not self.views

    def __str__(self) -> str:
        elements = sum(s.numel for s in self.segments)
        return f"flat buffer of {len(self.segments)} segments, {elements:,} elements, {self.dtype} on {self.device}"

    def accumulate(self, state: Tensor, segments: list[int], grads: list[Tensor], *options: Any) -> None:
        """Add gradients to their segments, by the op `accumulate_`, and note that they hold a sum.

        Args:
            state: The device's, fp64 `[4]`.
            segments: Of the gradients.
            grads: As backward left them.
            *options: Those of the op from `flags` to `count`, in order: names take their time, in each bucket.

        Raises:
            RuntimeError: the op refused its arguments, or names the parameter whose gradient is sparse or has the wrong
                size; nothing has changed.
        """
        touched = self.touched
        if 1 not in touched:  # a search of memory, where any() and all() look at each
            overwrite = [True]  # one answer for all: the ops read long lists slowly
        elif 0 not in touched:
            overwrite = [False]
        else:
            overwrite = [not touched[index] for index in segments]
        rows = [] if segments is self.all_indices else segments
        given = grads if self.contiguous else self.in_memory_order(segments, grads)
        rest = rows, overwrite, self.layout, self.layout_host, *options, self.contiguous
        try:
            self.ops.accumulate_(self.tensor, state, given, *rest)
        except RuntimeError as error:
            self.ops.accumulate_(self.tensor, state, self.reordered(segments, grads, error), *rest)
        if segments is self.all_indices:
            self.touched = bytearray(b"\1") * len(segments)
        else:
            for index in segments:
                touched[index] = True

    def check_finite(self, segments: list[int], grads: list[Tensor], found_inf: Tensor, **options: Any) -> None:
        """Look for values that are not finite, by the op `check_finite_`; raises as `accumulate`."""
        rows = [] if segments is self.all_indices else segments
        given = grads if self.contiguous else self.in_memory_order(segments, grads)
        try:
            self.ops.check_finite_(given, rows, found_inf, self.flags, **options)
        except RuntimeError as error:
            self.ops.check_finite_(self.reordered(segments, grads, error), rows, found_inf, self.flags, **options)

    def reordered(self, segments: list[int], grads: list[Tensor], error: RuntimeError) -> list[Tensor]:
        """Gradients in memory order, after an op has refused them as they were.

        Nearly always they are in memory order as backward made them. The op sees that, and refuses others before it has
        done anything: a look at each of them before would take a third of its time.

        Raises:
            RuntimeError: the error itself, where the order was not its cause; see `in_memory_order`.
        """
        ordered = self.in_memory_order(segments, grads)
        if not self.contiguous or all(map(is_, ordered, grads)):
            raise error
        return ordered

    def in_memory_order(self, segments: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Gradients, each in its segment's memory order; raises as `Segment.in_memory_order`."""
        return [self.segments[index].in_memory_order(grad) for index, grad in zip(segments, grads, strict=True)]

    def open_window(self) -> None:
        """Mark all segments as holding no sum."""
        self.touched = bytearray(len(self.segments))
        self.unchecked.clear()

    def set_touched(self, touched: Sequence[int]) -> None:
        """Set, for every segment, whether it holds a sum."""
        self.touched = bytearray(touched)

    def touch(self, index: int, holds: bool = True) -> None:
        """Note that a segment holds a sum, or that its sum was dropped."""
        self.touched[index] = holds

    def touch_unchecked(self, index: int, tag: int) -> None:
        """Mark that micro-batch `tag` was added to a segment, without a check whether the sum is finite."""
        self.touched[index] = True
        self.unchecked[index] = tag

    def check_sums(self, state: Tensor, tag: int, opened: int) -> None:
        """Look for an overflow in sums that were added to without a look.

        Args:
            state: Of the device.
            tag: Of the last micro-batch; what was found in this window is noted to be in it.
            opened: The last micro-batch before the window.
        """
        found = torch.zeros(1, dtype=torch.float64, device=self.device)
        segments = list(self.unchecked)
        self.ops.check_finite_([self.views[index] for index in segments], segments, found, self.flags, tag=tag)
        earlier = (found > 0) & (self.flags > opened)
        self.flags.masked_fill_(earlier, tag)
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag].clamp_(min=found[0])

    def touched_segments(self) -> list[Segment]:
        """Segments that hold a sum of this window."""
        if 0 not in self.touched:
            return self.segments
        return [s for s, touched in zip(self.segments, self.touched, strict=True) if touched]

    def touched_views(self, only: Set[int] | None = None) -> list[Tensor]:
        """Their views; `only` those of parameters with these `id`s."""
        if 0 not in self.touched and only is None:
            return self.views
        return [self.views[s.index] for s in self.touched_segments() if only is None or id(s.param) in only]

    def hand_out(self) -> list[Tensor]:
        """The views of all segments that may become `.grad`; not `views`, which users may keep (`main_grad`)."""
        if self._handed_out is None:
            with torch.inference_mode(False), torch.no_grad():
                self._handed_out = HandedOut(self.tensor, self.segments)
        if self._uses is None:
            self._uses = use_count(self._handed_out.storage._cdata)
        return self._handed_out.views

    def renew_handed_out(self) -> None:
        """Make anew what was handed out and given other memory (`p.grad.data = ...`)."""
        if self._handed_out is not None:
            self._handed_out.renew()

    def take_back(self) -> None:
        """End the window, after every `.grad` was set to None: leave to others what they keep of it."""
        handed, uses, self._uses = self._handed_out, self._uses, None
        if handed is None or uses is None:
            return
        kept = list(map(getrefcount, handed.views)) != handed.unkept
        if kept or use_count(handed.storage._cdata) != uses:
            handed.move_kept(uses)

    def ranges(self, segments: Sequence[Segment]) -> list[Tensor]:
        """The fewest 1-d slices of `tensor` that cover these segments, given in order, and no other segment."""
        if segments is self.segments:
            return [self.tensor[: segments[-1].offset + segments[-1].numel]]
        ranges: list[tuple[int, int]] = []
        previous = -2
        for s in segments:
            start = s.offset
            if previous == s.index - 1:
                start = ranges.pop()[0]
            ranges.append((start, s.offset + s.numel))
            previous = s.index
        return [self.tensor[start:end] for start, end in ranges]

    def layout_alone(self, index: int) -> tuple[Tensor, Tensor]:
        """`layout` and `layout_host` for a tensor that holds only this segment."""
        if index not in self._alone:
            device, host = self.layout[index : index + 1].clone(), self.layout_host[index : index + 1].clone()
            device[:, 0] = host[:, 0] = 0
            self._alone[index] = (device, host)
        return self._alone[index]


def buffer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that gradients of `dtype` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flat_buffers(named: Sequence[NamedParameter], ops: dict[torch.device, ModuleType]) -> list[FlatBuffer]:
    """Lay out parameters in new flat buffers, one per (device, buffer dtype).

    Segments are in reverse order of registration, roughly the order in which backward produces gradients, so that the
    gradients of a bucket lie side by side.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[NamedParameter]] = {}
    for entry in named:
        groups.setdefault((entry.param.device, buffer_dtype(entry.param.dtype)), []).append(entry)
    buffers = [FlatBuffer(group[::-1], dtype, device, ops[device]) for (device, dtype), group in groups.items()]
    for buffer in buffers:
        buffer.allocate()
    return buffers
