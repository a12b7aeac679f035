"""Keeping gradients alive for work that runs on another stream than the one they were allocated on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor


def keep_until_done(tensors: Sequence[Tensor]) -> None:
    """Let CUDA `tensors` be freed right after the kernels now queued on the current stream are launched.

    Their memory is not handed out again before those kernels have run. On the stream of their allocation the caching
    allocator orders that by itself, and the call returns early; so it does for other devices.
    """
    if tensors and tensors[0].is_cuda:
        stream = torch.cuda.current_stream(tensors[0].device)
        deque(map(Tensor.record_stream, tensors, repeat(stream)), maxlen=0)  # without a loop of Python
