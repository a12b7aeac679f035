"""A micro-batch's way into the open window: run backward, collect gradients, add them, count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..boundary import profiled
from ..buffers.store import Store
from ..capture.captures import Bucket, MicroBatch, Sink
from ..capture.choice import Captures
from ..hooks import Hook
from ..ranks.base import Ranks
from ..ranks.weight_unit import backward_may_cross_ranks
from .grad_scaler import LossScaler, scaled_backward
from .loss_weighting import LossWeighting
from .misuse import warn_of_nothing
from .noise_scale import NoiseMeter
from .optimizers import owned
from .shared_loss import SharedLoss
from .state import Window
from .sums import Sums


class MicroBatchRunner:
    """Takes the micro-batches of one accumulator.

    Args:
        module: See `Captures`.
        store: Flat buffers and states.
        ranks: Their sender decides what goes out while a backward runs.
        scaler: Scales losses.
        overflow: As FusedAccumulator's argument.
        noise: Asked for the sums that the noise scale needs.
        **options: Of `Captures`.

    Attributes:
        serial: Micro-batches ever accumulated: what the kernels store in flags.
        captures: What takes gradients.
    """

    def __init__(
        self,
        module: nn.Module | None,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        **options: Any,
    ) -> None:
        self.serial = 0
        self._store = store
        self._ranks = ranks
        self._sender = ranks.sender
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._weighting = LossWeighting()
        self._window = Window()
        self._warned = False  # of a micro-batch without gradients
        self._counted_by_backward = False
        self._crosses_ranks: bool | None = None  # whether backward may, once the open window has had one
        add = Hook(self, MicroBatchRunner._add_of_loop, in_graphs=True)
        options.update(overflow=overflow, scaled=scaler.scaler is not None, sends=ranks.reduces_sums)
        self.captures = Captures(module, store, self, add, **options)
        self._sums = Sums(store, ranks, scaler, overflow, noise)
        self._shared_loss = SharedLoss(store, Hook(self, MicroBatchRunner.is_uncounted))

    # ---- the life of a window

    def open_window(self, window: Window) -> None:
        """Take what comes from now on into `window`."""
        self._window = window
        self._crosses_ranks = None
        if self._shared_loss.found:
            self._shared_loss.forget()
        captures, presence = self.captures, self.captures.presence
        if presence is not None and (route := presence.route) is not None:
            if route.backwards and not route.used:  # a window without a backward says nothing
                presence.take_off(route)
            route.renew(self._noise.on)
        if captures.gradients.stashed:
            captures.gradients.forget()
        for capture in captures:
            capture.forget()
            capture.set_listening(True)

    def listen(self, listening: bool) -> None:
        """Whether what backward makes is taken; else it is left to torch."""
        for capture in self.captures:
            capture.set_listening(listening)

    def prepare_window(self) -> None:
        """At a window's first micro-batch: refuse drift, make room for parameters that were unfrozen."""
        self._store.check_drift()
        self._store.allocate()
        if fresh := self._store.unplaced():
            self._ranks.check_trainable(self._store.named)
            self.captures.listen_to(self._store.grow(fresh))

    def is_ready(self) -> bool:
        """Put back what an interrupted forward has left in modules; False where a backward was interrupted."""
        ready = True
        for capture in self.captures:
            ready = capture.is_ready() and ready
        return ready

    def is_uncounted(self) -> bool:
        """Whether captures have taken gradients that no `accumulate` has counted."""
        for capture in self.captures:
            if capture.added:
                return True
        return bool(self.captures.gradients.stashed)

    def discard(self) -> None:
        """Drop the gradients of the micro-batch that is under way; the window breaks where some were added."""
        self._shared_loss.forget()
        if self.captures.discard():
            self._window.break_()

    def resume(self, serial: int) -> None:
        """Go on from a checkpoint taken after `serial` micro-batches."""
        self.serial = serial

    # ---- a micro-batch

    def micro_batch(self, weight: float | Tensor, last: bool = False, loss: Tensor | None = None) -> MicroBatch:
        """The next micro-batch, of gradients that somebody else's backward makes."""
        return MicroBatch(weight, self.serial + 1, last, loss)

    def backward(self, loss: Tensor, weight: float | Tensor, last: bool, kwargs: dict[str, Any]) -> MicroBatch:
        """Run backward of the weighted, scaled loss; captures have its gradients then, or they are added already."""
        if (isinstance(weight, Tensor) or weight != 1) and self.captures.buckets.added:
            raise RuntimeError(
                f"backward(weight={weight}): an earlier backward of this micro-batch was added with weight 1; call "
                "acc.accumulate() after it, or acc.discard()"
            )
        if self._shared_loss.found:
            self._shared_loss.check()
        micro_batch = MicroBatch(weight, self.serial + 1, last, loss, True)
        if self._crosses_ranks is None:  # torch.distributed takes its time to say so
            self._crosses_ranks = backward_may_cross_ranks()
        if self._crosses_ranks and not self.has_gradients:  # an earlier backward's do not have the weight
            loss, micro_batch = self._weighting.weigh(loss, micro_batch)
        if self._window.unsynced:
            self._window.check_unsynced(micro_batch)
        self.run(scaled_backward(loss, self._scaler.scaler, kwargs), loss, micro_batch)
        return micro_batch

    def weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """The loss to run backward of: with its weight, where backward may cross ranks."""
        return self._weighting.weigh(loss, micro_batch) if backward_may_cross_ranks() else (loss, micro_batch)

    def backward_part(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], micro_batch: MicroBatch) -> None:
        """Run backward of a part of a micro-batch, from gradients that have the loss scale and the weight's part."""
        backward = functools.partial(torch.autograd.backward, tensors, grads)
        if self.captures.add_early:
            self.run(backward, tensors[0], micro_batch)
        else:  # they are summed in `.grad` as in torch: on the autocast route, those of every part would be kept
            self._shared_loss.run(backward, micro_batch)

    def run(self, backward: Callable[[], None], root: Tensor, micro_batch: MicroBatch) -> None:
        """Run a backward whose graph begins at `root`; some gradients may be added while it runs."""
        captures, presence = self.captures, self.captures.presence
        if self._window.micro_batches == 0 and captures.add_early:
            with torch.no_grad():
                self.prepare_window()
        finds_casts = presence is not None and presence.route is None and presence.finds_casts(root)
        failed = True
        try:
            sink: Sink = self._sums
            if micro_batch.last or self._sender.begun:
                # What is left in `.grad`, by an earlier backward of this micro-batch too, is added after this one.
                sends = micro_batch.last and captures.buckets.listens and not self.has_gradients
                sink = self._sender.sink(sink, captures, sends)
            for capture in captures:
                capture.begin(micro_batch, sink)
            if micro_batch.loss_weight is None:
                backward()
            else:
                self._shared_loss.run(backward, micro_batch)
            failed = False
        finally:
            for capture in captures:
                capture.end(failed)
                if failed and (capture.broken or self._sender.begun):
                    self._window.break_()
        if finds_casts and presence is not None:
            presence.put_on(keeps_whole=self._noise.on)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left gradients that were not counted."""
        return self.is_uncounted() or any(p.grad is not None for b in self._store.buffers for p in b.params)

    def _add_of_loop(self, bucket: Bucket) -> None:
        """Add what a backward of the loop's own has made, for which no window was prepared; its weight is 1."""
        self._store.allocate()
        self._sender.check_not_sent(bucket)
        self._sums.add(bucket, MicroBatch(1.0, self.serial + 1))

    @profiled
    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Add what there is of a micro-batch, and count it."""
        window, captures = self._window, self.captures
        if window.micro_batches == 0:
            self.prepare_window()
        if not self._store.buffers:
            raise RuntimeError("accumulate(): no parameter requires a gradient")
        self._scaler.check_not_unscaled(lambda o: any(self._store.place(p) is not None for p in owned((o,))))
        if self._shared_loss.found:
            self._shared_loss.check()

        # Collect: captures keep it until the ops have taken it.
        added, buckets = False, []
        for capture in captures:
            added = added or capture.added
            buckets += capture.drain()
        buckets += captures.gradients.drain()
        if not (buckets or added) and self._is_nothing(micro_batch):
            return
        if window.unsynced:
            window.check_unsynced(micro_batch)

        # Check the whole micro-batch first, where it may be dropped.
        drops = None
        if self._overflow in ("microbatch", "raise"):
            drops = self._sums.find_overflow(captures.gradients.drained, micro_batch)
        dropped = None if drops is None else drops[self._store.device]
        if self._overflow == "raise" and dropped.item() != 0:  # type: ignore[union-attr]
            captures.discard()
            self.serial = micro_batch.tag
            window.drop_unsynced()  # their gradients came with these
            raise self._sums.overflow_error(micro_batch, window.micro_batches)

        # Add. The op that adds the last bucket counts the micro-batch too, and unsynced ones, whose gradients came now.
        counted = window.with_unsynced(micro_batch) if window.unsynced else micro_batch
        if not buckets or (window.unsynced and not captures.gradients.drained):
            buckets.append([])
        try:
            for bucket in buckets if self._sender.begun else ():
                self._sender.check_not_sent(bucket)
            for bucket in buckets[:-1]:
                self._sums.add(bucket, micro_batch)
            self._sums.add(buckets[-1], counted, count=True, drops=drops)
        except BaseException:
            # An op refuses all of its gradients, but others may have run.
            if added or self._sums.partial or self._sender.begun:
                window.break_()
            raise
        window.loss.add(self._scaler.undivided(micro_batch.loss), micro_batch.weight, dropped)
        captures.gradients.forget()
        for capture in captures:
            capture.forget()
        self.serial = micro_batch.tag
        window.count(counted.weight)
        self._counted_by_backward = micro_batch.ran_backward
        if micro_batch.last:
            self._sender.end_last()

    def _is_nothing(self, micro_batch: MicroBatch) -> bool:
        """Where there is no gradient: whether there was no micro-batch, or its gradient is to come with a later one."""
        if self._ranks.sharded:  # FSDP2 keeps the gradient, and will add it to a later one
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
