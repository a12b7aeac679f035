"""A micro-batch's way into the open window: run backward, collect gradients, add them, and count the micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..boundary import profiled
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..capture.captures import Bucket, MicroBatch, Sink
from ..capture.casts import CastCache
from ..capture.choice import Captures
from ..capture.static_grads import Watches
from ..hooks import Hook
from ..ranks.base import Ranks
from ..ranks.weight_unit import backward_may_cross_ranks
from .grad_scaler import LossScaler, backward_from, scaled_backward
from .loss_weighting import LossWeighting
from .misuse import warn_of_nothing
from .noise_scale import NoiseMeter
from .optimizers import owned
from .shared_loss import SharedLoss
from .state import Window
from .sums import Sums


class MicroBatchRunner:
    """Runs the micro-batches of one accumulator.

    Args:
        store: Flat buffers and states.
        ranks: Their sender decides which gradients go out while a backward runs.
        scaler: Scales losses.
        overflow: FusedAccumulator's argument.
        noise: Collects the sums that the noise scale needs.
        cache_casts: FusedAccumulator's argument.
        **options: Options of `Captures`.

    Attributes:
        serial: Number of micro-batches ever accumulated, which the kernels store in flags.
        captures: Take gradients.
        casts: Autocast's copies of weights, if they are kept for a window.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        cache_casts: bool,
        **options: Any,
    ) -> None:
        self.serial = 0
        self._store = store
        self._ranks = ranks
        self._sender = ranks.sender
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._weighting = LossWeighting(ranks.weight_key)
        self._window = Window()
        self._warned = False  # whether it warned of a micro-batch without gradients
        self._counted_by_backward = False
        self._crosses_ranks: bool | None = None  # whether backward may; known after the open window's first backward
        self.casts = CastCache(store, self) if cache_casts else None
        add = Hook(self, MicroBatchRunner._add_of_loop, in_graphs=True)
        options.update(overflow=overflow, scaled=scaler.scaler is not None, whole=ranks.judged_together)
        self._make_captures = functools.partial(Captures, store, add=add, **options)
        self.captures = self._make_captures(owner=self)
        self._watches = Watches(self)
        self._watches.follow(store.buffers)
        self._sums = Sums(store, ranks, scaler, overflow, noise)
        self._shared_loss = SharedLoss(store, Hook(self, MicroBatchRunner.is_uncounted))

    # ---- the life of a window

    def open_window(self, window: Window) -> None:
        """Add what comes from now on to `window`."""
        self._window = window
        self._crosses_ranks = None
        if self.casts is not None:
            self.casts.release()
        if self._shared_loss.found:
            self._shared_loss.forget()
        if self.captures.gradients.stashed:
            self.captures.gradients.forget()
        for capture in self.captures:
            capture.forget()
            capture.set_listening(True)
        if self.captures.graph is not None:
            self.captures.graph.drop_kept()

    def flush(self) -> None:
        """Add what captures keep over micro-batches, before sums are read."""
        if self.captures.graph is not None:
            try:
                self.captures.graph.flush()
            except BaseException:
                self._window.break_()
                raise

    def listen(self, listening: bool) -> None:
        """Take gradients from backward, or leave them to torch."""
        for capture in self.captures:
            capture.set_listening(listening)

    def prepare_window(self) -> None:
        """At a window's first micro-batch, refuse drift and make room for unfrozen parameters."""
        self._store.check_drift()
        self._store.allocate()
        grown: list[FlatBuffer] = []
        if fresh := self._store.unplaced():
            self._ranks.check_trainable(self._store.named)
            grown = self._store.grow(fresh)
        if grown or self.captures.buckets.frozen:
            self.captures.listen_to(grown)
            self._watches.follow(grown)

    def renew_captures(self) -> None:
        """Make captures anew between windows, after segments have moved: the old ones know the old places."""
        self.captures.remove_hooks()
        self.captures = self._make_captures(owner=self)

    def remove_hooks(self) -> None:
        """Take off every hook."""
        self._watches.remove()
        self.captures.remove_hooks()
        if self.casts is not None:
            self.casts.remove()

    def is_ready(self) -> bool:
        """Return False if a backward was interrupted."""
        return not self.captures.buckets.interrupted

    def is_uncounted(self) -> bool:
        """Whether captures hold gradients that no `accumulate` has counted."""
        for capture in self.captures:
            if capture.added:
                return True
        return bool(self.captures.gradients.stashed)

    def discard(self) -> None:
        """Drop the gradients of the current micro-batch; this breaks the window if some were added."""
        if self.casts is not None:
            self.casts.release()
        self._shared_loss.forget()
        if self.captures.discard():
            self._window.break_()

    def resume(self, serial: int) -> None:
        """Resume from a checkpoint taken after `serial` micro-batches."""
        self.serial = serial

    # ---- a micro-batch

    def micro_batch(self, weight: float | Tensor, last: bool = False, loss: Tensor | None = None) -> MicroBatch:
        """Make the next micro-batch, whose gradients come from somebody else's backward."""
        return MicroBatch(weight, self.serial + 1, last, loss)

    def backward(self, loss: Tensor, weight: float | Tensor, last: bool, kwargs: dict[str, Any]) -> MicroBatch:
        """Run backward of the weighted, scaled loss; captures then hold its gradients, or have added them already."""
        if (isinstance(weight, Tensor) or weight != 1) and self.captures.buckets.added:
            raise RuntimeError(
                f"backward(weight={weight}): an earlier backward of this micro-batch was added with weight 1; call "
                "acc.accumulate() after it, or acc.discard()"
            )
        if self._shared_loss.found:
            self._shared_loss.check()
        micro_batch = MicroBatch(weight, self.serial + 1, last, loss, True)
        if self._crosses_ranks is None:  # asking torch.distributed is slow
            self._crosses_ranks = backward_may_cross_ranks()
        if self._crosses_ranks:
            if not self.has_gradients:
                loss, micro_batch = self._weighting.weigh(loss, micro_batch)
            elif isinstance(weight, Tensor) or weight != 1:  # gradients of an earlier backward lack the weight
                self._window.weigh_late()
        if self._window.unsynced:
            self._window.check_unsynced(micro_batch)
        backward, selects = scaled_backward(loss, self._scaler.scaler, kwargs)
        self.run(backward, (loss,), micro_batch, selects=selects)
        return micro_batch

    def weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """Put the weight into the loss if backward may cross ranks."""
        return self._weighting.weigh(loss, micro_batch) if backward_may_cross_ranks() else (loss, micro_batch)

    def plan(self, loss: Tensor) -> None:
        """Before a backward that somebody else runs and `take_plan_back` follows, arrange to take 16-bit gradients."""
        if self.captures.graph is not None:
            self.captures.graph.plan((loss,), self.micro_batch(1.0), self._sums, excludes=False)

    def take_plan_back(self) -> None:
        """After that backward, leave those of others alone."""
        if self.captures.graph is not None:
            self.captures.graph.end(failed=False)

    def inspect_part(self, tensors: Sequence[Tensor], micro_batch: MicroBatch) -> None:
        """Warn of Functions behind these tensors whose own gradients would lack what the loss has of the weight."""
        self._weighting.inspect(tensors, micro_batch)

    def backward_part(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], micro_batch: MicroBatch) -> None:
        """Run backward of part of a micro-batch, from gradients with the loss scale and the weight's part in them."""
        self.inspect_part(tensors, micro_batch)
        backward, selects = backward_from(tensors, grads)
        if self.captures.add_early:
            self.run(backward, tensors, micro_batch, selects=selects)
        else:  # sum them in `.grad` as torch does: captures would keep those of every part
            self._shared_loss.run(functools.partial(backward, ()) if selects else backward, micro_batch)

    def run(
        self,
        backward: Callable[..., None],
        roots: Sequence[Tensor],
        micro_batch: MicroBatch,
        *,
        selects: bool = False,
        shared: bool = False,
    ) -> None:
        """Run a backward; some gradients may be added during it.

        Args:
            backward: Runs it.
            roots: The tensors that it begins at.
            micro_batch: The micro-batch, with its loss's factor.
            selects: Whether `backward` takes what the engine has to run, its `inputs`.
            shared: Whether all other accumulators that it reaches know this factor.
        """
        captures = self.captures
        if self.casts is not None:
            self.casts.check()
        if self._window.micro_batches == 0 and captures.add_early:
            with torch.no_grad():
                self.prepare_window()
        failed = True
        try:
            sink: Sink = self._sums
            if micro_batch.last or self._sender.begun:
                # Gradients left in `.grad`, also by an earlier backward of this micro-batch, are added after this one.
                sends = micro_batch.last and captures.buckets.listens and not self.has_gradients
                sink = self._sender.sink(sink, captures, sends)
            inputs: tuple[Any, ...] = ()
            if captures.graph is not None:
                inputs = captures.graph.plan(roots, micro_batch, sink, selects)
            if captures.buckets.listens:
                captures.buckets.begin(micro_batch, sink)
            if selects:
                backward = functools.partial(backward, inputs)
            if micro_batch.loss_weight is None or shared:
                backward()
            else:
                self._shared_loss.run(backward, micro_batch)
            failed = False
        finally:
            for capture in captures:
                capture.end(failed)
            if failed:
                if self._sender.begun or any(capture.broken for capture in captures):
                    self._window.break_()
                self.discard()  # or the next micro-batch would add what this one has left in `.grad`

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left uncounted gradients."""
        return self.is_uncounted() or any(p.grad is not None for b in self._store.buffers for p in b.params)

    def _add_of_loop(self, bucket: Bucket) -> None:
        """Add gradients of the loop's own backward, for which no window was prepared; the weight is 1."""
        self._store.allocate()
        self._sender.check_not_sent(bucket)
        self._sums.add(bucket, MicroBatch(1.0, self.serial + 1))

    @profiled
    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch's gradients, and count it; if that fails, drop those of a backward that `backward` ran."""
        try:
            self._accumulate(micro_batch)
        except BaseException:
            if micro_batch.ran_backward:  # or the next micro-batch would add what this one has left in `.grad`
                self.discard()
            raise

    def _accumulate(self, micro_batch: MicroBatch) -> None:
        window, captures = self._window, self.captures
        if window.micro_batches == 0:
            self.prepare_window()
        if not self._store.buffers:
            raise RuntimeError("accumulate(): no parameter requires a gradient")
        self._scaler.check_not_unscaled(lambda o: any(self._store.place(p) is not None for p in owned((o,))))
        if self._shared_loss.found:
            self._shared_loss.check()

        # Collect: captures keep the gradients until the ops have added them.
        added, buckets = False, []
        for capture in captures:
            added = added or capture.added
        if captures.buckets.listens:
            buckets += captures.buckets.drain()
        buckets += captures.gradients.drain()
        if not (buckets or added) and self._is_nothing(micro_batch):
            return
        if window.unsynced:
            window.check_unsynced(micro_batch)

        # Check the whole micro-batch first if it may be dropped.
        drops = None
        if self._overflow in ("microbatch", "raise"):
            drops = self._sums.find_overflow(captures.gradients.drained, micro_batch)
        dropped = None if drops is None else drops[self._store.device]
        if self._overflow == "raise" and dropped.item() != 0:  # type: ignore[union-attr]
            captures.discard()
            self.serial = micro_batch.tag
            window.drop_unsynced()  # their gradients came with this micro-batch
            raise self._sums.overflow_error(micro_batch, window.micro_batches)

        # Add. The op that adds the last bucket also counts the micro-batch, and unsynced ones whose gradients it holds.
        counted = window.with_unsynced(micro_batch) if window.unsynced else micro_batch
        if not buckets or (window.unsynced and not captures.gradients.drained):
            buckets.append([])
        try:
            for bucket in buckets if self._sender.begun else ():
                self._sender.check_not_sent(bucket)
            for bucket in buckets[:-1]:
                self._sums.add(bucket, micro_batch)
            self._sums.add(buckets[-1], counted, count=True, drops=drops)
            added = True
            window.loss.add(self._scaler.undivided(micro_batch.loss), micro_batch.weight, dropped)
        except BaseException:
            # An op that fails has added none of its gradients, but others may have run.
            if added or self._sums.partial or self._sender.begun:
                window.break_()
            raise
        captures.gradients.forget()
        for capture in captures:
            capture.forget()
        self.serial = micro_batch.tag
        window.count(counted.weight)
        self._counted_by_backward = micro_batch.ran_backward
        if self.casts is not None:
            self.casts.hold()
        if micro_batch.last:
            self._sender.end_last()

    def _is_nothing(self, micro_batch: MicroBatch) -> bool:
        """For a call without gradients: whether there was no micro-batch, or its gradients will come later."""
        if self._ranks.sharded:  # FSDP2 keeps the gradients and will add them to a later micro-batch's
            self._window.add_unsynced(micro_batch)
            self._window.loss.add(self._scaler.undivided(micro_batch.loss), micro_batch.weight, unsynced=True)
            return True
        if not self._warned:
            self._warned = True
            warn_of_nothing(micro_batch.ran_backward, self._window.micro_batches > 0 and self._counted_by_backward)
        if micro_batch.ran_backward:
            return False
        self._window.count_nothing()
        if micro_batch.last:
            self._sender.end_last()
        return True
