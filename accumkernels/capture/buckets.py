"""Takes gradients while backward runs, and hands them over in buckets (`release="backward"` and "auto")."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..boundary import opaque
from ..buffers.dtensors import is_dtensor, is_offloaded, local_grad
from ..buffers.flat import FlatBuffer
from ..hooks import Handles
from .captures import Bucket, Capture, Captured, MicroBatch, Place, Sink
from .gradients import have_hooks, others_find_grad
from .streams import StreamOrder, Streams

_Item = tuple[Place, Tensor]


def _references() -> int:
    """Count the references to a leaf's node in a hook, where nobody else holds it; torch 2.13 keeps one of its own."""
    counts = [0]

    def count(_: Tensor) -> None:
        node = torch._C._current_autograd_node()
        counts.append(sys.getrefcount(node))

    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        leaf.register_post_accumulate_grad_hook(count)
        leaf.clone().backward()
    return counts[-1]


HELD = _references()


def default_bucket_bytes(device: torch.device, largest: int) -> int:
    """Return a bucket's size if the user gives none.

    On a GPU it is what stays in L2 until it is read. On a CPU it is what the C library keeps when it is freed at once:
    glibc returns the end of its heap to the system if more than twice the largest block is free; the next backward then
    touches new pages, which takes longer than everything else (benchmarks.buckets).

    Args:
        device: The gradients' device.
        largest: Bytes of the largest gradient.
    """
    return 16 * 2**20 if device.type == "cuda" else min(max(2 * largest, 2 * 2**20), 32 * 2**20)


