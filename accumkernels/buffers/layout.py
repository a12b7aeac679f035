"""Where each parameter's gradient lives: segments of flat buffers.

A layout grows: parameters that are frozen at first get a further buffer when they are unfrozen, and existing views
never move. It shrinks where parameters that are frozen again give their segments back (`Store.give_back`): a buffer
that keeps some of its segments is laid out anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dtensors import local

ALIGNMENT_BYTES = 128  # of a segment relative to its buffer: one cache line pair, eight 16-byte accesses


def aligned(numel: int, dtype: torch.dtype) -> int:
    """`numel` rounded up so that the next segment in a flat tensor of `dtype` is aligned."""
    elements = ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // elements) * elements


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
        """`grad` itself when its memory order is the segment's, else a copy that has it.

        Raises:
            RuntimeError: names the parameter: the gradient is sparse, or has another number of elements.
        """
        if grad.layout is not torch.strided:
            raise RuntimeError(f"the gradient of {self.name!r} is sparse; only dense gradients can be accumulated")
        if grad.numel() != self.numel:
            raise RuntimeError(
                f"the gradient of {self.name!r} has {grad.numel()} elements, its parameter had {self.numel} at "
                "construction"
            )
        if grad.is_contiguous() if self.contiguous else grad.stride() == self.stride:
            return grad
        return torch.empty_strided(self.shape, self.stride, dtype=grad.dtype, device=grad.device).copy_(grad)

    def drift(self) -> str | None:
        """What changed about the parameter since construction, in words; None if nothing did."""
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
