"""The streaming loop of limits.py for GPUs: contiguous arrays, no table, no scale, no check."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def stream_kernel(accumulator, gradient, BLOCK: tl.constexpr):
    """One full block per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(accumulator + at, tl.load(accumulator + at) + tl.load(gradient + at).to(tl.float32))


def stream(accumulator: Tensor, gradient: Tensor) -> None:
    """Read both and write `accumulator`; what is beyond the last full block is left out."""
    blocks = accumulator.numel() // BLOCK
    if blocks:
        stream_kernel[(blocks,)](accumulator, gradient, BLOCK=BLOCK, num_warps=8)