class Buckets(Capture):
    """Takes each `.grad` as soon as backward has made it, and hands gradients over in buckets.

    Less than `bucket_bytes` is pending whenever a hook returns, so at most `bucket_bytes` and one gradient, the one
    that fills the bucket, are alive at any moment. A gradient that others have hooks for stays in `.grad` until the
    backward has ended.

    Parameters keep the hooks, and hooks keep this object, so it must not keep the accumulator. Hooks find the caches
    cold, since a layer has just run: each Python call between a gradient and its op takes microseconds.

    A backward over several devices runs hooks in several threads. Gradients need no lock: an append is atomic, a
    handover takes the front of the list, and a lost addition only makes a bucket larger by one gradient.

    Args:
        bucket_bytes: Hand over when so many bytes are pending.
        usual: Adds a bucket of a backward outside `begin` and `end`, on the stream of the last gradient.
        always: Whether to take gradients of these backwards.
        handles: Remove the hooks when the accumulator is freed.

    Attributes:
        handed_over: Whether anything was handed over since the last `forget`.
        interrupted: Whether a backward began and did not end, because it raised or still runs. Never known under
            compiled autograd.
        listens: Whether any parameter has a hook.
        bucket_bytes: As the argument.
        order: The streams that write to flat buffers in one backward.
        frozen: Parameters that have no hook yet, because they were frozen.
        held: References to a leaf's node while its hooks run, if nobody else holds it.
    """

    def __init__(self, bucket_bytes: int, usual: Callable[[Bucket], None], always: bool, handles: Handles) -> None:
        self.handed_over = False
        self.interrupted = False
        self.listens = False
        self.order = StreamOrder()
        self._usual = self._sink = usual
        self._always = always
        self._handles = handles
        self._listening = True
        self._inside = False  # between `begin` and `end`
        self._lock = threading.RLock()  # several devices' threads may hand over
        # What hooks read and write for each gradient.
        self._ready = False  # whether gradients are taken, and a backward is known to have begun
        self._items: list[_Item] = []
        self._bytes = 0
        self.bucket_bytes = self._limit = bucket_bytes
        self._awaited: Set[Place] = frozenset()
        self._streams = Streams()
        self.held = HELD
        self.frozen: list[Place] = []

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers; on those that are frozen once they are unfrozen."""
        places = [(buffer, index) for buffer in buffers for index in buffer.all_indices] + self.frozen
        self.frozen = []
        for buffer, index in places:
            param = buffer.params[index]
            if not param.requires_grad:
                self.frozen.append((buffer, index))
            elif not is_offloaded(param):  # FSDP2 may still copy the gradient to the host while hooks run
                hook = self._hook((buffer, index), is_dtensor(param))
                self._handles.add(param.register_post_accumulate_grad_hook(hook))
            self.listens = True

    def _hook(self, place: Place, sharded: bool) -> Callable[[Tensor], None]:
        """Make the hook that a parameter calls when backward has made its `.grad`."""
        segment = place[0].segments[place[1]]
        nbytes, on_gpu = segment.numel * segment.dtype.itemsize, segment.device.type == "cuda"

        def take(param: Tensor) -> None:
            if is_dynamo_compiling():  # under compiled autograd, which must not look into what follows
                _take_opaquely(self, place, param)
                return
            if not self._ready:
                self.take_first(place, param)
                return
            grad = local_grad(param) if sharded else param.grad
            if grad is None:  # another hook may have taken it
                return
            node = torch._C._current_autograd_node()
            if len(param._post_accumulate_grad_hooks or ()) > 1 or sys.getrefcount(node) > self.held:
                if _others_wait(param, node):
                    return
            param.grad = None
            if on_gpu:
                self._streams.see(grad.device)
            self._items.append((place, grad))
            self._bytes += nbytes
            if self._bytes >= self._limit or (self._awaited and place in self._awaited):
                self.hand_over()

        take.of_accumulator = True  # type: ignore[attr-defined]  # see `gradients.is_ours_alone`
        return take

    def take_first(self, place: Place, param: Tensor) -> None:
        """Take a backward's first gradient (or any, if nobody knows that a backward has begun), if it takes any."""
        grad = local_grad(param) if self.takes else None
        if grad is not None and not _others_wait(param, torch._C._current_autograd_node()):
            param.grad = None
            self.collect(place, grad)

    def hold_leaves(self, hold: bool) -> None:
        """Note whether the running backward's `inputs` hold the nodes of leaves."""
        self.held = HELD + hold

    def set_listening(self, listening: bool) -> None:
        """Take gradients, or leave them in `.grad`."""
        self._listening = listening
        self._ready = False

    @property
    def takes(self) -> bool:
        """Whether gradients of a backward that runs now are taken."""
        return self.listens and self._listening and (self._always or self._inside)

    def begin(self, micro_batch: MicroBatch, sink: Sink) -> None:
        """Begin a backward; gradients taken in it go to the sink."""
        self._sink = functools.partial(sink.add, micro_batch=micro_batch)
        if sink.awaited is None:
            self._limit = 0
        else:
            self._awaited = sink.awaited
        self._inside = True
        self.interrupted = self._ready = self._listening

    def end(self, failed: bool) -> None:
        """See `Capture`; a backward that raised leaves nothing, unless it breaks the window."""
        self._sink = self._usual
        self._limit, self._awaited = self.bucket_bytes, frozenset()
        self._inside = self._ready = False
        if not failed:
            self.interrupted = False
        elif not self.broken:
            self.forget()

    @property
    def broken(self) -> bool:  # type: ignore[override]
        """See `Capture`."""
        return self.interrupted and (self._always or self.handed_over)

    @property
    def added(self) -> bool:  # type: ignore[override]
        """See `Capture`; pending gradients count, too."""
        return self.handed_over or bool(self._items)

    def is_pending(self, place: Place) -> bool:
        """Whether a segment's gradient was not yet handed over: taken, or left in `.grad` to somebody else's hook."""
        return any(pending == place for pending, _ in self._items) or place[0].params[place[1]].grad is not None

    def collect(self, place: Place, grad: Tensor) -> bool:
        """Take a segment's gradient in the backward that made it; False if that backward's gradients are not taken."""
        if not self._ready:
            if not self.takes:
                return False
            self._begin()
        if grad.is_cuda:
            self._streams.see(grad.device)
        self._items.append((place, grad))
        self._bytes += grad.nbytes
        if self._bytes >= self._limit or place in self._awaited:
            self.hand_over()
        return True

    def _begin(self, *_: Any) -> None:
        """Note that a backward runs, and ask to be called at its end."""
        if not self._ready and self.takes and not in_compiled_autograd():
            self.interrupted = self._ready = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """Note that a backward ended; reentrant checkpointing's ends inside another, which may still raise."""
        self.interrupted = self._ready = False
        outer = torch._C._current_autograd_node()
        for function, _ in () if outer is None else outer.next_functions:
            if function is not None and function.name() != "torch::autograd::AccumulateGrad":  # its hook calls begin
                function.register_prehook(self._begin)

    def hand_over(self) -> None:
        """Hand over what is pending, if anything is."""
        graph = torch.is_grad_enabled()  # True with create_graph=True
        torch._C._set_grad_enabled(False)
        try:
            with self._lock:
                items = self._items[:]
                del self._items[: len(items)]  # keep what another thread appends meanwhile
                self._bytes = 0
                if not items:
                    return
                self.handed_over = True
                if self._streams.seen:
                    self._join_streams(items)
                for bucket in _buckets(items):
                    self._sink(bucket)
        finally:
            torch._C._set_grad_enabled(graph)

    def _join_streams(self, items: list[_Item]) -> None:
        """Order streams: pending gradients may be read then, and a bucket added on another stream comes later."""
        self._streams.join()
        if self.order.writers:  # fused weights write to the buffers too
            for device in dict.fromkeys(buffer.device for (buffer, _), _ in items):
                self.order.take(device)

    def drain(self) -> list[Bucket]:
        """Return what is left to add, in this order; keep it until `forget`, so that a failed op loses nothing."""
        if not self._items:
            return []
        if self._streams.seen:
            self._streams.join()
        return _buckets(self._items)

    def forget(self) -> None:
        """See `Capture`; the next backward starts afresh."""
        self._items.clear()
        self._bytes = 0
        self._ready = self.handed_over = self.interrupted = False
        if self._streams.seen:
            self._streams.forget()

    def discard(self) -> bool:
        """See `Capture`."""
        broken = self.handed_over or self.interrupted
        self.forget()
        return broken

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()
        self.listens = False


