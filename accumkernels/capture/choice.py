"""Chooses an accumulator's captures by its options, its parameters and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..arguments import Options
from ..buffers.flat import FlatBuffer
from ..buffers.parameters import local
from ..buffers.store import Store
from ..hooks import Handles
from ..ops.products import sums_fit_in_cache
from .graph import FusionPolicy, GraphCapture
from .inbox import Bucket, Inbox, MicroBatch, SegmentKey, Sink, default_bucket_bytes

_SMALLEST_FUSED = 2**18  # elements; below, hooks cost more than the bytes that they save
_WIDE_RANGE = frozenset({torch.bfloat16, torch.float32})
_ALL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def fusion_policy(
    scaled: bool, wanted: str | bool, overflow: str | None, adds_in_backward: bool, sums_fit_in_cache: bool
) -> FusionPolicy:
    """Decide which weight gradients of one accumulator are added by the op that computes them.

    A GradScaler acts on overflows. A sum over tokens that overflows when autograd makes it in fp16, or from scaled
    gradients, may be finite in the buffer, so products are then fused only on demand.

    A backward's additions cannot be undone. By default, weights are fused only if all gradients are added in backward
    anyway; if a micro-batch can be dropped as a whole, they never are.

    Args:
        scaled: Whether losses are scaled.
        wanted: FusedAccumulator's `fuse_weight_gradients`.
        overflow: FusedAccumulator's argument.
        adds_in_backward: Whether gradients are added while backward runs in any case.
        sums_fit_in_cache: Whether making and adding 16-bit gradients of linear weights is faster than fusing them.
    """
    on_demand, deferred = wanted is True, wanted == "deferred"
    by_default = _WIDE_RANGE - {torch.bfloat16} if sums_fit_in_cache else _WIDE_RANGE
    return FusionPolicy(
        fuses=wanted is not False and overflow in (None, "window") and (on_demand or deferred or adds_in_backward),
        min_numel=0 if on_demand else _SMALLEST_FUSED,
        linear=_ALL if on_demand else frozenset() if scaled else by_default,
        embedding=_ALL if on_demand or not scaled else _ALL - {torch.float16},
        deferred=deferred,
    )


class Captures:
    """What takes gradients for an accumulator: the inbox, and what reads the graphs of its backwards.

    Args:
        store: Flat buffers.
        options: FusedAccumulator's.
        add: Adds gradients of the loop's own backwards, with `release="backward"`.
        owner: Hooks are removed when it is freed.

    Attributes:
        inbox: Gradients until they are added.
        graph: Takes gradients where the graph shows that nobody else needs them; None if no parameter is large enough.
        add_early: Whether gradients may be added while backward runs.
        release_early: Whether they ever may, so that sums may be sent.
    """

    def __init__(self, store: Store, options: Options, add: Callable[[Bucket], None], owner: object) -> None:
        self._store = store
        self._release = options.resolved_release
        self.release_early = self._release != "microbatch"
        self.graph: GraphCapture | None = None
        self.add_early = False
        bucket_bytes = options.bucket_bytes
        if bucket_bytes is None:
            segments = (s for buffer in store.buffers for s in buffer.segments)
            largest = max((s.numel * s.dtype.itemsize for s in segments), default=0)
            bucket_bytes = default_bucket_bytes(store.layout.devices[0], largest)
        takes_own = self._release == "backward" and not options.in_trainer
        self.inbox = Inbox(store, bucket_bytes, add if takes_own else None, Handles(owner))
        self._policy: FusionPolicy | None = None
        self.follow(store.buffers)
        if not store.sharded:  # else every gradient is left to autograd
            cheap = store.layout.device.type == "cpu" and sums_fit_in_cache(sum(b.tensor.nbytes for b in store.buffers))
            wanted = options.fuse_weight_gradients if store.slots is None else False  # products go where the sums are
            scaled = options.scaler is not None
            self._policy = fusion_policy(scaled, wanted, options.overflow, self.inbox.listens, cheap)
            self.add_early = self.add_early or self._policy.fuses
            self._read_graphs(store.buffers)

    def _read_graphs(self, grown: Sequence[FlatBuffer]) -> None:
        """Take gradients of new buffers where graphs show that nobody else needs them, if any is large enough."""
        if self._policy is not None:
            graph = self.graph or GraphCapture(self._store, self.inbox, self._policy)
            graph.follow(grown)
            if graph.weights:
                self.graph = graph

    def follow(self, grown: Sequence[FlatBuffer]) -> None:
        """Take gradients of new buffers; release them in backward if that is worth it: small models get no hooks."""
        self._read_graphs(grown)
        if not self.release_early:
            return
        if not self.inbox.listens:
            params = [param for buffer in self._store.buffers for param in buffer.params]
            nbytes = sum(local(param).nbytes for param in params if param.requires_grad)
            if self._release == "auto" and nbytes <= self.inbox.bucket_bytes:
                return
            grown = self._store.buffers
            self.add_early = True
        self.inbox.listen(grown)

    # ---- a backward

    def begin(
        self, roots: Sequence[Tensor], micro_batch: MicroBatch, sink: Sink, excludes: bool
    ) -> tuple[GradientEdge, ...]:
        """Begin a backward that the accumulator runs.

        Args:
            roots: The tensors that it starts from.
            micro_batch: The micro-batch.
            sink: Adds gradients while it runs.
            excludes: Whether it can be told which leaves to fill.

        Returns:
            What the engine has to run, its `inputs`; empty if that is everything.
        """
        inputs: tuple[GradientEdge, ...] = ()
        if self._store.layout.queues:
            self.inbox.order.take_all(self._store.layout.queues)
        if self.graph is not None:
            inputs = self.graph.plan(roots, micro_batch, sink, excludes)
        if self.inbox.listens:
            self.inbox.begin(micro_batch, sink, holds_leaves=bool(inputs))
        return inputs

    def end(self) -> bool:
        """End it, also if it raised; return whether some of its gradients may be in the sums."""
        broken = self.inbox.added or (self.inbox.running and self.inbox.always)
        if self.graph is not None:
            self.graph.end()
        if self.add_early:
            self.inbox.end()
        return broken

    def reports(self, key: SegmentKey) -> bool:
        """Whether `Sink.leaf_ran` reports when all gradients of a segment have come."""
        return self.graph is not None and self.graph.reports(key)

    def remove(self) -> None:
        """Remove every hook."""
        self.end()
        self.inbox.remove()

    def __str__(self) -> str:
        """Name the way that `release` resolves to."""
        if not self.inbox.listens:
            return f"{self._release!r} (whole micro-batches)" if self._release == "auto" else repr(self._release)
        return f"{self._release!r} (buckets of {self.inbox.bucket_bytes:,} bytes)"
