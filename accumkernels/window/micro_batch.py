"""A micro-batch's way into the open window: run backward, collect gradients, add them, and count the micro-batch."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..arguments import Options
from ..buffers.flat import FlatBuffer
from ..buffers.parameters import move
from ..buffers.store import Store
from ..capture.casts import CastCache
from ..capture.choice import Captures
from ..capture.inbox import Bucket, Captured, MicroBatch, Sink
from ..capture.static_grads import Watches
from ..errors import is_oom_error
from ..hooks import Hook
from ..offload.host import Slots
from ..offload.sink import HostBucket, Offload
from ..ranks.base import PendingUnit, Ranks
from .grad_scaler import LossScaler, backward_from, current_scale, loss_scale, scaled_backward
from .loss_weighting import LossWeighting, SharedLoss, grad_weight
from .misuse import warn_of_nothing
from .optimizers import owned
from .state import Window


class MicroBatchRunner:
    """Runs the micro-batches of one accumulator.

    Args:
        store: Flat buffers and states.
        ranks: Their sender decides which gradients go out while a backward runs.
        scaler: Scales losses.
        options: FusedAccumulator's.
        add: Calls `add_of_loop`.

    Attributes:
        serial: Number of micro-batches ever accumulated, which the kernels store in flags.
        runs: Whether a backward of its own runs.
        captures: Take gradients.
        casts: Autocast's copies of weights, if they are kept for a window.
        offload: Takes gradients to host memory, if the sums are there.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler | None,
        options: Options,
        add: Callable[[Bucket], None],
    ) -> None:
        self.serial = 0
        self.runs = False
        self._store = store
        self._ranks = ranks
        self._sender = ranks.sender
        self._scaler = scaler
        self._overflow = options.overflow
        self._weighting = LossWeighting(ranks.weight_key)
        self._once: set[str] = set()  # what was said, and is not again
        self.offload = None if store.slots is None else Offload(cast(Slots, store.slots), self)
        self.casts = CastCache(store, self) if options.cache_casts else None
        self._options = options
        self._add = add
        self.captures = self._make_captures()
        self._watches = Watches(self)
        self._watches.follow(store.buffers)
        self._sums = Sums(store, ranks, options)
        self._shared_loss = SharedLoss(store, Hook(self, MicroBatchRunner.is_uncounted))

    # ---- the life of a window

    def open_window(self) -> None:
        """Let go of what belonged to the window before."""
        if self.casts is not None:
            self.casts.release()
        if self._shared_loss.found is not None:
            self._shared_loss.forget()
        self.captures.inbox.done()
        self.captures.inbox.set_listening(True)
        if self.captures.graph is not None:
            self.captures.graph.drop_kept()

    def flush(self, window: Window) -> None:
        """Add what captures keep over micro-batches, or what is on its way to the host, before sums are read."""
        if self.offload is not None:
            begin = time.perf_counter()
            try:
                self.offload.wait()
            finally:
                window.note_wait(time.perf_counter() - begin)
                if self.offload.failed:
                    window.break_()
        if self.captures.graph is not None:
            try:
                self.captures.graph.flush()
            except BaseException:
                window.break_()
                raise

    def prepare_window(self) -> None:
        """At a window's first micro-batch, refuse drift and make room for unfrozen parameters."""
        self._store.check_drift()
        self._store.allocate()
        grown: list[FlatBuffer] = []
        if fresh := self._store.unplaced():
            self._ranks.check_trainable(self._store.named)
            grown = self._store.grow(fresh)
        if grown or self.captures.inbox.frozen:
            self.captures.follow(grown)
            self._watches.follow(grown)

    def renew_captures(self) -> None:
        """Make captures anew between windows, after segments have moved: the old ones know the old places."""
        self.captures.remove()
        self.captures = self._make_captures()

    def _make_captures(self) -> Captures:
        return Captures(self._store, self._options, self._add, owner=self)

    def remove_hooks(self) -> None:
        """Take off every hook."""
        self._watches.remove()
        self._shared_loss.remove()
        self.captures.remove()
        if self.casts is not None:
            self.casts.remove()
        if self.offload is not None:
            self.offload.remove()

    def is_uncounted(self) -> bool:
        """Whether captures hold gradients that no `accumulate` has counted."""
        return self.captures.inbox.uncounted

    def discard(self, window: Window) -> None:
        """Drop the gradients of the current micro-batch; this breaks the window if some were added."""
        if self.casts is not None:
            self.casts.release()
        self._shared_loss.forget()
        added = self.captures.inbox.drop()
        if self.offload is not None:
            self.offload.discard()
            added = self.offload.failed
        if added:
            window.break_()

    def resume(self, serial: int) -> None:
        """Resume from a checkpoint taken after `serial` micro-batches."""
        self.serial = serial

    # ---- a micro-batch

    def weigh(self, window: Window, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """Put the weight into the loss if backward may cross ranks."""
        return self._weighting.weigh(loss, micro_batch) if window.crosses_ranks else (loss, micro_batch)

    def backward(self, window: Window, loss: Tensor, micro_batch: MicroBatch, kwargs: dict[str, Any]) -> MicroBatch:
        """Run backward of the weighted, scaled loss; captures then hold its gradients, or have added them already.

        Returns:
            The micro-batch, with the factor of its loss.
        """
        weight = micro_batch.weight
        if (isinstance(weight, Tensor) or weight != 1) and self.captures.inbox.uncounted:
            raise RuntimeError(
                f"backward(weight={weight}): an earlier backward of this micro-batch was added with weight 1; call "
                "acc.accumulate() after it, or acc.discard()"
            )
        if self._shared_loss.found is not None:
            self._shared_loss.check(adds=True)
        micro_batch = micro_batch._replace(loss=loss, ran_backward=True)
        if window.crosses_ranks:
            if not self.has_gradients:
                loss, micro_batch = self._weighting.weigh(loss, micro_batch)
            elif isinstance(weight, Tensor) or weight != 1:  # gradients of an earlier backward lack the weight
                window.weigh_late()
        if window.unsynced:
            window.check_unsynced(micro_batch)
        backward, selects = scaled_backward(loss, self._options.scaler, kwargs)
        self.run(window, backward, (loss,), micro_batch, selects=selects)
        return micro_batch

    def inspect_part(self, tensors: Sequence[Tensor], micro_batch: MicroBatch) -> None:
        """Warn of Functions behind these tensors whose own gradients would lack what the loss has of the weight."""
        self._weighting.inspect(tensors, micro_batch)

    def backward_part(
        self, window: Window, tensors: Sequence[Tensor], grads: Sequence[Tensor], micro_batch: MicroBatch
    ) -> None:
        """Run backward of part of a micro-batch, from gradients with the loss scale and the weight's part in them."""
        self.inspect_part(tensors, micro_batch)
        backward, selects = backward_from(tensors, grads)
        # A squared norm is not the sum of those of the parts.
        whole = micro_batch.squares is not None and self._options.release == "auto" and self.offload is None
        if self.captures.add_early and not whole:
            self.run(window, backward, tensors, micro_batch, selects=selects)
        else:  # sum them in `.grad` as torch does: captures would keep those of every part
            self._shared_loss.run(functools.partial(backward, ()) if selects else backward, micro_batch)

    def run(
        self,
        window: Window,
        backward: Callable[..., None],
        roots: Sequence[Tensor],
        micro_batch: MicroBatch,
        *,
        selects: bool = False,
        shared: bool = False,
        leaves: bool = False,
    ) -> None:
        """Run a backward; some gradients may be added during it.

        Args:
            window: The open window.
            backward: Runs it.
            roots: The tensors that it begins at.
            micro_batch: The micro-batch, with its loss's factor.
            selects: Whether `backward` takes what the engine has to run, its `inputs`.
            shared: Whether all other accumulators that it reaches know this factor.
            leaves: Whether it leaves all gradients in `.grad`, as a loop's own backward does.
        """
        captures = self.captures
        if self.casts is not None:
            self.casts.check()
        if window.micro_batches == 0 and captures.add_early:
            with torch.no_grad():
                self.prepare_window()
        if self.offload is not None:
            if self.offload.failed:
                self.flush(window)  # which raises, and breaks the window
            self.offload.begin(lambda: captures.inbox.sources)
        takes = not leaves and (captures.graph is not None or captures.inbox.listens)
        broken, failed, self.runs = False, True, True
        try:
            sink: Sink = self.offload or self._sums
            if micro_batch.last or window.sent.count:
                # Gradients left in `.grad`, also by an earlier backward of this micro-batch, are added after this one.
                sends = micro_batch.last and captures.inbox.listens and not self.has_gradients
                sink = self._sender.sink(window.sent, sink, captures, sends)
            inputs = captures.begin(roots, micro_batch, sink, selects) if takes else ()
            if selects:
                backward = functools.partial(backward, inputs)
            if shared or len(SharedLoss.alive) == 1:
                backward()
            else:
                self._shared_loss.run(backward, micro_batch)
            failed = False
        finally:
            self.runs = False
            if takes:
                broken = captures.end() and self.offload is None
            if failed:
                if window.sent.count or broken:
                    window.break_()
                self.discard(window)  # or the next micro-batch would add what this one has left in `.grad`

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left uncounted gradients."""
        return self.is_uncounted() or any(p.grad is not None for b in self._store.buffers for p in b.params)

    def add_of_loop(self, window: Window, micro_batch: MicroBatch, bucket: Bucket) -> None:
        """Add gradients of the loop's own backward, for which no window was prepared; the weight is 1."""
        self._store.allocate()
        if self.offload is not None:
            self.offload.add(bucket, micro_batch)
            return
        window.sent.check(bucket)
        self._sums.add(bucket, micro_batch)

    def accumulate(self, window: Window, micro_batch: MicroBatch) -> None:
        """Add a micro-batch's gradients, and count it."""
        inbox = self.captures.inbox
        if window.micro_batches == 0:
            self.prepare_window()
            if self._store.masters is not None:
                self._store.masters.warn_of_edits()
        if not self._store.buffers and not self._is_frozen_stage():
            raise RuntimeError("accumulate(): no parameter requires a gradient")
        if self._scaler is not None:
            self._scaler.check_not_unscaled(lambda o: any(self._store.segment_of(p) is not None for p in owned((o,))))
        if self._shared_loss.found is not None:
            self._shared_loss.check(adds=False)

        # Collect: the inbox keeps the gradients until the ops have added them.
        added, buckets = inbox.added, inbox.drain()
        if not (buckets or added) and not self._is_frozen_stage() and self._is_nothing(window, micro_batch):
            return
        if window.unsynced:
            window.check_unsynced(micro_batch)

        if self.offload is not None:
            self._hand_over(self.offload, window, buckets, micro_batch)
            return

        # Check the whole micro-batch first if it may be dropped.
        drops = None
        if self._overflow in ("microbatch", "raise"):
            drops = self._sums.find_overflow(buckets, micro_batch)
        dropped = None if drops is None else drops[self._store.layout.device]
        if self._overflow == "raise" and dropped.item() != 0:  # type: ignore[union-attr]
            inbox.drop()
            self.serial = micro_batch.tag
            window.drop_unsynced()  # their gradients came with this micro-batch
            raise self._sums.overflow_error(micro_batch, window.micro_batches)

        # Add. The op that adds the last bucket also counts the micro-batch, and unsynced ones whose gradients it holds.
        counted = window.with_unsynced(micro_batch) if window.unsynced else micro_batch
        if not buckets or (window.unsynced and inbox.listens):
            buckets.append([])
        self._sums.partial = added
        try:
            for bucket in buckets if window.sent.count else ():
                window.sent.check(bucket)
            for bucket in buckets[:-1]:
                self._sums.add(bucket, micro_batch)
            self._sums.add(buckets[-1], counted, count=True, drops=drops)
            loss = micro_batch.loss if micro_batch.divided_by is None else micro_batch.undivided
            window.loss.add(loss, micro_batch.weight, dropped)
            self._count(window, micro_batch, counted.weight)
        except BaseException:
            # An op that fails has added none of its gradients, but others may have run.
            if self._sums.partial or window.sent.count:
                window.break_()
            raise

    def _count(self, window: Window, micro_batch: MicroBatch, weight: float | Tensor) -> None:
        self.captures.inbox.done()
        if self._shared_loss.found is not None:
            self._shared_loss.forget()
        self.serial = micro_batch.tag
        window.count(weight, micro_batch.ran_backward)
        if window.squares is not None or window.weighed_after:
            window.note_order(weight)
        if self.casts is not None:
            self.casts.hold()
        if micro_batch.last:
            self._sender.end_last(window.sent)

    def _hand_over(self, offload: Offload, window: Window, buckets: Sequence[Bucket], micro_batch: MicroBatch) -> None:
        """Let the offload's worker check and add a micro-batch, and count it."""
        raises, submitted = self._overflow == "raise", False
        dropped = None  # becomes 1.0 where the micro-batch is dropped
        if raises or self._overflow == "microbatch":
            dropped = torch.zeros(1, dtype=torch.float64, device="cpu")
        try:
            for bucket in buckets:
                offload.add(bucket, micro_batch)
            moved = micro_batch._replace(loss=None, scale=current_scale(self._options.scaler))
            add = functools.partial(self._sums.add_arrived, dropped=dropped, raises=raises)
            submitted = True
            offload.submit(moved, add)
            if raises:
                self.flush(window)
                if dropped:
                    self.captures.inbox.drop()
                    self.serial = micro_batch.tag
                    raise self._sums.overflow_error(micro_batch, window.micro_batches)
            window.loss.add(micro_batch.undivided, micro_batch.weight, dropped)
            self._count(window, micro_batch, micro_batch.weight)
        except FloatingPointError:  # nothing of it is in the sums
            raise
        except BaseException:
            if submitted:  # an interrupt: it may be in the sums, and is not counted
                window.break_()
            self.discard(window)
            raise

    def _is_frozen_stage(self) -> bool:
        """Whether this is a stage of a pipeline that trains nothing, and counts micro-batches as the others do."""
        return self._ranks.has_stages and not any(entry.param.requires_grad for entry in self._store.named)

    def _is_nothing(self, window: Window, micro_batch: MicroBatch) -> bool:
        """For a call without gradients: whether there was no micro-batch, or its gradients will come later."""
        if self._store.sharded:  # FSDP2 keeps the gradients and will add them to a later micro-batch's
            window.add_unsynced(micro_batch)
            window.loss.add(micro_batch.undivided, micro_batch.weight, unsynced=True)
            return True
        if "no gradient" not in self._once:
            self._once.add("no gradient")
            warn_of_nothing(micro_batch.ran_backward, window.micro_batches > 0 and window.counted_by_backward)
        if micro_batch.ran_backward:
            return False
        window.count_nothing()
        if micro_batch.last:
            self._sender.end_last(window.sent)
        return True


# ---- Adds a micro-batch's gradients to the flat buffers, after a check for overflow if required

_NOTHING = Captured([], [])


class Sums(Sink):
    """Runs micro-batches' kernels on every device that has gradients; the sink of backwards that send nothing.

    Args:
        store: The flat buffers and states.
        ranks: Drop a micro-batch together if its gradients are sharded.
        options: FusedAccumulator's; the scaler has the scale that gradients carry.

    Attributes:
        partial: Whether any `add` of the current micro-batch has run an op, or a part of one: an op refuses its own
            gradients before it adds any, but may run out of memory after it has added some.
    """

    def __init__(self, store: Store, ranks: Ranks, options: Options) -> None:
        self._store = store
        self._ranks = ranks
        self._scaler = options.scaler
        self._checks = options.overflow is not None
        self.partial = False

    # ---- as a sink

    def multiplier(self, micro_batch: MicroBatch) -> float | Tensor | None:
        """See `Sink`."""
        if micro_batch.squares is not None or isinstance(micro_batch.unit, PendingUnit):
            return None  # only backward knows what is left of the weight
        weight = micro_batch.weight if micro_batch.loss_weight is None else grad_weight(micro_batch)
        if self._scaler is not None or micro_batch.divided_by is not None:
            weight = _over(weight, loss_scale(self._scaler, micro_batch))
        if isinstance(weight, float) and (weight == 0 or not math.isfinite(weight)):
            return None  # BLAS would not look for an overflow in operands that it multiplies by zero
        return weight

    def add(
        self,
        bucket: Bucket,
        micro_batch: MicroBatch,
        *,
        count: bool = False,
        drops: dict[torch.device, Tensor] | None = None,
    ) -> None:
        """Add gradients, and mark their segments as touched.

        Args:
            bucket: Gradients, by flat buffer; may be empty.
            micro_batch: The micro-batch of the gradients.
            count: Whether to add its weight to the window's; once per micro-batch.
            drops: Per device, fp64 `[1]` that drops the micro-batch if it is not 0.
        """
        plain = micro_batch.loss_weight is None
        weight = micro_batch.weight if plain else grad_weight(micro_batch)
        scaler = self._scaler
        scaled = bucket and (scaler is not None or micro_batch.divided_by is not None)
        first = self._store.buffers[0] if self._store.buffers else None
        if (scaled or first is None) and scaler is not None and scaler._scale is None:
            self._ranks.prepare_scaler(scaler)
        carried = loss_scale(scaler, micro_batch) if scaled else None
        for buffer, (segments, grads) in bucket:
            squares = weighted = None
            if micro_batch.squares is not None:
                squares = micro_batch.squares.at(buffer, segments, micro_batch.tag)
                weighted = squares if plain else torch.zeros_like(squares)
            counts = count and plain and buffer is first
            count = count and not counts
            device = buffer.device
            flags, drop = buffer.flags if self._checks else None, None if drops is None else drops[device]
            weights = (weight, None) if isinstance(weight, float) else (1.0, move(weight, device))
            scale = carried if carried is None or carried.device == device else move(carried, device)
            options = flags, micro_batch.tag, *weights, scale, drop, weighted, counts
            try:
                buffer.accumulate(self._store.states[device], segments, grads, *options)
            except BaseException as error:
                # The reference takes memory as it goes, and can be interrupted.
                self.partial |= not isinstance(error, RuntimeError) or is_oom_error(error)
                raise
            self.partial = True
            if squares is not None and weighted is not None and not plain:
                self._add_squares(squares, weighted, micro_batch)
        if count:  # the first buffer got nothing, or its gradients already hold a part of the weight
            weight, device = micro_batch.weight, self._store.layout.device
            drop = None if drops is None else drops[device]
            weights = (weight, None) if isinstance(weight, float) else (1.0, move(weight, device))
            if first is None:
                self._store.count(micro_batch.tag, weights, drop)
            else:
                flags = first.flags if self._checks else None
                options = flags, micro_batch.tag, *weights, None, drop, None, True
                first.accumulate(self._store.states[device], [], [], *options)
            self.partial = True

    def _add_squares(self, squares: Tensor, weighted: Tensor, micro_batch: MicroBatch) -> None:
        """Add `sum w_i |g_i|^2`, given the squared norm of gradients of a loss times `loss_weight`."""
        factor = micro_batch.loss_weight
        if isinstance(factor, Tensor):
            factor = move(torch.where(factor == 0, 1.0, factor), squares.device)
        weighted[0] /= 1.0 if isinstance(factor, float) and factor == 0 else factor  # type: ignore[arg-type]
        squares += weighted

    def add_arrived(
        self, buckets: Sequence[HostBucket], micro_batch: MicroBatch, *, dropped: Tensor | None, raises: bool
    ) -> None:
        """Check, add and count a micro-batch whose gradients arrive in host memory.

        Args:
            buckets: Its gradients.
            micro_batch: The micro-batch, without scalars on devices.
            dropped: Becomes 1.0 where the micro-batch is dropped; None if it cannot be.
            raises: Whether it is left out altogether then.
        """
        drops = None
        if dropped is not None:
            for bucket in buckets:
                bucket.wait()
            drops = self.find_overflow([bucket.parts for bucket in buckets], micro_batch)
            dropped.copy_(drops[self._store.layout.device])
            if raises and dropped:
                return
        for bucket in buckets:
            bucket.wait()
            self.add(bucket.parts, micro_batch, drops=drops)
            bucket.free()
        self.add([], micro_batch, count=True, drops=drops)

    # ---- the check before anything is added

    def find_overflow(self, buckets: Sequence[Bucket], micro_batch: MicroBatch) -> dict[torch.device, Tensor]:
        """Check a micro-batch on every device before anything is added.

        Returns:
            Per device, fp64 `[1]`: 1.0 if the weight or any gradient on any device (for DTensors, on any rank) is not
            finite.
        """
        weight, tag = micro_batch.weight, micro_batch.tag
        drops = {device: torch.zeros(1, dtype=torch.float64, device=device) for device in self._store.states}
        for found in map(dict, buckets or [()]):
            for buffer in self._store.buffers:  # also those without gradients: their device checks the weight
                segments, grads = found.get(buffer, _NOTHING)
                weight_tensor = move(weight, buffer.device) if isinstance(weight, Tensor) else None
                buffer.check_finite(segments, grads, drops[buffer.device], tag=tag, weight_tensor=weight_tensor)
        bad = self._ranks.worst(list(drops.values()), self._store.layout.device)
        return {device: move(bad, device) for device in drops}

    def overflow_error(self, micro_batch: MicroBatch, number: int) -> FloatingPointError:
        """Make the error for a micro-batch that is not finite, the one after `number` others."""
        last, names = self._store.flagged()
        if last == micro_batch.tag:
            what = f"gradients of {', '.join(names)}"
        else:
            what = self._ranks.unnamed
        return FloatingPointError(f"micro-batch {number} of the window dropped: not finite: {what}")


def _over(weight: float | Tensor, carried: Tensor | None) -> float | Tensor:
    """Compute the weight over the loss scale, as a number if that needs no wait for a device."""
    scale = 1.0 if carried is None else carried.reshape(()).double()
    if isinstance(scale, Tensor) and scale.device.type == "cpu":
        scale = float(scale.tolist())  # type: ignore[arg-type]  # a number; no op that a dispatch mode would see
    if isinstance(scale, float) and scale == 0.0:  # asking a tensor on a device would wait for it
        return math.nan
    return weight / scale
