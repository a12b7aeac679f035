"""A micro-batch's way into the open window: run backward, collect gradients, add them, count."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..boundary import profiled
from ..buffers.dtensors import local
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..capture.autocast import AutocastRoute
from ..capture.autocast_presence import AutocastPresence, may_route
from ..capture.during_backward import DuringBackward, default_bucket_bytes
from ..capture.fused.gemm import sums_fit_in_cache
from ..capture.fused.weights import FusedWeights
from ..capture.gradients import Bucket, Captured, drop, take
from ..hooks import Handles, Hook
from ..ranks.base import Ranks
from ..ranks.weight_unit import backward_may_cross_ranks
from .fusion_policy import FusionPolicy
from .loss import WindowLoss
from .loss_weighting import LossWeighting, Told, Weight
from .noise_scale import NoiseMeter
from .optimizers import owned
from .scaled_backward import scaled_backward
from .scaling import LossScaler
from .state import Phase, Window
from .sums import Sums

_log = logging.getLogger(__name__)
_runners: weakref.WeakSet[MicroBatchRunner] = weakref.WeakSet()  # of all accumulators


class MicroBatchRunner:
    """Takes the micro-batches of one accumulator.

    Args:
        module: Its forward may be changed by the autocast route and for fused weights; None: nothing is.
        store: Flat buffers and states.
        ranks: They are told of segments that are complete before the window ends.
        scaler: Scales losses.
        overflow: As FusedAccumulator's argument.
        noise: Asked for the sums that the noise scale needs.
        loss: Gets the losses of micro-batches.
        release: As FusedAccumulator's argument; "auto" only where `overflow` allows buckets.
        bucket_bytes: As FusedAccumulator's argument.
        autocast_route: As FusedAccumulator's argument.
        fuse_weight_gradients: As FusedAccumulator's argument.

    Attributes:
        hooks: What takes gradients while backward runs; None with `release="microbatch"`.
        serial: Micro-batches ever accumulated: what the kernels store in flags.
    """

    def __init__(
        self,
        module: nn.Module | None,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        loss: WindowLoss,
        *,
        release: str,
        bucket_bytes: int | None,
        autocast_route: str | bool,
        fuse_weight_gradients: str | bool,
    ) -> None:
        self.serial = 0
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._loss = loss
        self._sums = Sums(store, ranks, overflow, noise)
        self._weighting = LossWeighting()
        self._window = Window()
        self._warned = False
        self._counted_by_backward = False
        self._crosses_ranks: bool | None = None  # whether backward may, once the open window has had one
        self._told: Told | None = None  # of gradients here that are of a loss of another accumulator
        self._while_another: Weight | None = None  # runs a backward
        _runners.add(self)
        self._leaves_ran: set[tuple[int, int]] = set()  # of fused weights, while the window's last backward runs
        self._release = release
        if bucket_bytes is None:
            segments = (s for buffer in store.buffers for s in buffer.segments)
            largest = max((s.numel * s.dtype.itemsize for s in segments), default=0)
            bucket_bytes = default_bucket_bytes(store.device, largest)
        self._bucket_bytes = bucket_bytes
        self.hooks: DuringBackward | None = None
        if release != "microbatch":
            sink = Hook(self, MicroBatchRunner._add_bucket_of_users, in_graphs=True)
            self.hooks = DuringBackward(self._bucket_bytes, sink, release == "backward", Handles(self))
            self._listen_to(store.buffers)
        in_buckets = self.hooks is not None and self.hooks.listens
        cheap = store.device.type == "cpu" and sums_fit_in_cache(sum(buffer.tensor.nbytes for buffer in store.buffers))
        self._fusion = FusionPolicy(scaler, noise, fuse_weight_gradients, overflow, in_buckets, cheap)
        self.fused: FusedWeights | None = None
        smallest = self._fusion.min_numel
        if module is not None and smallest is not None and any(p.numel() >= smallest for p in module.parameters()):
            check = Hook(self, MicroBatchRunner._check_segment_not_sent)
            self.fused = FusedWeights(module, store, self.hooks, check, smallest, self._fusion.linear)
        self._autocast: AutocastPresence | None = None
        if module is not None and may_route(module, autocast_route):
            self._autocast = AutocastPresence(module, store, self.hooks, autocast_route is True, self.fused)

    # ---- the life of a window

    def open_window(self, window: Window) -> None:
        """Take what comes from now on into `window`."""
        self._window = window
        if self.hooks is not None:
            self.hooks.reset()
        if self._autocast is not None:
            self._autocast.open_window(keeps_whole=self._noise.on)
        if self.fused is not None:
            self.fused.reset()
        self._leaves_ran.clear()
        self._crosses_ranks = self._told = None
        self.listen(True)

    @property
    def route(self) -> AutocastRoute | None:
        """The autocast route, while autocast is used."""
        return None if self._autocast is None else self._autocast.route

    def prepare_window(self) -> None:
        """At a window's first micro-batch: refuse drift, make room for parameters that were unfrozen."""
        self._store.check_drift()
        self._store.allocate()
        fresh = self._store.unplaced()
        if not fresh:
            return
        self._ranks.check_trainable(self._store.named)
        self._listen_to(self._store.grow(fresh))

    def _listen_to(self, grown: Sequence[FlatBuffer]) -> None:
        """Release the gradients of new buffers in backward, if that is worth it: small models go without hooks."""
        if self.hooks is None:
            return
        if self._release == "auto" and not self.hooks.listens:
            params = [param for buffer in self._store.buffers for param in buffer.params]
            if sum(local(param).nbytes for param in params) <= self._bucket_bytes:
                return
            grown = self._store.buffers
        self.hooks.listen(grown)

    @property
    def chosen(self) -> str:
        """What `release` comes to, in words."""
        if self.hooks is None or not self.hooks.listens:
            return f"{self._release!r} (whole micro-batches)" if self._release == "auto" else repr(self._release)
        return f"{self._release!r} (buckets of {self._bucket_bytes:,} bytes)"

    def listen(self, listening: bool) -> None:
        """Whether what backward makes is taken; else it is left to torch."""
        for capture in (self.hooks, self.fused, self.route):
            if capture is not None:
                capture.set_listening(listening)

    def restore_slots(self) -> None:
        """Put back what an interrupted forward has left in modules."""
        if self.fused is not None:
            self.fused.restore_slots()
        if self._autocast is not None and self._autocast.route is not None:
            self._autocast.route.restore_slots()

    @property
    def interrupted(self) -> bool:
        """Whether a backward raised after some of its gradients were taken."""
        return self.hooks is not None and self.hooks.interrupted

    @property
    def added_in_backward(self) -> bool:
        """Whether gradients of the micro-batch that is under way were taken while its backward ran."""
        fused = self.fused is not None and bool(self.fused.taken)
        return fused or (self.hooks is not None and self.hooks.has_taken)

    @property
    def uncounted(self) -> bool:
        """Whether gradients were taken that no `accumulate` has counted."""
        return self.added_in_backward or (self.route is not None and bool(self.route.stash))

    def discard(self) -> None:
        """Drop the gradients of the micro-batch that is under way; the window breaks where some were added."""
        self._told = None
        if self.hooks is not None:
            if self.hooks.handed_over or self.hooks.interrupted:
                self._window.phase = Phase.BROKEN
            self.hooks.reset()
        if self.fused is not None:
            if self.fused.taken:
                self._window.phase = Phase.BROKEN
            self.fused.reset()
        if self.route is not None:
            self.route.clear()
        self._store.drop_grads()

    def resume(self, serial: int) -> None:
        """Go on from a checkpoint taken after `serial` micro-batches."""
        self.serial = serial

    def remove(self) -> None:
        """Take off every hook."""
        _runners.discard(self)
        for capture in (self.hooks, self.fused, self._autocast):
            if capture is not None:
                capture.remove()

    def ways(self) -> dict[str, int]:
        """How many trainable elements go which way: fused, routed, and the ordinary one."""
        fused = set() if self.fused is None else self.fused.parameters
        routed = (set() if self.route is None else self.route.parameters) - fused
        numel = {id(s.param): s.numel for buffer in self._store.buffers for s in buffer.segments}
        counts = {"fused": sum(map(numel.__getitem__, fused)), "routed": sum(map(numel.__getitem__, routed))}
        return {**counts, "ordinary": sum(numel.values()) - sum(counts.values())}

    # ---- a micro-batch

    def backward(self, loss: Tensor, weight: float | Tensor, last: bool, kwargs: dict[str, Any]) -> Weight:
        """Run backward of the weighted, scaled loss; gradients are then in `.grad`, stashed, or added already."""
        if (isinstance(weight, Tensor) or weight != 1) and self.hooks is not None and self.hooks.has_taken:
            raise RuntimeError(
                f"backward(weight={weight}): an earlier backward of this micro-batch was added with weight 1; call "
                "acc.accumulate() after it, or acc.discard()"
            )
        if self._crosses_ranks is None:  # torch.distributed takes its time to say so
            self._crosses_ranks = backward_may_cross_ranks()
        # Gradients of an earlier backward of this micro-batch do not have the weight yet, unless it was another's.
        told = None if self._told is None else self._told.weight_of(self._store)
        if told is not None and told.total != weight:
            raise RuntimeError(
                f"backward(weight={weight}) on gradients that acc.backward of another accumulator has left here with "
                f"weight {told.total}: give both the same weight, or call acc.accumulate() in between"
            )
        if self._crosses_ranks and (told is not None or not self._has_gradients()):
            loss, weighed = self._weighting.weigh(loss, weight)
        else:
            weighed = Weight(weight)
        if self._window.unsynced:
            self._window.check_unsynced(weighed)
        run = scaled_backward(loss, self._scaler.scaler, kwargs)
        if not weighed.plain:
            run = functools.partial(self._run_telling, run, weighed)
        if self._autocast is None and not self._adds_in_backward:
            run()
        else:
            self.run(run, loss, weighed, last)
        return weighed

    def _run_telling(self, run: Callable[[], None], weight: Weight) -> None:
        """Run a backward, and tell other accumulators that it reaches of the weight that is in its loss."""
        others = [
            other
            for other in tuple(_runners)
            if other is not self
            and (not other._has_gradients() or (other._told is not None and other._told.goes_on(other._store, weight)))
        ]
        for other in others:
            other._while_another = weight
        try:
            run()
            for other in others:
                if other.hooks is not None:
                    other.hooks.hand_over()
        finally:
            for other in others:
                other._while_another = None
                other._told = Told.of(other._store, weight)

    def weight_after_backward(self, weight: float | Tensor) -> Weight:
        """The weight of gradients that a loop's own backward has left, or that of another accumulator.

        The latter may have put a weight into the loss; the window remembers what was left to the accumulate pass.
        """
        told = None if self._told is None else self._told.weight_of(self._store)
        if told is not None:
            return Weight(weight, told.loss_weight, told.unit)
        if isinstance(weight, Tensor) or weight != 1:
            self._window.weighed_after = True
        return Weight(weight)

    def weigh(self, loss: Tensor, weight: float | Tensor) -> tuple[Tensor, Weight]:
        """The loss to run backward of: with its weight, where backward may cross ranks."""
        return self._weighting.weigh(loss, weight) if backward_may_cross_ranks() else (loss, Weight(weight))

    def backward_part(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], weight: Weight, last: bool) -> None:
        """Run backward of a part of a micro-batch, from gradients that have the loss scale and the weight's part.

        Where gradients wait for `accumulate`, they are summed in `.grad` as in torch: on the autocast route, those of
        every part would be kept.
        """
        run = functools.partial(torch.autograd.backward, tensors, grads)
        if not weight.plain:
            run = functools.partial(self._run_telling, run, weight)
        if self._adds_in_backward:
            self.run(run, tensors[0], weight, last)
        else:
            run()

    @property
    def _adds_in_backward(self) -> bool:
        return self.fused is not None or (self.hooks is not None and self.hooks.listens)

    def run(self, run: Callable[[], None], root: Tensor, weight: Weight, last: bool) -> None:
        """Run a backward whose graph begins at `root`; some gradients may be added while it runs."""
        if self._adds_in_backward and self._window.micro_batches == 0:
            with torch.no_grad():
                self.prepare_window()
        # What is left in `.grad`, by an earlier backward of this micro-batch too, `accumulate` adds after this one.
        takes_all = self.hooks is not None and self.hooks.listens
        sends = last and takes_all and not self._has_gradients()
        if self.hooks is not None and self.hooks.listens:
            run = functools.partial(self._run_adding, self.hooks, run, weight, sends)
        if self.fused is not None and weight.unit is not None:  # else the grad_weight is known only in backward
            run = functools.partial(self._run_fused, self.fused, run, weight, sends)
        if self._autocast is None:
            run()
        else:
            self._autocast.run(run, root)

    def _has_gradients(self) -> bool:
        return self.uncounted or any(p.grad is not None for buffer in self._store.buffers for p in buffer.params)

    def _run_fused(self, fused: FusedWeights, run: Any, weight: Weight, sends: bool) -> None:
        """Run a backward that adds gradients of weights itself."""
        complete = self._send_leaf if sends and self._ranks.reduces_sums else None
        try:
            with fused.adding(self._fusion.permission(weight.grad_weight, self.serial + 1), complete):
                run()
        except BaseException:
            if fused.taken:
                self._window.phase = Phase.BROKEN
            raise

    def _send_leaf(self, buffer: FlatBuffer, index: int) -> None:
        """Nothing more comes to a segment that weights are fused into; a part of it may still be in a bucket."""
        self._leaves_ran.add((id(buffer), index))
        if self.hooks is None:
            return
        if not self.hooks.is_pending((buffer, index)):
            self._ranks.send_complete(buffer, [index])
        awaited = self._ranks.awaited
        if awaited is None or (buffer, index) in awaited:
            self.hooks.hand_over()

    def _run_adding(self, hooks: DuringBackward, run: Any, weight: Weight, sends: bool) -> None:
        """Run a backward whose gradients are added, with their weight, while it runs."""
        try:
            awaited = self._ranks.awaited if sends else frozenset()
            hooks.run(run, functools.partial(self._add_bucket, weight=weight, sends=sends), awaited)
        except BaseException:
            if self._release == "backward" or hooks.handed_over:
                self._window.phase = Phase.BROKEN
            else:
                hooks.reset()  # nothing was added: the window is as before this micro-batch
            raise

    @profiled
    def accumulate(
        self, weight: Weight, last: bool, loss: Tensor | None = None, *, after_backward: bool = False
    ) -> None:
        """Add what there is of a micro-batch, and count it.

        Args:
            weight: Of the micro-batch.
            last: Whether it is the window's last, whose sums may be sent to other ranks.
            loss: Its plain loss, for the window's metrics.
            after_backward: Whether a backward has just run; else, where there is nothing, there was no micro-batch.
        """
        window = self._window
        if window.micro_batches == 0:
            self.prepare_window()
        if not self._store.buffers:
            raise RuntimeError("accumulate(): no parameter requires a gradient")
        self._scaler.check_not_unscaled(self._owns_some)

        # Collect: `.grad`s stay where they are until the ops have taken them.
        route = None if self._autocast is None else self._autocast.route
        stash = {} if route is None else route.taken()
        captured: list[tuple[FlatBuffer, Captured]] = []
        has_grads = False
        for buffer in self._store.buffers:
            taken = take(buffer, stash.get(buffer))
            captured.append((buffer, taken))
            has_grads = has_grads or bool(taken.grads)
        loss_scale = self._scaler.loss_scale(lazily=self._ranks.judged_together) if has_grads else None
        added_in_backward = self.added_in_backward
        if not has_grads and not added_in_backward:
            if self._ranks.sharded:  # FSDP2 keeps the gradient, and will add it to a later one
                window.add_unsynced(weight)
                self._loss.add(self._scaler.undivided(loss), weight.total, unsynced=True)
                return
            self._warn_of_nothing(after_backward)
            if not after_backward:
                window.found_nothing += 1
                if last:
                    self._ranks.end_last()
                return
        if window.unsynced:
            window.check_unsynced(weight)
        if self._ranks.begun:
            self._check_not_sent((buffer, taken.segments) for buffer, taken in captured)

        # Check the whole micro-batch first, where it may be dropped.
        tag = self.serial + 1
        drops = None
        if self._overflow in ("microbatch", "raise"):
            drops = self._sums.find_overflow(captured, weight.total, tag)
        if self._overflow == "raise" and drops[self._store.device].item() != 0:  # type: ignore[index]
            self._drop_grads(captured)
            self.serial = tag
            window.drop_unsynced()
            self._loss.drop_unsynced()
            self._raise_overflow()

        # Add: what a backward has left pending, then what is in `.grad`s and on the route. Where that is nothing, the
        # op that adds the last bucket counts the micro-batch too.
        adds: Bucket = captured
        joined = window.with_unsynced(weight) if window.unsynced else weight
        try:
            if self.hooks is not None and added_in_backward:
                buckets = self.hooks.take_rest()
                if buckets and not has_grads and not window.unsynced:
                    adds, loss_scale = buckets.pop(), self._scaler.loss_scale()
                    self._take_turns(adds)
                for bucket in buckets:
                    self._add_bucket(bucket, weight)
            self._sums.add(adds, joined, loss_scale, tag, drops=drops)
        except BaseException:
            if added_in_backward or self._sums.partial:  # an op refuses all of its gradients, others may have run
                window.phase = Phase.BROKEN
            raise
        self._loss.add(self._scaler.undivided(loss), weight.total, None if drops is None else drops[self._store.device])
        self._drop_grads(captured)
        self.serial = tag
        window.count(joined.total)
        if self.hooks is not None and added_in_backward:
            self.hooks.reset()
        self._counted_by_backward = after_backward
        self._told = None
        if last:
            self._ranks.end_last()

    def _warn_of_nothing(self, after_backward: bool) -> None:
        if self._warned:
            return
        self._warned = True
        if after_backward:
            _log.warning(
                "backward() found no gradient: the loss reaches none of the accumulator's parameters. It counts as a "
                "micro-batch whose gradient is zero"
            )
        elif self._window.micro_batches and self._counted_by_backward:
            _log.warning(
                "accumulate() found no gradient, and counted nothing: acc.backward() has accumulated what it computed, "
                "and no backward ran since. Delete acc.accumulate()"
            )
        else:
            _log.warning(
                "accumulate() found no gradient, and counted nothing: if a backward ran before it, zero_grad() must "
                "not come between the two; if none did, delete this accumulate()"
            )

    def _add_bucket_of_users(self, bucket: Bucket) -> None:
        """Add what a backward of the user's own has made, for which no window was prepared; its weight is 1."""
        self._store.allocate()
        another = self._while_another
        self._add_bucket(bucket, Weight(1.0) if another is None else Weight(1.0, another.loss_weight, another.unit))

    def _add_bucket(self, bucket: Bucket, weight: Weight, sends: bool = False) -> None:
        """Add what backward has made so far; `accumulate` counts the micro-batch.

        Args:
            bucket: Gradients per flat buffer.
            weight: Of the micro-batch.
            sends: Whether these gradients complete their segments, which other ranks may then have.
        """
        if self._ranks.begun or self.fused is not None:
            self._take_turns(bucket)
        self._sums.add(bucket, weight, self._scaler.loss_scale(), self.serial + 1, count=False)
        if sends:
            whole = self.fused is None and self.route is None
            for buffer, (segments, _) in bucket:
                complete = segments if whole else [i for i in segments if self._is_complete(buffer, i)]
                self._ranks.send_complete(buffer, complete)

    def _take_turns(self, bucket: Bucket) -> None:
        """Before a bucket is added: its sums must not be on their way, and fused weights may write to the buffers."""
        if self._ranks.begun:
            self._check_not_sent((buffer, segments) for buffer, (segments, _) in bucket)
        if self.fused is not None:
            for buffer, _ in bucket:
                self.fused.take_turn(buffer)

    def _is_complete(self, buffer: FlatBuffer, index: int) -> bool:
        """Whether no more gradients of the window's last micro-batch come to a segment that got one."""
        if self.fused is not None and self.fused.watches(buffer.params[index]):
            return (id(buffer), index) in self._leaves_ran
        return self.route is None or not self.route.in_parts(buffer, index)

    def _check_not_sent(self, parts: Iterable[tuple[FlatBuffer, Sequence[int]]]) -> None:
        for buffer, segments in parts:
            late = self._ranks.already_sent(buffer, segments)
            if late is not None:
                self._window.phase = Phase.BROKEN
                raise RuntimeError(
                    f"{late!r} got a gradient after last=True had sent its sum: in the last micro-batch, a parameter "
                    "may get one only (reentrant checkpointing of a layer that is called twice makes more: "
                    "use_reentrant=False, no last=True, or in a trainer's adapter release='microbatch')"
                )

    def _check_segment_not_sent(self, buffer: FlatBuffer, index: int) -> None:
        self._check_not_sent([(buffer, [index])])

    def _raise_overflow(self) -> None:
        last, names = self._store.flagged()
        if last == self.serial:
            what = f"gradients of {', '.join(names)}"
        else:
            what = "the weight, or gradients on another rank" if self._ranks.judged_together else "the weight"
        raise FloatingPointError(f"micro-batch {self._window.micro_batches} of the window dropped: not finite: {what}")

    def _owns_some(self, optimizer: Optimizer) -> bool:
        return any(self._store.place(p) is not None for p in owned((optimizer,)))

    def _drop_grads(self, captured: Bucket) -> None:
        for buffer, taken in captured:
            drop(buffer, taken)
        if self._autocast is not None and self._autocast.route is not None:
            self._autocast.route.clear()
        if self.fused is not None:
            self.fused.reset()
