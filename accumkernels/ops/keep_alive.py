"""Keeps gradients alive for work that runs on another stream than the one they were allocated on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter, is_, methodcaller
from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 64  # tensors; this many calls of `record_stream` take as long as the event below
_MOST = 16 * 2**20  # bytes held at any moment for each stream


class _Held(NamedTuple):
    tensors: list[Tensor]
    done: torch.cuda.Event  # the kernels that read them have run


_held: dict[tuple[int, int], _Held] = {}  # by device and stream


def keep_until_done(tensors: Sequence[Tensor]) -> None:
    """Let CUDA `tensors` be freed right after the kernels now queued on the current stream are launched.

    Their memory is not reused before those kernels have run. On the stream of their allocation the caching allocator
    ensures this by itself, but a tensor does not say which stream that is. Other devices need nothing.

    `record_stream` takes half a microsecond, so many small tensors are held with one event instead, until the next call
    that holds some. If the kernels have run by then, nothing more is needed; if the device lags behind, the host has
    time for the calls.
    """
    if not tensors or not tensors[0].is_cuda:
        return
    stream = torch.cuda.current_stream(tensors[0].device)
    many = len(tensors) > _FEW and not torch.cuda.is_current_stream_capturing()  # a capture forbids event queries
    if not many or sum(map(attrgetter("nbytes"), tensors)) > _MOST:
        _record(tensors, stream)
        return
    key = (stream.device_index, stream.cuda_stream)
    before = _held.get(key)
    again = before is not None and len(before.tensors) == len(tensors) and all(map(is_, before.tensors, tensors))
    if before is not None and not again and not before.done.query():
        _record(before.tensors, stream)
    done = torch.cuda.Event() if before is None else before.done
    done.record(stream)
    _held[key] = _Held(list(tensors), done)


def _record(tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
    deque(map(methodcaller("record_stream", stream), tensors), maxlen=0)  # avoids a Python loop
