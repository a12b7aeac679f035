"""The inbox: gradients that backward has left and no op has added yet, from hooks on parameters, the graph and `.grad`.

Before each backward it gets a sink, which adds what it hands over while the backward runs, in buckets; what is left is
drained by `accumulate`. It decides nothing about windows, weights or ranks.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..buffers.flat import FlatBuffer, SquaredNorms
from ..buffers.parameters import is_dtensor, is_offloaded, local_grad
from ..buffers.store import Store
from ..devices import StreamOrder, Streams, is_accelerator, is_capturing
from ..hooks import Handles, opaque


class MicroBatch(NamedTuple):
    """A micro-batch, from where it enters the accumulator until it is counted.

    Attributes:
        weight: Its part of the window's sum of weights: a number, or fp64 0-d on the first device.
        tag: Its serial number, which kernels store in the flags of parameters whose gradients are not finite.
        last: Whether it is the window's last on this rank, so that sums may be sent while its backward runs.
        loss: Its plain loss, for the window's metrics.
        ran_backward: Whether the accumulator ran its backward; otherwise, no gradient means that there was none.
        loss_weight: The factor of its loss before backward, given like `weight`; None: the loss was left as it is.
        unit: The unit of `loss_weight`, which is `weight / unit` up to rounding; None if `loss_weight` is 0 and no rank
            had another weight by then.
        divided_by: What a trainer has divided its loss by. Gradients are multiplied by it while they are added, so that
            sums, norms and divisors are those of the undivided loss; None: by nothing.
        scale: The loss scale that its gradients carry, where they are added later; None: the GradScaler's own.
        squares: Where the squared norms of its gradients are added up; None: they are not measured.
    """

    weight: float | Tensor
    tag: int
    last: bool = False
    loss: Tensor | None = None
    ran_backward: bool = False
    loss_weight: float | Tensor | None = None
    unit: float | None = 1.0
    divided_by: float | Tensor | None = None
    scale: Tensor | None = None
    squares: SquaredNorms | None = None

    @property
    def undivided(self) -> Tensor | None:
        """Its loss, as it was before a trainer divided it."""
        return self.loss if self.loss is None or self.divided_by is None else self.loss.detach() * self.divided_by


class Captured(NamedTuple):
    """Gradients of one flat buffer, as backward left them, and the indices of their segments."""

    segments: list[int]
    grads: list[Tensor]


Bucket = Sequence[tuple[FlatBuffer, Captured]]
SegmentKey = tuple[FlatBuffer, int]  # a segment
_Item = tuple[SegmentKey, Tensor]


class Sink:
    """Receives gradients while a backward runs. By itself it needs all of them, and sends none to other ranks.

    Attributes:
        flush_at: Segments whose gradients must be handed over at once, with all that is pending.
    """

    flush_at: Set[SegmentKey] = frozenset()

    def add(self, bucket: Bucket, micro_batch: MicroBatch) -> None:
        """Add gradients to the flat buffers."""
        raise NotImplementedError

    def multiplier(self, micro_batch: MicroBatch) -> float | Tensor | None:
        """Return the factor for ops that compute weight gradients and add them: the weight over the loss scale.

        None: the micro-batch needs gradients of its own.
        """
        return None

    def check_writable(self, key: SegmentKey) -> None:
        """Refuse an addition to a segment that is being sent to other ranks."""

    def leaf_ran(self, key: SegmentKey, pending: bool) -> bool:
        """Note that a segment gets no more gradients in this backward.

        Args:
            key: The segment.
            pending: Whether one of its gradients has not been handed over yet.

        Returns:
            Whether to hand over now what is pending.
        """
        return False


# ---- pending gradients


def default_bucket_bytes(device: torch.device, largest: int) -> int:
    """Return a bucket's size if the user gives none.

    On an accelerator it is what stays in L2 until it is read. On a CPU it is what the C library keeps when it is freed
    at once: glibc returns the end of its heap to the system if more than twice the largest block is free; the next
    backward then touches new pages, which takes longer than everything else (benchmarks.buckets).

    Args:
        device: The gradients' device.
        largest: Bytes of the largest gradient.
    """
    return 16 * 2**20 if is_accelerator(device) else min(max(2 * largest, 2 * 2**20), 32 * 2**20)


@functools.cache
def _references() -> int:
    """Count the references to a leaf's node in a hook, where nobody else holds it; torch 2.13 keeps one of its own.

    Not at import: the first backward starts autograd's threads, one for each device that is there by then, and a plugin
    may bring another one.
    """
    counts = [0]

    def count(_: Tensor) -> None:
        node = torch._C._current_autograd_node()
        counts.append(sys.getrefcount(node))

    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), device="cpu", requires_grad=True)
        leaf.register_post_accumulate_grad_hook(count)
        leaf.clone().backward()
    return counts[-1]


_NONE: Set[SegmentKey] = frozenset()


class _Pending:
    """Gradients of one device that no op has added yet.

    Attributes:
        items: The gradients with their segments.
        nbytes: How many bytes they take.
    """

    __slots__ = ("items", "nbytes")

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.nbytes = 0


class _Route(NamedTuple):
    """Where gradients go in one backward.

    Attributes:
        add: Gets full buckets, and what `flush_at` names; None: everything is kept until it is drained.
        flush_at: See `Sink`.
        limit: Bytes of a full bucket.
        references: To a leaf's node while its hooks run, if nobody else holds it.
    """

    add: Callable[[Bucket], None] | None
    flush_at: Set[SegmentKey]
    limit: float
    references: int


class Inbox:
    """Keeps gradients from where backward has made them until an op has added them.

    Parameters that it listens to have a hook that takes each `.grad` as soon as backward has made it. Less than
    `bucket_bytes` of a device is pending whenever such a hook returns, so at most that and one gradient, the one that
    fills the bucket, are alive on it at any moment. A gradient that others have hooks for stays in `.grad` until the
    backward has ended, and so does every gradient of a parameter without a hook.

    Parameters keep the hooks, and hooks keep this object, so it must not keep the accumulator. Hooks find the caches
    cold, since a layer has just run: each Python call between a gradient and its op takes microseconds.

    A backward over several devices runs hooks in a thread for each, which hands over what its own device has made: in
    another's thread, the current stream would be one that nobody waits for. Gradients need no lock: an append is
    atomic, a handover takes the front of the list, and a lost addition only makes a bucket larger by one gradient.

    Args:
        store: Holds the parameters, whose `.grad`s are drained, too.
        bucket_bytes: Hand over when so many bytes are pending, in backwards of which gradients are taken.
        usual: Adds a bucket of a loop's own backward, on the stream of the last gradient; None leaves `.grad` alone
            there.
        handles: Remove the hooks when the accumulator is freed.

    Attributes:
        bucket_bytes: As the argument.
        listens: Whether any parameter has a hook.
        listening: Whether gradients are taken, or left to torch.
        running: Whether a backward whose gradients are taken has begun and not ended: it raised, or still runs. Never
            known of a loop's own under compiled autograd.
        added: Whether anything of the current micro-batch was added, with its weight, which cannot change now.
        always: Whether gradients of a loop's own backwards are taken.
        frozen: Parameters that have no hook yet, because they were frozen.
        order: The streams that write to flat buffers.
    """

    def __init__(
        self, store: Store, bucket_bytes: int, usual: Callable[[Bucket], None] | None, handles: Handles
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.always = usual is not None
        self.listens = self.running = self.added = False
        self.listening = True
        self.frozen: list[SegmentKey] = []
        self.order = StreamOrder()
        self._store = store
        self._handles = handles
        self._lock = threading.RLock()  # several devices' threads may hand over
        self._pending: collections.defaultdict[torch.device, _Pending] = collections.defaultdict(_Pending)
        self._streams = Streams()  # that computed the items
        self._drained: Bucket = ()  # what of it is in `.grad`
        self._route = self._usual = _Route(usual, _NONE, bucket_bytes if usual else math.inf, _references())

    def set_listening(self, listening: bool) -> None:
        """Take gradients from backward, or leave them to torch."""
        self.listening = listening
        self.running = False

    # ---- hooks on parameters

    def listen(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on every parameter of new buffers; on those that are frozen once they are unfrozen."""
        keys = [(buffer, index) for buffer in buffers for index in buffer.all_indices] + self.frozen
        self.frozen = []
        for buffer, index in keys:
            param = buffer.params[index]
            if not param.requires_grad:
                self.frozen.append((buffer, index))
            elif not is_offloaded(param):  # FSDP2 may still copy the gradient to the host while hooks run
                hook = self._hook((buffer, index), is_dtensor(param))
                self._handles.add(param.register_post_accumulate_grad_hook(hook))
            self.listens = True

    def _hook(self, key: SegmentKey, sharded: bool) -> Callable[[Tensor], None]:
        """Make the hook that a parameter calls when backward has made its `.grad`."""
        segment = key[0].segments[key[1]]
        nbytes, queues = segment.numel * segment.dtype.itemsize, key[0].queues
        pending = self._pending[key[0].grad_device]

        def take(param: Tensor) -> None:
            if is_dynamo_compiling():  # under compiled autograd, which must not look into what follows
                _take_opaquely(self, key, param)
                return
            if not self.running:
                self.take_first(key, param)
                return
            grad = local_grad(param) if sharded else param.grad
            if grad is None:  # another hook may have taken it
                return
            node, route = torch._C._current_autograd_node(), self._route
            if len(param._post_accumulate_grad_hooks or ()) > 1 or sys.getrefcount(node) > route.references:
                if _others_wait(param, node):
                    return
            param.grad = None
            if queues:
                self._streams.record(grad.device)
            pending.items.append((key, grad))
            pending.nbytes += nbytes
            if pending.nbytes >= route.limit or (route.flush_at and key in route.flush_at):
                self.flush(key[0].grad_device)

        take.of_accumulator = True  # type: ignore[attr-defined]  # see `has_only_our_hooks`
        return take

    def take_first(self, key: SegmentKey, param: Tensor) -> None:
        """Take a backward's first gradient (or any, if nobody knows that a backward has begun), if it takes any."""
        if not (self.listening and (self.always or self.running)):
            return
        self._begin_loops()
        grad = local_grad(param)
        if grad is not None and not _others_wait(param, torch._C._current_autograd_node()):
            param.grad = None
            self.put(key, grad)

    def _begin_loops(self, *_: Any) -> None:
        """Note that a loop's own backward runs, and ask to be called at its end."""
        if not self.running and self.listening and self.always and not in_compiled_autograd():
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_loops)

    def _end_loops(self) -> None:
        """Note that a backward ended; reentrant checkpointing's ends inside another, which may still raise."""
        self.running = False
        outer = torch._C._current_autograd_node()
        for function, _ in () if outer is None else outer.next_functions:
            if function is not None and function.name() != "torch::autograd::AccumulateGrad":  # its hook calls this
                function.register_prehook(self._begin_loops)

    # ---- a backward that the accumulator runs

    def begin(self, micro_batch: MicroBatch, sink: Sink, holds_leaves: bool) -> None:
        """Begin a backward: gradients taken in it go to the sink.

        Args:
            micro_batch: The micro-batch.
            sink: Adds gradients.
            holds_leaves: Whether the `inputs` of the backward hold the nodes of leaves.
        """
        add = functools.partial(sink.add, micro_batch=micro_batch)
        self._route = _Route(add, sink.flush_at, self.bucket_bytes, _references() + holds_leaves)
        self.running = self.listening

    def end(self) -> None:
        """End it, also if it raised."""
        self._route = self._usual
        self.running = False

    def note_added(self) -> None:
        """Note that an op has added some of the current micro-batch by itself."""
        self.added = True

    # ---- pending gradients

    def put(self, key: SegmentKey, grad: Tensor) -> None:
        """Keep a segment's gradient, or a part of it."""
        if key[0].queues:
            self._streams.record(grad.device)
        pending = self._pending[key[0].grad_device]
        pending.items.append((key, grad))
        pending.nbytes += grad.nbytes
        if pending.nbytes >= self._route.limit or key in self._route.flush_at:
            self.flush(key[0].grad_device)

    def holds(self, key: SegmentKey) -> bool:
        """Whether a gradient of a segment is pending, here or in `.grad`, which may be left to somebody else's hook."""
        return (
            any(pending == key for pending, _ in self._pending[key[0].grad_device].items)
            or key[0].params[key[1]].grad is not None
        )

    @property
    def sources(self) -> list[torch.Stream]:
        """The streams that computed the gradients of the current micro-batch."""
        return list(self._streams.seen.values())

    @property
    def uncounted(self) -> bool:
        """Whether there are gradients of the current micro-batch outside of `.grad`."""
        if self.added:
            return True
        for pending in self._pending.values():
            if pending.items:
                return True
        return False

    def flush(self, device: torch.device) -> None:
        """Hand over what is pending of a device, if anything is, on its current stream."""
        graph = torch.is_grad_enabled()  # True with create_graph=True
        torch._C._set_grad_enabled(False)
        try:
            with self._lock:
                pending = self._pending[device]
                items = pending.items[:]
                del pending.items[: len(items)]  # keep what another thread appends meanwhile
                pending.nbytes = 0
                if not items:
                    return
                self.added = True
                if self._streams.seen:  # pending gradients may be read then
                    self._streams.join(device)
                    self.order.take(device)
                add = self._route.add
                assert add is not None
                for bucket in _buckets(items):
                    add(bucket)
        finally:
            torch._C._set_grad_enabled(graph)

    def drain(self) -> list[Bucket]:
        """Return what is left to add, in this order; keep it until `done`, so that a failed op loses nothing."""
        if self._streams.seen:
            self._streams.join()
        if self._store.layout.queues:  # what is left is added on the caller's streams
            self.order.take_all(self._store.layout.queues)
        items: list[_Item] = []
        for pending in self._pending.values():
            items += pending.items
        if items and not self.listens:
            items = self._add_up(items)
        swept = [(buffer, captured) for buffer in self._store.buffers if (captured := _in_grad(buffer)).grads]
        self._drained = swept
        if not items:
            return [swept] if swept else []
        return _buckets(items + [((b, i), grad) for b, found in swept for i, grad in zip(*found, strict=True)])

    def _add_up(self, items: list[_Item]) -> list[_Item]:
        """Where a micro-batch is kept whole, add up several gradients of a parameter in `.grad`, as autograd would.

        They come with several backwards, or where a coupled loss has parameters of the encoders.

        Returns:
            The gradients that are the only ones of their parameters.
        """
        counts = collections.Counter(key for key, _ in items)
        single = []
        for key, grad in items:
            param = key[0].params[key[1]]
            if counts[key] == 1 and param.grad is None:
                single.append((key, grad))
            else:
                param.grad = grad.to(param.dtype) if param.grad is None else param.grad + grad
        for pending in self._pending.values():
            pending.items[:] = [item for item in single if self._pending[item[0][0].grad_device] is pending]
        return single

    def done(self) -> None:
        """Drop what was drained, because the micro-batch was counted, and all else of it."""
        for buffer, captured in self._drained:
            for index in captured.segments:
                buffer.params[index].grad = None
        self._drained = ()
        for pending in self._pending.values():
            pending.items.clear()
            pending.nbytes = 0
        self.running = self.added = False
        self._streams.seen.clear()

    def drop(self) -> bool:
        """Drop the current micro-batch, and every `.grad`; return whether some of it may be in the sums."""
        broken = self.added or self.running
        for device in self._store.layout.queues:
            _wait_for_thread(device)
            self.order.take(device)  # autograd joins its streams with the caller's only where nothing is raised
        self.done()
        self._store.drop_grads()
        return broken

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()
        self.listens = False


