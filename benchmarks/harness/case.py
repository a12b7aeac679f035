"""What every method works on: a list of gradients, and a flat buffer with views for each."""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Shapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSS_SCALE = 1024.0


class Case:
    """Gradients of one dtype and fp32 accumulators for them.

    Args:
        shapes: Of the gradients.
        dtype: Of the gradients.
        device: Where everything is.

    Attributes:
        grads: What backward left, times `LOSS_SCALE`.
        written_from: The same values; `write` copies them into `grads`, as a backward pass would write them.
        flat: fp32, holds the accumulators at 128-byte aligned offsets; zeros at first.
        views: The accumulators, of the gradients' shapes.
        layout, layout_host: (offset, numel) of each, int64 on the device and on the CPU.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.dtype, self.device = dtype, device
        self.written_from = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
        self.grads = [source.clone() for source in self.written_from]
        self.numel = sum(g.numel() for g in self.grads)
        starts, end = [], 0
        for g in self.grads:
            starts.append(end)
            end += -(-g.numel() // 32) * 32
        self.flat = torch.zeros(end, device=device)
        self.views = [self.flat[s : s + g.numel()].view(g.shape) for s, g in zip(starts, self.grads, strict=True)]
        self.layout_host = torch.tensor([[s, g.numel()] for s, g in zip(starts, self.grads, strict=True)])
        self.layout = self.layout_host.to(device)

    @property
    def needed_bytes(self) -> int:
        """What one accumulate must move: gradient and accumulator read, accumulator written."""
        return self.numel * (self.dtype.itemsize + 8)

    def write(self) -> None:
        """Write all gradients, the last parameter's first."""
        for index in reversed(range(len(self.grads))):
            self.write_one(index)

    def write_one(self, index: int) -> Tensor:
        """Write one gradient; the answer is it."""
        return self.grads[index].copy_(self.written_from[index])

    def parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        """Parameters of the gradients' shapes; their values do not matter."""
        return [torch.nn.Parameter(torch.zeros_like(g, dtype=dtype)) for g in self.grads]
