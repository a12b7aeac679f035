"""A micro-batch's way into the open window: run backward, collect gradients, add them, count."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..boundary import profiled
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..capture.autocast import AutocastRoute
from ..capture.during_backward import DuringBackward
from ..capture.fused.weights import FusedWeights
from ..capture.gradients import Captured, drop, take
from ..ranks.reduction import Reduction
from .adding import Adder
from .fusing import SMALLEST_FUSED, Fusing
from .noise_scale import NoiseMeter
from .optimizers import owned
from .scaling import LossScaler
from .state import Window

_log = logging.getLogger(__name__)


class Intake:
    """Takes micro-batches of one accumulator.

    Args:
        module: Whose forward the autocast route may change; None for no route.
        store: Flat buffers and states.
        scaler: What losses are scaled by.
        overflow: As FusedAccumulator's argument.
        noise: Asked for the sums that the noise scale needs.
        reduction: Is told of segments that are complete before the window ends; None for a process alone.
        bucket_bytes: With `release="backward"`; None for `release="microbatch"`.
        always_route: Whether the autocast route takes gradients of every backward.

    Attributes:
        hooks: With `release="backward"`.
        route: The autocast route, where there is one.
        serial: Micro-batches ever accumulated: what the kernels store in flags.
    """

    def __init__(
        self,
        module: nn.Module | None,
        store: Store,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        reduction: Reduction | None,
        *,
        bucket_bytes: int | None,
        always_route: bool,
        fuse: str | bool,
        whole: nn.Module | None,
    ) -> None:
        self.serial = 0
        self._store = store
        self._scaler = scaler
        self._overflow = overflow
        self._reduction = reduction
        self._adder = Adder(store, overflow, noise)
        self._window = Window()
        self._weight_in_backward: float | Tensor = 1.0
        self._sends_in_backward = False
        self._warned = False
        self.hooks = None if bucket_bytes is None else _listen(self, store, bucket_bytes)
        self.fused: FusedWeights | None = None
        # What is added in backward cannot be taken back: by default, only where that is so of all gradients.
        if whole is not None and (fuse is True or (fuse == "auto" and self.hooks is not None)):
            smallest = 0 if fuse is True else SMALLEST_FUSED
            self.fused = FusedWeights(whole, store, 0 if self.hooks is None else 1, smallest)
        self._fusing = Fusing(scaler, noise, fuse is True)
        self.route = None if module is None else AutocastRoute(module, store, self.hooks, always_route, self.fused)

    # ---- the life of a window

    def open_window(self, window: Window) -> None:
        """Take what comes from now on into `window`."""
        self._window = window
        if self.hooks is not None:
            self.hooks.reset()
        if self.route is not None:
            self.route.open_window()
        if self.fused is not None:
            self.fused.reset()
        self.listen(True)

    def prepare_window(self) -> None:
        """At a window's first micro-batch: refuse drift, make room for parameters that were unfrozen."""
        self._store.check_drift()
        self._store.allocate()
        grown = self._store.grow()
        if self.hooks is not None:
            self.hooks.listen(grown)

    def listen(self, listening: bool) -> None:
        """Whether what backward makes is taken; else it is left to torch."""
        for listener in (self.hooks, self.route):
            if listener is not None:
                listener.listening = listening
        if self.fused is not None:
            self.fused.set_listening(listening)

    def settle(self) -> None:
        """Put back what an interrupted forward has left in modules."""
        for swapper in (self.fused, self.route):
            if swapper is not None:
                swapper.settle()

    @property
    def interrupted(self) -> bool:
        """Whether a backward raised whose gradients are added while it runs."""
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
        if self.hooks is not None:
            self._window.broken |= self.hooks.handed_over or self.hooks.interrupted
            self.hooks.reset()
        if self.fused is not None:
            self._window.broken |= bool(self.fused.taken)
            self.fused.reset()
        if self.route is not None:
            self.route.clear()
        self._store.drop_grads()

    def remove(self) -> None:
        """Take off every hook."""
        for listener in (self.hooks, self.fused, self.route):
            if listener is not None:
                listener.remove()

    # ---- a micro-batch

    def backward(self, loss: Tensor, weight: float | Tensor, last: bool, kwargs: dict[str, Any]) -> None:
        """Run backward of the scaled loss; gradients are then in `.grad`, stashed, or added already."""
        loss = self._scaler.scale(loss)
        if self.fused is not None:
            if self._window.micro_batches == 0:
                with torch.no_grad():
                    self.prepare_window()
            adding = self.fused.adding(self._fusing.permission(weight))
        else:
            adding = contextlib.nullcontext()
        if self.route is not None:
            self.route.taking = True
        try:
            with adding:
                if self.hooks is None:
                    loss.backward(**kwargs)
                else:
                    self._run_backward(self.hooks, loss, weight, last, kwargs)
        except BaseException:
            self._window.broken |= self.fused is not None and bool(self.fused.taken)
            raise
        finally:
            if self.route is not None:
                self.route.taking = False

    def _run_backward(
        self, hooks: DuringBackward, loss: Tensor, weight: float | Tensor, last: bool, kwargs: dict[str, Any]
    ) -> None:
        """A backward whose gradients are added, with their weight, while it runs."""
        if hooks.has_taken and (isinstance(weight, Tensor) or weight != 1):
            raise RuntimeError(
                f"backward(weight={weight}): an earlier backward of this micro-batch was added with weight 1; call "
                "acc.accumulate() after it, or acc.discard()"
            )
        if self._window.micro_batches == 0:
            with torch.no_grad():
                self.prepare_window()
        self._weight_in_backward = weight
        # Of an earlier backward in this micro-batch, gradients may be pending for what this one completes.
        self._sends_in_backward = last and not hooks.has_taken
        try:
            loss.backward(**kwargs)
        except BaseException:
            self._window.broken = True
            raise
        finally:
            self._weight_in_backward = 1.0
            self._sends_in_backward = False

    @profiled
    def accumulate(self, weight: float | Tensor, last: bool) -> None:
        """Add what there is of a micro-batch, and count it."""
        window = self._window
        if window.micro_batches == 0:
            self.prepare_window()
        buffers = self._store.buffers
        if not buffers:
            raise RuntimeError("accumulate(): no parameter requires a gradient")
        self._scaler.check_not_unscaled(self._owns_some)
        stash = {} if self.route is None else self.route.stash
        captured = [take(buffer, stash.get(buffer)) for buffer in buffers]
        has_grads = any(c.grads for c in captured)
        loss_scale = self._scaler.loss_scale() if has_grads else None
        taken_before = self.added_in_backward
        if self._store.shards is not None and not has_grads and not taken_before:
            window.keep(weight)
            return
        window.check_kept(weight)
        if not has_grads and not taken_before and not self._warned:
            self._warned = True
            _log.warning("accumulate() found no gradient; acc.backward() has already accumulated what it computed")
        tag = self.serial + 1
        drops = None
        if self._overflow in ("microbatch", "raise"):
            drops = self._adder.find_overflow(captured, weight, tag)
        if self._overflow == "raise" and drops[self._store.device].item() != 0:  # type: ignore[index]
            self._drop_grads(captured)
            self.serial = tag
            window.kept = 0
            self._raise_overflow()
        if self.hooks is not None:
            self._weight_in_backward = weight
            self.hooks.hand_over()
            self._weight_in_backward = 1.0
        total, scale = window.with_kept(weight, loss_scale)
        self._adder.add(captured, total, scale, tag, drops=drops)
        self._drop_grads(captured)
        self.serial = tag
        window.count(total)
        if self.hooks is not None:
            self.hooks.reset()
        if last and self._reduction is not None:
            self._reduction.send_all()

    def add_bucket(self, bucket: list[tuple[FlatBuffer, Captured]]) -> None:
        """Add what backward has made so far; `accumulate` counts the micro-batch."""
        self._store.allocate()
        parts = dict(bucket)
        if self._reduction is not None:
            for buffer, (segments, _) in bucket:
                late = self._reduction.sent(buffer, segments)
                if late is not None:
                    self._window.broken = True
                    raise RuntimeError(
                        f"{late!r} got a gradient after last=True had sent its sum: in the last micro-batch, a "
                        "parameter may get one only (reentrant checkpointing makes more)"
                    )
        captured = [parts.get(buffer, Captured([], [])) for buffer in self._store.buffers]
        self._adder.add(captured, self._weight_in_backward, self._scaler.loss_scale(), self.serial + 1, count=False)
        if self._sends_in_backward and self._reduction is not None:
            for buffer, (segments, _) in bucket:
                self._reduction.extend(buffer, segments)

    def _raise_overflow(self) -> None:
        last, names = self._store.flagged()
        if last == self.serial:
            what = f"gradients of {', '.join(names)}"
        else:
            what = "the weight" if self._store.shards is None else "the weight, or gradients on another rank"
        raise FloatingPointError(f"micro-batch {self._window.micro_batches} of the window dropped: not finite: {what}")

    def _owns_some(self, optimizer: Optimizer) -> bool:
        return any(self._store.place(p) is not None for p in owned((optimizer,)))

    def _drop_grads(self, captured: list[Captured]) -> None:
        for buffer, taken in zip(self._store.buffers, captured, strict=True):
            drop(buffer, taken)
        if self.route is not None:
            self.route.clear()
        if self.fused is not None:
            self.fused.reset()


def _listen(intake: Intake, store: Store, bucket_bytes: int) -> DuringBackward:
    """Hooks that do not keep the accumulator alive."""
    this = weakref.ref(intake)

    def sink(bucket: list[tuple[FlatBuffer, Captured]]) -> None:
        owner = this()
        if owner is not None:
            owner.add_bucket(bucket)

    hooks = DuringBackward(bucket_bytes, sink)
    hooks.listen(store.buffers)
    return hooks
