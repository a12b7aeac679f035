"""Keeping gradients alive for work that runs on another stream than the one they were allocated on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_until_done(tensors: Sequence[Tensor]) -> None:
    """Let CUDA `tensors` be freed right after the kernels now queued on the current stream are launched.

    Their memory is not handed out again before those kernels have run. On the stream of their allocation the caching
    allocator orders that by itself, and the call returns early; so it does for other devices.
    """
    if tensors and tensors[0].is_cuda:
        stream = torch.cuda.current_stream(tensors[0].device)
        for tensor in tensors:
            tensor.record_stream(stream)
