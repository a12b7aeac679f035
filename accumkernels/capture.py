"""Where gradients are taken: the one place that reads and clears `.grad`.

A capture hands over, for each flat buffer, the gradients that are ready and the segments they belong to. It knows
nothing of windows, weights or ops.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boundary import opaque
from .dtensors import local_grad
from .layout import FlatBuffer, Segment
from .ops.schema import State


class Captured(NamedTuple):
    """Gradients of one flat buffer, in memory order, and the indices of their segments."""

    segments: list[int]
    grads: list[Tensor]


def _checked(segment: Segment, grad: Tensor) -> Tensor:
    """The gradient in its segment's memory order.

    Raises:
        RuntimeError: it is sparse or has another number of elements than its segment.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"the gradient of {segment.name!r} is sparse; only dense gradients can be accumulated")
    segment.check_numel(grad)
    return segment.in_memory_order(grad)


def take(buffer: FlatBuffer, stashed: Mapping[int, list[Tensor]] | None = None) -> Captured:
    """Collect the `.grad`s of a buffer's parameters; they stay there until `drop`, so that a failed op loses nothing.

    Args:
        buffer: Whose parameters.
        stashed: By segment, gradients that never were in `.grad`.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    found = [local_grad(param) for param in buffer.params] if buffer.sharded else [p.grad for p in buffer.params]
    for index, parts in (stashed or {}).items():
        found[index] = _joined(buffer, index, found[index], parts)
    grads = [grad for grad in found if grad is not None]
    if len(grads) == len(found):
        indices = buffer.all_indices
    else:
        indices = [index for index, grad in enumerate(found) if grad is not None]
    if not (buffer.contiguous and _all_contiguous(grads)):
        segments = buffer.segments
        grads = [_checked(segments[index], grad) for index, grad in zip(indices, grads, strict=True)]
    return Captured(indices, grads)


def _joined(buffer: FlatBuffer, index: int, grad: Tensor | None, parts: list[Tensor]) -> Tensor:
    """The sum as autograd would have made it: 16-bit parts widened, then added in fp32."""
    if grad is None and len(parts) == 1:
        return parts[0]
    segment = buffer.segments[index]
    total = _checked(segment, parts[0].float() if grad is None else grad.detach())
    # By the op, since torch's add_ would first widen the part to memory of its own.
    layout, layout_host = buffer.layout_alone(index)
    flat = total.as_strided((segment.numel,), (1,))
    for part in parts[1:] if grad is None else parts:
        scratch = torch.zeros(len(State), dtype=torch.float64, device=buffer.device)
        added = [_checked(segment, part)]
        buffer.ops.accumulate_(flat, scratch, added, [0], [False], layout, layout_host, count=False)
    return total


def _all_contiguous(grads: list[Tensor]) -> bool:
    """Whether memory order is index order in all of them; the usual case, worth a fast answer."""
    try:
        return all(map(Tensor.is_contiguous, grads))
    except RuntimeError:  # sparse tensors have no strides
        return False


def drop(buffer: FlatBuffer, captured: Captured) -> None:
    """Drop the `.grad`s that `take` collected."""
    params = buffer.params
    if captured.segments is buffer.all_indices:
        for param in params:
            param.grad = None
    else:
        for index in captured.segments:
            params[index].grad = None


class DuringBackward:
    """Takes each `.grad` as soon as backward has made it, and hands them over in buckets (`release="backward"`).

    What is pending is less than `bucket_bytes` whenever a hook returns, so at most `bucket_bytes` and one gradient, the
    one that fills the bucket, are alive at any moment.

    Args:
        bucket_bytes: Hand over when so many bytes are pending.
        sink: Called with what is pending of each buffer, in backward, on the stream of the last gradient.

    Attributes:
        listening: Whether gradients are taken; else they stay in `.grad`.
        handed_over: Whether the sink was called since the last `reset`.
    """

    def __init__(self, bucket_bytes: int, sink: Callable[[list[tuple[FlatBuffer, Captured]]], None]) -> None:
        self.listening = True
        self.handed_over = False
        self._bucket_bytes = bucket_bytes
        self._sink = sink
        self._pending: dict[FlatBuffer, Captured] = {}
        self._bytes = 0
        self._streams: set[torch.cuda.Stream] = set()  # what is pending was computed on
        self._running = False  # a backward has begun and not ended
        self._lock = threading.RLock()  # backward over several devices runs hooks in several threads
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers."""
        this = weakref.ref(self)
        for buffer in buffers:
            for index, param in enumerate(buffer.params):

                def hook(param: Tensor, buffer: FlatBuffer = buffer, index: int = index) -> None:
                    capture = this()
                    grad = local_grad(param)
                    if capture is not None and capture.listening and grad is not None:
                        param.grad = None
                        capture.collect(buffer, index, grad)

                self._handles.append(param.register_post_accumulate_grad_hook(hook))

    @property
    def has_taken(self) -> bool:
        """Whether any gradient was taken since the last `reset`."""
        return self.handed_over or bool(self._pending)

    @property
    def interrupted(self) -> bool:
        """Whether a backward began and did not end: it raised. Never known under compiled autograd."""
        return self._running

    @opaque
    def collect(self, buffer: FlatBuffer, index: int, grad: Tensor) -> None:
        """Take the gradient of a segment, in the backward that made it."""
        with self._lock, torch.no_grad():
            if not self._running and not _in_compiled_autograd():
                self._running = True
                torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            pending = self._pending.get(buffer)
            if pending is not None and index in pending.segments:  # reentrant checkpointing, or a second backward
                self.hand_over()
                pending = None
            if pending is None:
                pending = self._pending[buffer] = Captured([], [])
            grad = _checked(buffer.segments[index], grad.detach())
            pending.segments.append(index)
            pending.grads.append(grad)
            if grad.is_cuda:
                self._streams.add(torch.cuda.current_stream(grad.device))
            self._bytes += grad.nbytes
            del grad
            if self._bytes >= self._bucket_bytes:
                self.hand_over()

    def _ended(self) -> None:
        self._running = False

    def hand_over(self) -> None:
        """Hand over what is pending, if anything is."""
        with self._lock:
            pending, streams = list(self._pending.items()), self._streams
            self._pending, self._bytes, self._streams = {}, 0, set()
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if pending:
                self.handed_over = True
                self._sink(pending)
            # The next bucket may be added on another stream: it comes after this one.
            self._streams = {torch.cuda.current_stream(stream.device) for stream in streams}

    def reset(self) -> None:
        """Forget what is pending; the next backward begins anew."""
        self._pending, self._bytes, self._streams = {}, 0, set()
        self.handed_over = self._running = False

    def remove(self) -> None:
        """Take off every hook."""
        _remove(self._handles)


def _in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: it forgets what is to be called at the end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