_take_opaquely = opaque(Inbox.take_first)


@functools.cache
def _round_trip(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of one node on a device, its leaf and its gradient, made once: after an error memory may be short."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), device=device, requires_grad=True)
        return leaf.clone(), leaf, torch.ones((), device=device)


def _wait_for_thread(device: torch.device) -> None:
    """Wait until autograd's thread of a device has left the node that it runs.

    A backward that raises on the host does not wait for the threads of devices, which may leave a `.grad` later.
    """
    if not is_capturing(device):
        root, leaf, grad = _round_trip(device)
        torch.autograd.grad(root, leaf, grad, retain_graph=True)


def _in_grad(buffer: FlatBuffer) -> Captured:
    """Collect the `.grad`s of a buffer's parameters."""
    params, of = buffer.params, local_grad if buffer.sharded else _grad
    grads = [grad for param in params if (grad := of(param)) is not None]
    if len(grads) == len(params) or not grads:  # nearly always all are there, or none, because hooks took them
        return Captured(buffer.all_indices if grads else [], grads)
    return Captured([index for index, param in enumerate(params) if of(param) is not None], grads)


_grad = operator.attrgetter("grad")


def _buckets(items: list[_Item]) -> list[Bucket]:
    """Group by flat buffer; more than one bucket if a segment got several gradients, which are added one by one.

    That happens with reentrant checkpointing, after a second backward, and if a weight is read both cast and uncast.
    """
    buckets: list[Bucket] = []
    while items:
        later: list[_Item] = []
        first = items[0][0][0]
        found = {first: {key[1]: grad for key, grad in items if key[0] is first}}
        if len(found[first]) < len(items):  # else one buffer, each segment once: nearly always, and three times as fast
            found = {}
            for item in items:
                (buffer, index), grad = item
                if found.setdefault(buffer, {}).setdefault(index, grad) is not grad:
                    later.append(item)
        bucket = []
        for buffer, grads in found.items():
            indices = list(grads)
            if indices == buffer.all_indices:  # small models; the ops read a long list slowly
                indices = buffer.all_indices
            bucket.append((buffer, Captured(indices, list(grads.values()))))
        buckets.append(bucket)
        items = later
    return buckets


# ---- who else waits for a gradient


def in_compiled_autograd(enabled: bool = False) -> bool:
    """Whether compiled autograd runs this backward, or, with `enabled`, will run the next; it drops callbacks."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled" if enabled else "in_compiled_autograd_region", False)


def has_only_our_hooks(param: Tensor) -> bool:
    """Whether nobody else waits for a parameter's gradient; hooks would not see what never gets there."""
    return param.requires_grad and not param._backward_hooks and not _others_find_grad(param)


def _others_find_grad(param: Tensor) -> bool:
    """Whether others have hooks that are to find a parameter's `.grad`."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if not hasattr(hook, "of_accumulator"):
            return True
    return False


def _others_wait(param: Tensor, node: Any) -> bool:
    """Whether hooks of others, on the parameter or on the node that runs, are to find its `.grad`."""
    return _others_find_grad(param) or (node is not None and have_hooks((node,)))


def have_hooks(nodes: Iterable[Any]) -> bool:
    """Whether somebody has put Python hooks on nodes, which torch shows only to whoever registers another."""
    for node in nodes:
        for register in (node.register_prehook, node.register_hook):
            handle = register(_nothing)
            hooks = handle.hooks_dict_ref()
            del hooks[handle.id]
            if hooks:
                return True
    return False


def _nothing(*_: Any) -> None:
    """Be a hook."""
