"""Chooses an accumulator's captures by its options, its parameters and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..buffers.dtensors import local
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..hooks import Handles
from ..ops.products import sums_fit_in_cache
from .buckets import Buckets, default_bucket_bytes
from .captures import Bucket, Capture
from .gradients import Gradients
from .graph import FusionPolicy, GraphCapture

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


class Captures(list[Capture]):
    """The captures in use: those that take gradients while a backward runs, and `gradients`, which is drained last.

    Args:
        store: Flat buffers.
        owner: Hooks are removed when it is freed.
        add: Adds gradients of the loop's own backwards, with `release="backward"`.
        overflow: FusedAccumulator's argument.
        release: FusedAccumulator's argument; "auto" only if `overflow` allows buckets.
        bucket_bytes: FusedAccumulator's argument.
        fuse_weight_gradients: FusedAccumulator's argument.
        scaled: Whether losses are scaled.
        whole: Whether every gradient is to be left to autograd.

    Attributes:
        buckets: Takes gradients while backward runs, if it listens.
        gradients: Takes what is left in `.grad`.
        graph: Takes gradients where the graph shows that nobody else needs them; None if no parameter is large enough.
        add_early: Whether gradients may be added while backward runs.
        release_early: Whether they ever may, so that sums may be sent.
    """

    def __init__(
        self,
        store: Store,
        owner: object,
        add: Callable[[Bucket], None],
        *,
        overflow: str | None,
        release: str,
        bucket_bytes: int | None,
        fuse_weight_gradients: str | bool,
        scaled: bool,
        whole: bool,
    ) -> None:
        super().__init__()
        self._store = store
        self._release = release
        self.release_early = release != "microbatch"
        self.gradients = Gradients(store)
        self.graph: GraphCapture | None = None
        self.add_early = False
        if bucket_bytes is None:
            segments = (s for buffer in store.buffers for s in buffer.segments)
            largest = max((s.numel * s.dtype.itemsize for s in segments), default=0)
            bucket_bytes = default_bucket_bytes(store.device, largest)
        self.buckets = Buckets(bucket_bytes, add, release == "backward", Handles(owner))
        self._policy: FusionPolicy | None = None
        self.listen_to(store.buffers)
        if not whole:
            cheap = store.device.type == "cpu" and sums_fit_in_cache(sum(b.tensor.nbytes for b in store.buffers))
            self._policy = fusion_policy(scaled, fuse_weight_gradients, overflow, self.buckets.listens, cheap)
            self.add_early = self.add_early or self._policy.fuses
            self._read_graphs(store.buffers)

    def _read_graphs(self, grown: Sequence[FlatBuffer]) -> None:
        """Take gradients of new buffers where graphs show that nobody else needs them, if any is large enough."""
        if self._policy is not None:
            graph = self.graph or GraphCapture(self._store, self.buckets, self.gradients, self._policy)
            graph.follow(grown)
            if self.graph is None and graph.weights:
                self.graph = graph
                self.append(graph)

    def listen_to(self, grown: Sequence[FlatBuffer]) -> None:
        """Take gradients of new buffers; release them in backward if that is worth it: small models get no hooks."""
        self._read_graphs(grown)
        if not self.release_early:
            return
        if not self.buckets.listens:
            params = [param for buffer in self._store.buffers for param in buffer.params]
            nbytes = sum(local(param).nbytes for param in params if param.requires_grad)
            if self._release == "auto" and nbytes <= self.buckets.bucket_bytes:
                return
            grown = self._store.buffers
            self.append(self.buckets)
            self.add_early = True
        self.buckets.listen(grown)

    @property
    def added(self) -> bool:
        """Whether gradients of the current micro-batch were taken with its weight, which cannot change now."""
        return any(capture.added for capture in self)

    def discard(self) -> bool:
        """Forget the current micro-batch, and drop every `.grad`; return whether some of it may be in the sums."""
        self.gradients.discard()
        return any([capture.discard() for capture in self])  # noqa: C419  of all of them

    def remove_hooks(self) -> None:
        """Remove every hook."""
        for capture in self:
            capture.remove()

    def __str__(self) -> str:
        """Name the way that `release` resolves to."""
        if not self.buckets.listens:
            return f"{self._release!r} (whole micro-batches)" if self._release == "auto" else repr(self._release)
        return f"{self._release!r} (buckets of {self.buckets.bucket_bytes:,} bytes)"