_take_opaquely = opaque(Buckets.take_first)


def _buckets(items: list[_Item]) -> list[Bucket]:
    """Group by flat buffer; more than one bucket if a segment got several gradients, which are added one by one.

    That happens with reentrant checkpointing, after a second backward, and if a weight is read both cast and uncast.
    """
    buckets: list[Bucket] = []
    while items:
        later: list[_Item] = []
        first = items[0][0][0]
        found = {first: {place[1]: grad for place, grad in items if place[0] is first}}
        if len(found[first]) < len(items):  # else one buffer, each segment once: nearly always, and three times as fast
            found, later = _grouped(items)
        bucket = []
        for buffer, grads in found.items():
            indices = list(grads)
            if indices == buffer.all_indices:  # small models; the ops read a long list slowly
                indices = buffer.all_indices
            bucket.append((buffer, Captured(indices, list(grads.values()))))
        buckets.append(bucket)
        items = later
    return buckets


def _grouped(items: list[_Item]) -> tuple[dict[FlatBuffer, dict[int, Tensor]], list[_Item]]:
    """Group gradients by flat buffer and segment; also return further ones of the same segments."""
    found: dict[FlatBuffer, dict[int, Tensor]] = {}
    later = []
    for item in items:
        (buffer, index), grad = item
        grads = found.setdefault(buffer, {})
        if index in grads:
            later.append(item)
        else:
            grads[index] = grad
    return found, later


def _others_wait(param: Tensor, node: Any) -> bool:
    """Whether hooks of others, on the parameter or on the node that runs, are to find its `.grad`."""
    return others_find_grad(param) or (node is not None and have_hooks((node,)))


def in_compiled_autograd(enabled: bool = False) -> bool:
    """Whether compiled autograd runs this backward, or, with `enabled`, will run the next; it drops callbacks."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled" if enabled else "in_compiled_autograd_region", False)
