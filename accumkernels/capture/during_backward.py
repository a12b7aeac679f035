"""Gradients taken while backward runs, and handed over in buckets (`release="backward"`)."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..boundary import opaque
from ..buffers.dtensors import local_grad
from ..buffers.flat import FlatBuffer
from ..hooks import Handles, Hook
from .gradients import Captured, checked

Bucket = Sequence[tuple[FlatBuffer, Captured]]
Sink = Callable[[Bucket], None]


class DuringBackward:
    """Takes each `.grad` as soon as backward has made it, and hands them over in buckets (`release="backward"`).

    What is pending is less than `bucket_bytes` whenever a hook returns, so at most `bucket_bytes` and one gradient, the
    one that fills the bucket, are alive at any moment.

    Args:
        bucket_bytes: Hand over when so many bytes are pending.
        sink: Called with what is pending for each buffer, in backward, on the stream of the last gradient; `into` puts
            another in its place.

    Attributes:
        handed_over: Whether the sink was called since the last `reset`.
    """

    def __init__(self, bucket_bytes: int, sink: Sink) -> None:
        self._listening = True
        self.handed_over = False
        self._bucket_bytes = bucket_bytes
        self._sink = sink
        self._pending: dict[FlatBuffer, Captured] = {}
        self._bytes = 0
        self._streams: set[torch.cuda.Stream] = set()  # what is pending was computed on
        self._running = False  # a backward has begun and not ended
        self._lock = threading.RLock()  # backward over several devices runs hooks in several threads
        self._handles = Handles(self)

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers."""
        for buffer in buffers:
            for index, param in enumerate(buffer.params):
                take = functools.partial(DuringBackward._take, buffer=buffer, index=index)
                self._handles.add(param.register_post_accumulate_grad_hook(Hook(self, take, in_graphs=True)))

    def _take(self, param: Tensor, buffer: FlatBuffer, index: int) -> None:
        grad = local_grad(param)
        if self._listening and grad is not None:
            param.grad = None
            self.collect(buffer, index, grad)

    def set_listening(self, listening: bool) -> None:
        """Whether gradients are taken; else they stay in `.grad`."""
        self._listening = listening

    @contextlib.contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Hand over to another sink for as long as a backward runs."""
        usual, self._sink = self._sink, sink
        try:
            yield
        finally:
            self._sink = usual

    @property
    def has_taken(self) -> bool:
        """Whether any gradient was taken since the last `reset`."""
        return self.handed_over or bool(self._pending)

    def is_pending(self, buffer: FlatBuffer, index: int) -> bool:
        """Whether a gradient of a segment was taken and not yet handed over."""
        pending = self._pending.get(buffer)
        return pending is not None and index in pending.segments

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
            grad = checked(buffer.segments[index], grad.detach())
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

    def hand_over(self, sink: Sink | None = None) -> None:
        """Hand over what is pending, if anything is; to `sink` where one is given."""
        with self._lock:
            pending, streams = list(self._pending.items()), self._streams
            self._pending, self._bytes, self._streams = {}, 0, set()
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            if pending:
                self.handed_over = True
                (sink or self._sink)(pending)
            # The next bucket may be added on another stream: it comes after this one.
            self._streams = {torch.cuda.current_stream(stream.device) for stream in streams}

    def reset(self) -> None:
        """Forget what is pending; the next backward begins anew."""
        self._pending, self._bytes, self._streams = {}, 0, set()
        self.handed_over = self._running = False

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()


def _in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: it forgets what is to be called at the end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)
