"""Gradients taken while backward runs, and handed over in buckets (`release="backward"` and "auto")."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..boundary import opaque
from ..buffers.dtensors import is_dtensor, local_grad
from ..buffers.flat import FlatBuffer
from ..hooks import Handles
from .gradients import Bucket, Captured
from .streams import Streams

Sink = Callable[[Bucket], None]
Place = tuple[FlatBuffer, int]  # a segment
_Item = tuple[Place, Tensor]


def default_bucket_bytes(device: torch.device, largest: int) -> int:
    """A bucket's size where the user gives none.

    On a GPU what stays in L2 until it is read. On a CPU what the C library keeps when it is freed at once: glibc gives
    the end of its heap back to the system where more than twice the largest block is free, and the next backward
    touches new pages, which takes longer than everything else (benchmarks.buckets).

    Args:
        device: Of the gradients.
        largest: Bytes of the largest one.
    """
    return 16 * 2**20 if device.type == "cuda" else min(max(2 * largest, 2 * 2**20), 32 * 2**20)


class DuringBackward:
    """Takes each `.grad` as soon as backward has made it, and hands them over in buckets.

    What is pending is less than `bucket_bytes` whenever a hook returns, so at most `bucket_bytes` and one gradient, the
    one that fills the bucket, are alive at any moment.

    Hooks, which parameters keep, keep this object: it must not keep the accumulator. They find the caches cold, since a
    layer has just run: each call of Python's between a gradient and its op takes microseconds.

    Backward over several devices runs hooks in several threads. No lock is taken for a gradient: an append is atomic,
    whoever hands over takes the front of the list, and a lost addition only makes a bucket larger by one gradient.

    Args:
        bucket_bytes: Hand over when so many bytes are pending.
        sink: Called with what is pending for each buffer, in backward, on the stream of the last gradient; `run` puts
            another in its place.
        always: Whether every backward is listened to; else only those that `run` runs.
        handles: They take off the hooks when the accumulator is freed.

    Attributes:
        handed_over: Whether the sink was called since the last `reset`.
        interrupted: Whether a backward began and did not end: it raised, or runs now. Never known under compiled
            autograd.
        listens: Whether any parameter has a hook.
    """

    def __init__(self, bucket_bytes: int, sink: Sink, always: bool, handles: Handles) -> None:
        self.handed_over = False
        self.interrupted = False
        self.listens = False
        self._sink = sink
        self._always = always
        self._handles = handles
        self._listening = True
        self._inside = False  # `run` runs a backward
        self._lock = threading.RLock()  # of handing over: several devices' threads may
        # What hooks read and write for each gradient.
        self._ready = False  # whether gradients are taken, and a backward is known to have begun
        self._items: list[_Item] = []
        self._bytes = 0
        self._bucket_bytes = bucket_bytes
        self._awaited: Set[Place] = frozenset()
        self._streams = Streams()

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers."""
        for buffer in buffers:
            for index, param in enumerate(buffer.params):
                hook = self._hook((buffer, index), is_dtensor(param))
                self._handles.add(param.register_post_accumulate_grad_hook(hook))
                self.listens = True

    def _hook(self, place: Place, sharded: bool) -> Callable[[Tensor], None]:
        """What a parameter calls when backward has made its `.grad`."""
        segment = place[0].segments[place[1]]
        nbytes, on_gpu = segment.numel * segment.dtype.itemsize, segment.device.type == "cuda"

        def take(param: Tensor) -> None:
            if is_dynamo_compiling():  # under compiled autograd, and it must not look into what follows
                _take_opaquely(self, place, param)
                return
            if not self._ready:
                self.take_first(place, param)
                return
            grad = local_grad(param) if sharded else param.grad
            if grad is None:  # another hook may have taken it
                return
            param.grad = None
            if on_gpu:
                self._streams.see(grad.device)
            self._items.append((place, grad))
            self._bytes += nbytes
            if self._bytes >= self._bucket_bytes or (self._awaited and place in self._awaited):
                self.hand_over()

        return take

    def take_first(self, place: Place, param: Tensor) -> None:
        """Take the first gradient of a backward; any where nobody knows that a backward has begun; or none."""
        grad = local_grad(param) if self.takes else None
        if grad is not None:
            param.grad = None
            self.collect(place, grad)

    def set_listening(self, listening: bool) -> None:
        """Whether gradients are taken; else they stay in `.grad`."""
        self._listening = listening
        self._ready = False

    @property
    def takes(self) -> bool:
        """Whether gradients of a backward that runs now are taken."""
        return self._listening and (self._always or self._inside)

    def run(self, backward: Callable[[], None], sink: Sink, awaited: Set[Place] | None = frozenset()) -> None:
        """Run a backward, and hand over to another sink meanwhile.

        Args:
            backward: What to run.
            sink: The other one.
            awaited: Segments whose gradient is handed over at once, with all that is pending; None: every one.
        """
        usual, self._sink = self._sink, sink
        bucket_bytes = self._bucket_bytes
        if awaited is None:
            self._bucket_bytes = 0
        else:
            self._awaited = awaited
        self._inside = True
        self.interrupted = self._ready = self._listening
        try:
            backward()
            self.interrupted = False
        finally:
            self._sink = usual
            self._bucket_bytes, self._awaited = bucket_bytes, frozenset()
            self._inside = self._ready = False

    @property
    def has_taken(self) -> bool:
        """Whether any gradient was taken since the last `reset`."""
        return self.handed_over or bool(self._items)

    def is_pending(self, place: Place) -> bool:
        """Whether a gradient of a segment was taken and not yet handed over."""
        return any(pending == place for pending, _ in self._items)

    def collect(self, place: Place, grad: Tensor) -> None:
        """Take the gradient of a segment, in the backward that made it."""
        self._begin()
        if grad.is_cuda:
            self._streams.see(grad.device)
        self._items.append((place, grad))
        self._bytes += grad.nbytes
        if self._bytes >= self._bucket_bytes or place in self._awaited:
            self.hand_over()

    def _begin(self, *_: Any) -> None:
        """Note that a backward runs, and be told of its end."""
        if not self._ready and self.takes and not _in_compiled_autograd():
            self.interrupted = self._ready = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """A backward has ended; of reentrant checkpointing, inside another, which may still raise."""
        self.interrupted = self._ready = False
        outer = torch._C._current_autograd_node()
        for function, _ in () if outer is None else outer.next_functions:
            if function is not None and function.name() != "torch::autograd::AccumulateGrad":  # a gradient will tell
                function.register_prehook(self._begin)

    def hand_over(self) -> None:
        """Hand over what is pending, if anything is."""
        graph = torch.is_grad_enabled()  # with create_graph=True
        torch._C._set_grad_enabled(False)
        try:
            with self._lock:
                for bucket in self.take_rest():
                    self._sink(bucket)
        finally:
            torch._C._set_grad_enabled(graph)

    def take_rest(self) -> list[Bucket]:
        """What is pending, for the caller to add: it counts as handed over."""
        items = self._items[:]
        del self._items[: len(items)]  # not what another thread appends meanwhile
        self._bytes = 0
        if not items:
            return []
        self.handed_over = True
        if self._streams.seen:
            self._streams.join()  # and a bucket that is added on yet another stream comes after this one
        return _buckets(items)

    def reset(self) -> None:
        """Forget what is pending; the next backward begins anew."""
        self._items.clear()
        self._bytes = 0
        self._streams.forget()
        self._ready = self.handed_over = self.interrupted = False

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()
        self.listens = False


_take_opaquely = opaque(DuringBackward.take_first)


def _buckets(items: list[_Item]) -> list[Bucket]:
    """By flat buffer; more than one bucket where a segment got several gradients, which are added one after another.

    So it is with reentrant checkpointing, after a second backward, and where a weight is read both cast and uncast.
    """
    if len(items) == 1:
        (buffer, index), grad = items[0]
        return [[(buffer, Captured([index], [grad]))]]
    buckets: list[Bucket] = []
    while items:
        found: dict[FlatBuffer, dict[int, Tensor]] = {}
        later = []
        for item in items:
            (buffer, index), grad = item
            grads = found.setdefault(buffer, {})
            if index in grads:
                later.append(item)
            else:
                grads[index] = grad
        items = later
        bucket = []
        for buffer, grads in found.items():
            indices = list(grads)
            if indices == buffer.all_indices:  # small models; the ops read a long list slowly
                indices = buffer.all_indices
            bucket.append((buffer, Captured(indices, list(grads.values()))))
        buckets.append(bucket)
    return buckets


def _in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: it forgets what is to be called at the end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)
