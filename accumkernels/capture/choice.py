"""Chooses an accumulator's captures by its options, its model and its backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import nn

from ..buffers.dtensors import local
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..hooks import Handles
from .autocast import AutocastRoute
from .autocast_presence import AutocastPresence, may_route
from .buckets import Buckets, default_bucket_bytes
from .captures import Bucket, Capture
from .fused.gemm import sums_fit_in_cache
from .fused.policy import FusionPolicy
from .fused.weights import FusedWeights
from .gradients import Gradients


class Captures(list[Capture]):
    """The captures in use: those that take gradients while a backward runs, and `gradients`, which is drained last.

    Args:
        module: The autocast route and fused weights may change its forward; None: nothing changes.
        store: Flat buffers.
        owner: Hooks are removed when it is freed.
        add: Adds gradients of the loop's own backwards, with `release="backward"`.
        overflow: FusedAccumulator's argument.
        release: FusedAccumulator's argument; "auto" only if `overflow` allows buckets.
        bucket_bytes: FusedAccumulator's argument.
        autocast_route: FusedAccumulator's argument.
        fuse_weight_gradients: FusedAccumulator's argument.
        scaled: Whether losses are scaled.
        sends: Whether sums may be sent to other ranks while the last backward runs.

    Attributes:
        buckets: Takes gradients while backward runs, if it listens.
        gradients: Takes what is left in `.grad`.
        presence: Decides whether to use the autocast route; None if it is never used.
        add_early: Whether gradients may be added while backward runs.
        release_early: Whether they ever may, so that sums may be sent.
    """

    def __init__(
        self,
        module: nn.Module | None,
        store: Store,
        owner: object,
        add: Callable[[Bucket], None],
        *,
        overflow: str | None,
        release: str,
        bucket_bytes: int | None,
        autocast_route: str | bool,
        fuse_weight_gradients: str | bool,
        scaled: bool,
        sends: bool,
    ) -> None:
        super().__init__()
        self._store = store
        self._release = release
        self.release_early = release != "microbatch"
        self.gradients = Gradients(store)
        self.add_early = False
        if bucket_bytes is None:
            segments = (s for buffer in store.buffers for s in buffer.segments)
            largest = max((s.numel * s.dtype.itemsize for s in segments), default=0)
            bucket_bytes = default_bucket_bytes(store.device, largest)
        self.buckets = Buckets(bucket_bytes, add, release == "backward", Handles(owner))
        self.listen_to(store.buffers)

        cheap = store.device.type == "cpu" and sums_fit_in_cache(sum(buffer.tensor.nbytes for buffer in store.buffers))
        policy = FusionPolicy(scaled, fuse_weight_gradients, overflow, self.buckets.listens, cheap)
        self._fused: FusedWeights | None = None
        if module is not None and policy.fuses and any(p.numel() >= policy.min_numel for p in module.parameters()):
            self._fused = FusedWeights(module, store, self.buckets, policy, sends)
            self.append(self._fused)
            self.add_early = True

        self.presence: AutocastPresence | None = None
        if module is not None and may_route(module, autocast_route):
            always = autocast_route is True
            make = functools.partial(AutocastRoute, store, self.buckets, self.gradients, self._fused, always)
            self.presence = AutocastPresence(module, store, self, always, make)

    def listen_to(self, grown: Sequence[FlatBuffer]) -> None:
        """Release gradients of new buffers in backward if that is worth it; small models get no hooks."""
        if not self.release_early:
            return
        if not self.buckets.listens:
            params = [param for buffer in self._store.buffers for param in buffer.params]
            if self._release == "auto" and sum(local(param).nbytes for param in params) <= self.buckets.bucket_bytes:
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

    def ways(self) -> dict[str, int]:
        """Count the trainable elements that are fused, routed, and neither."""
        fused = set() if self._fused is None else self._fused.parameters
        routed = (self.routed or set()) - fused
        numel = {id(s.param): s.numel for buffer in self._store.buffers for s in buffer.segments}
        counts = {"fused": sum(map(numel.__getitem__, fused)), "routed": sum(map(numel.__getitem__, routed))}
        return {**counts, "ordinary": sum(numel.values()) - sum(counts.values())}

    @property
    def routed(self) -> set[int] | None:
        """Return the ids of the parameters that take the autocast route; None while there is none."""
        route = None if self.presence is None else self.presence.route
        return None if route is None else route.parameters

    def __str__(self) -> str:
        """Name the way that `release` resolves to."""
        if not self.buckets.listens:
            return f"{self._release!r} (whole micro-batches)" if self._release == "auto" else repr(self._release)
        return f"{self._release!r} (buckets of {self.buckets.bucket_bytes:,} bytes)"
