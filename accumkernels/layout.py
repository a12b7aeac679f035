"""Where each parameter's gradient lives: segments of flat buffers.

A layout only grows. Parameters that are frozen at first get a further buffer when they are unfrozen; a view that was
handed out never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .dtensors import is_dtensor, local
from .parameters import NamedParameter

ALIGNMENT_BYTES = 128  # of a segment relative to its buffer: one cache line pair, eight 16-byte accesses


@dataclass(frozen=True)
class Segment:
    """One parameter's range of a flat buffer; for a DTensor, the range, shape and strides of its local part.

    `stride` is dense: the parameter's own order of dimensions, so that a gradient laid out like its parameter is
    accumulated in memory order, without a permutation.
    """

    index: int
    name: str
    param: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    numel: int
    contiguous: bool
    param_stride: tuple[int, ...]

    def in_memory_order(self, grad: Tensor) -> Tensor:
        """`grad` itself when its memory order is the segment's, else a copy that has it."""
        if grad.is_contiguous() if self.contiguous else grad.stride() == self.stride:
            return grad
        return torch.empty_strided(self.shape, self.stride, dtype=grad.dtype, device=grad.device).copy_(grad)

    def check_numel(self, grad: Tensor) -> None:
        """Refuse a gradient of another size.

        Raises:
            RuntimeError: names the parameter and both sizes.
        """
        if grad.numel() != self.numel:
            raise RuntimeError(
                f"the gradient of {self.name!r} has {grad.numel()} elements, its parameter had {self.numel} at "
                "construction"
            )

    def drift(self) -> str | None:
        """What changed about the parameter since construction, in words; None when nothing did."""
        p = local(self.param)
        if p.dtype != self.dtype:
            return f"{self.name!r} was {self.dtype} at construction and is {p.dtype} now"
        if p.device != self.device:
            return f"{self.name!r} was on {self.device} at construction and is on {p.device} now"
        if p.shape != self.shape:
            return f"{self.name!r} had shape {tuple(self.shape)} at construction and has {tuple(p.shape)} now"
        if p.stride() != self.param_stride:
            return f"{self.name!r} had strides {self.param_stride} at construction and has {p.stride()} now"
        return None


class FlatBuffer:
    """Segments of one device and buffer dtype, side by side in one tensor, with what the ops need beside it.

    Attributes:
        tensor: fp32 or fp64 `[elements]`. Padding between segments is never read.
        segments: in the order of their offsets.
        views: `tensor`'s segments, shaped and strided like the parameters.
        layout: int64 `[segments, 2]` (offset, numel) on the device; `layout_host` the same on the CPU.
        flags: int32 `[segments]`, the serial number of the last micro-batch whose gradient was not finite.
        all_indices: of the segments.
        contiguous: whether all segments are in index order.
        touched: per segment, whether it holds a sum of this window.
        sharded: whether any parameter is a DTensor.
        ops: the backend's module.
    """

    def __init__(
        self, named: Sequence[NamedParameter], dtype: torch.dtype, device: torch.device, ops: ModuleType
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.ops = ops
        alignment = ALIGNMENT_BYTES // dtype.itemsize
        self.segments: list[Segment] = []
        end = 0
        for index, entry in enumerate(named):
            p = local(entry.param)
            stride = torch.empty_like(p, device="meta").stride()  # dense, also where p itself is not
            contiguous = torch.empty(p.shape, device="meta").stride() == stride
            self.segments.append(
                Segment(
                    index,
                    entry.name,
                    entry.param,
                    p.shape,
                    stride,
                    p.dtype,
                    p.device,
                    end,
                    p.numel(),
                    contiguous,
                    p.stride(),
                )
            )
            end += -(-p.numel() // alignment) * alignment
        self.numel = end
        self.layout_host = torch.tensor([[s.offset, s.numel] for s in self.segments], dtype=torch.int64, device="cpu")
        self.layout = self.layout_host.to(device)
        self.flags = torch.zeros(len(self.segments), dtype=torch.int32, device=device)
        self.touched = bytearray(len(self.segments))
        self.params = [s.param for s in self.segments]
        self.sharded = any(map(is_dtensor, self.params))
        self.all_indices = list(range(len(self.segments)))
        self.contiguous = all(s.contiguous for s in self.segments)
        self._alone: dict[int, tuple[Tensor, Tensor]] = {}
        self.allocate()

    def allocate(self) -> None:
        """Make the tensor and its views, where `release` freed them."""
        self.tensor = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self.views = [self.tensor.as_strided(s.shape, s.stride, s.offset) for s in self.segments]

    def release(self) -> None:
        """Free the tensor; what else belongs to the buffer stays. Views that a user kept keep their memory."""
        self.tensor = self.tensor.new_empty(0)
        self.views = []

    @property
    def released(self) -> bool:
        """Whether the tensor has to be allocated before it is used."""
        return not self.views

    def __str__(self) -> str:
        elements = sum(s.numel for s in self.segments)
        return f"flat buffer of {len(self.segments)} segments, {elements:,} elements, {self.dtype} on {self.device}"

    def first_touches(self, indices: list[int]) -> list[bool]:
        """Of segments: whether they hold no sum of this window yet."""
        touched = self.touched
        if not any(touched):
            return [True] * len(indices)
        if all(touched):
            return [False] * len(indices)
        return [not touched[index] for index in indices]

    def touch(self, indices: list[int]) -> None:
        """Note that segments hold a sum."""
        if indices is self.all_indices:
            self.touched = bytearray(b"\1") * len(indices)
        else:
            for index in indices:
                self.touched[index] = True

    def touched_segments(self) -> list[Segment]:
        """Segments that hold a sum of this window."""
        return [s for s, touched in zip(self.segments, self.touched, strict=True) if touched]

    def touched_views(self) -> list[Tensor]:
        """Their views."""
        return [self.views[s.index] for s in self.touched_segments()]

    def touched_ranges(self) -> list[Tensor]:
        """The fewest 1-d slices of `tensor` that cover all touched segments and no untouched one."""
        ranges: list[tuple[int, int]] = []
        previous = -2
        for s in self.touched_segments():
            start = s.offset
            if previous == s.index - 1:
                start = ranges.pop()[0]
            ranges.append((start, s.offset + s.numel))
            previous = s.index
        return [self.tensor[start:end] for start, end in ranges]

    def layout_alone(self, index: int) -> tuple[Tensor, Tensor]:
        """`layout` and `layout_host` for a tensor that holds one segment and nothing else."""
        if index not in self._alone:
            device, host = self.layout[index : index + 1].clone(), self.layout_host[index : index + 1].clone()
            device[:, 0] = host[:, 0] = 0
            self._alone[index] = (device, host)
        return self._alone[index]

    def divide(self, divisor: Tensor) -> None:
        """Divide the touched segments by a 0-d tensor; a true division, as `grad / K` would be."""
        for piece in self.touched_ranges():
            piece.div_(divisor)


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
    return [FlatBuffer(group[::-1], dtype, device, ops[device]) for (device, dtype), group in groups.items()]
