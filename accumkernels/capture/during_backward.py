"""Gradients taken while backward runs, and handed over in buckets (`release="backward"` and "auto")."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..boundary import opaque, without_graph
from ..buffers.dtensors import is_dtensor, local_grad
from ..buffers.flat import FlatBuffer
from ..hooks import Handles
from .gradients import Captured
from .streams import Streams

Bucket = Sequence[tuple[FlatBuffer, Captured]]
Sink = Callable[[Bucket], None]
Place = tuple[FlatBuffer, int]  # a segment


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


class _Pending:
    """What hooks write for each gradient: an append, an addition and two comparisons.

    Backward over several devices runs hooks in several threads. No lock is taken for a gradient: an append is atomic,
    whoever hands over takes the front of the list, and a lost addition only makes a bucket larger by one gradient.
    """

    def __init__(self, owner: DuringBackward, bucket_bytes: int) -> None:
        self.owner = weakref.ref(owner)  # hooks, which parameters keep, keep nothing else
        self.ready = False  # whether gradients are taken, and a backward is known to have begun
        self.items: list[tuple[Place, Tensor]] = []
        self.bytes = 0
        self.streams = Streams()
        self.bucket_bytes = bucket_bytes
        self.awaited: Set[Place] = frozenset()

    def hand_over(self) -> None:
        owner = self.owner()
        if owner is not None:
            owner.hand_over()


def _hook(pending: _Pending, place: Place, sharded: bool) -> Callable[[Tensor], None]:
    """What a parameter calls when backward has made its `.grad`."""
    segment = place[0].segments[place[1]]
    nbytes, on_gpu = segment.numel * segment.dtype.itemsize, segment.device.type == "cuda"

    def take(param: Tensor) -> None:
        if is_dynamo_compiling():  # under compiled autograd, and it must not look into what follows
            _take_opaquely(pending, place, param)
            return
        if not pending.ready:
            _take_first(pending, place, param)
            return
        grad = local_grad(param) if sharded else param.grad
        if grad is None:  # another hook may have taken it
            return
        param.grad = None
        if on_gpu:
            pending.streams.see(grad.device)
        pending.items.append((place, grad))
        pending.bytes += nbytes
        if pending.bytes >= pending.bucket_bytes or (pending.awaited and place in pending.awaited):
            pending.hand_over()

    return take


def _take_first(pending: _Pending, place: Place, param: Tensor) -> None:
    """Take the first gradient of a backward; any where nobody knows that a backward has begun; or none."""
    owner = pending.owner()
    if owner is None or not owner.takes:
        return
    grad = local_grad(param)
    if grad is not None:
        param.grad = None
        owner.collect(place, grad)


_take_opaquely = opaque(_take_first)


class DuringBackward:
    """Takes each `.grad` as soon as backward has made it, and hands them over in buckets.

    What is pending is less than `bucket_bytes` whenever a hook returns, so at most `bucket_bytes` and one gradient, the
    one that fills the bucket, are alive at any moment.

    Args:
        bucket_bytes: Hand over when so many bytes are pending.
        sink: Called with what is pending for each buffer, in backward, on the stream of the last gradient; `run` puts
            another in its place.
        always: Whether every backward is listened to; else only those that `run` runs.

    Attributes:
        handed_over: Whether the sink was called since the last `reset`.
        interrupted: Whether a backward began and did not end: it raised, or runs now. Never known under compiled
            autograd.
        listens: Whether any parameter has a hook.
    """

    def __init__(self, bucket_bytes: int, sink: Sink, always: bool) -> None:
        self.handed_over = False
        self.listens = False
        self._sink = sink
        self._always = always
        self._listening = True
        self._inside = False  # `run` runs a backward
        self.interrupted = False
        self._pending = _Pending(self, bucket_bytes)
        self._lock = threading.RLock()  # of handing over: several devices' threads may
        self._handles = Handles(self)

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers."""
        for buffer in buffers:
            for index, param in enumerate(buffer.params):
                hook = _hook(self._pending, (buffer, index), is_dtensor(param))
                self._handles.add(param.register_post_accumulate_grad_hook(hook))
                self.listens = True

    def set_listening(self, listening: bool) -> None:
        """Whether gradients are taken; else they stay in `.grad`."""
        self._listening = listening
        self._pending.ready = False

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
        bucket_bytes = self._pending.bucket_bytes
        if awaited is None:
            self._pending.bucket_bytes = 0
        else:
            self._pending.awaited = awaited
        self._inside = True
        self.interrupted = self._pending.ready = self._listening
        try:
            backward()
            self.interrupted = False
        finally:
            self._sink = usual
            self._pending.bucket_bytes, self._pending.awaited = bucket_bytes, frozenset()
            self._inside = self._pending.ready = False

    @property
    def has_taken(self) -> bool:
        """Whether any gradient was taken since the last `reset`."""
        return self.handed_over or bool(self._pending.items)

    def is_pending(self, place: Place) -> bool:
        """Whether a gradient of a segment was taken and not yet handed over."""
        return any(pending == place for pending, _ in self._pending.items)

    def collect(self, place: Place, grad: Tensor) -> None:
        """Take the gradient of a segment, in the backward that made it."""
        if not self._pending.ready and not _in_compiled_autograd():
            self.interrupted = self._pending.ready = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        pending = self._pending
        if grad.is_cuda:
            pending.streams.see(grad.device)
        pending.items.append((place, grad))
        pending.bytes += grad.nbytes
        if pending.bytes >= pending.bucket_bytes or place in pending.awaited:
            self.hand_over()

    def _ended(self) -> None:
        self.interrupted = self._pending.ready = False

    @without_graph
    def hand_over(self) -> None:
        """Hand over what is pending, if anything is."""
        with self._lock:
            for bucket in self.take_rest():
                self._sink(bucket)

    def take_rest(self) -> list[Bucket]:
        """What is pending, for the caller to add: it counts as handed over."""
        pending = self._pending
        items = pending.items[:]
        del pending.items[: len(items)]  # not what another thread appends meanwhile
        pending.bytes = 0
        if not items:
            return []
        self.handed_over = True
        pending.streams.join()  # and a bucket that is added on yet another stream comes after this one
        return _buckets(items)

    def reset(self) -> None:
        """Forget what is pending; the next backward begins anew."""
        self._pending.items.clear()
        self._pending.bytes = 0
        self._pending.streams.forget()
        self._pending.ready = self.handed_over = self.interrupted = False

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()
        self.listens = False


def _buckets(items: list[tuple[Place, Tensor]]) -> list[Bucket]:
    """By flat buffer; more than one bucket where a segment got several gradients, which are added one after another.

    So it is with reentrant checkpointing, after a second backward, and where a weight is read both cast and uncast.
    """
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
        buckets.append([(buffer, _captured(buffer, grads)) for buffer, grads in found.items()])
    return buckets


def _captured(buffer: FlatBuffer, grads: dict[int, Tensor]) -> Captured:
    indices = list(grads)
    if indices == buffer.all_indices:  # small models; the ops read a long list slowly
        indices = buffer.all_indices
    return Captured(indices, list(grads.values()))


def _in_compiled_autograd() -> bool:
    """Whether compiled autograd runs this backward: it forgets what is to be called at the end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and getattr(module, "in_compiled_autograd_region", False)
