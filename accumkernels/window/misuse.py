"""Detects half-swapped loops: raises errors that say what to change, and warns where the loop may be intended."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..buffers.store import Store
from ..errors import wrong_type
from ..hooks import Follower, follow
from ..ranks.base import Ranks
from .grad_scaler import LossScaler
from .leftovers import Leftovers
from .optimizers import owned
from .state import Phase, Window

_log = logging.getLogger(__name__)


class MisuseDetector(Follower):
    """Watches what a loop does beside its calls of one accumulator. It never reads from a device in every window.

    Args:
        store: Holds the parameters.
        ranks: If other ranks take part in a window, only all of them together know whether it is empty.
        scaler: The accumulator's scaler.
        uncounted: Whether captures hold gradients that nobody counted.
    """

    def __init__(self, store: Store, ranks: Ranks, scaler: LossScaler, uncounted: Callable[[], bool]) -> None:
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._uncounted = uncounted
        self._leftovers = Leftovers(store, uncounted)
        self._warned: set[str] = set()
        self._looked_for_scalers = False
        self._looked_for_unscaling = False
        self._own_backwards = 0  # windows that ran a loop's own backward and were stepped without a scaler
        self._drops = 0  # windows that zero_() dropped since the last step that needed none
        self._window = Window()
        self.open_window(self._window)
        follow(self)

    def open_window(self, window: Window) -> None:
        """See a new window, which replaces the last one, ended or dropped."""
        last = self._window
        self._dropped_one = last.phase is Phase.OPEN and last.micro_batches > 0 and not last.dropped
        self._drops += self._dropped_one
        self._window = window
        self._leftovers.open_window()
        self._losses = 0  # losses that acc.backward got
        self._divided_by: float | None = None  # what they were all divided by
        self._clipped = False
        self._stepped: set[int] = set()

    # ---- a loss

    def see_loss(self, loss: object) -> None:
        """Look at the last node of the loss's graph, before its backward.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: a GradScaler has already scaled it.
        """
        if not isinstance(loss, Tensor):
            raise wrong_type("loss", "a tensor", loss)
        node, divided_by = loss.grad_fn, None
        name = None if node is None else node.name()
        if name == "MulBackward0":
            factor = _other(node)
            if factor is not None:
                self._check_not_scaled(factor)
                number = _number(factor)
                divided_by = 1 / number if number else None
        elif name == "DivBackward0":
            divided_by = _number(_other(node))
        if self._scaler.trainer_divides:
            divided_by = None  # the trainer's adapter makes up for it
        if self._losses == 0:
            self._divided_by = divided_by
        elif divided_by != self._divided_by:
            self._divided_by = None
        self._losses += 1
        if (first := self._window.micro_batches == 0) or self._leftovers.found:
            self._leftovers.see_backward(first)

    def _check_not_scaled(self, factor: Tensor) -> None:
        scaler = self._scaler.scaler
        if scaler is not None and _is_scale_of(scaler, factor):
            raise RuntimeError(
                "backward(): this loss was scaled already, and would be scaled twice: pass the plain loss, "
                "acc.backward(loss), not acc.backward(scaler.scale(loss))"
            )
        if self._looked_for_scalers or factor.dim() != 0 or factor.dtype is not torch.float32:
            return
        self._looked_for_scalers = True
        if any(_is_scale_of(other, factor) for other in _scalers()):
            self._looked_for_scalers = False
            raise RuntimeError(
                "backward(): a GradScaler that the accumulator was not built with has scaled this loss: build it with "
                "FusedAccumulator(..., scaler=scaler), and pass the plain loss, acc.backward(loss)"
            )

    # ---- the end of a window

    def see_end(self, caller: str, divisor: object) -> None:
        """Look at a window before it ends.

        Raises:
            RuntimeError: none of its micro-batches had a gradient.
        """
        window = self._window
        calls = window.micro_batches + window.found_nothing
        alone = not (self._ranks.ends_together or self._ranks.judged_together)
        if calls and alone and 1 not in self._store.touched_bytes() and not window.dropped:
            raise RuntimeError(
                f"{caller}: no gradient was found in any of this window's {calls} micro-batches. zero_grad() between "
                "backward and accumulate() throws gradients away; a loss that reaches none of the accumulator's "
                "parameters makes none. acc.zero_() drops the window"
            )
        if self._divided_by is not None and divisor is None:
            self._warn_of_division(self._divided_by)
        if self._drops:
            self._warn_of_drops()
        self._leftovers.see_end()
        if caller == "step()" and window.micro_batches > self._losses and self._scaler.scaler is None:
            self._own_backwards += 1
            if self._own_backwards == 2:  # by now, another model's scaler would have been updated
                self._warn_of_scaler()

    def _warn_of_division(self, by: float) -> None:
        count = self._window.micro_batches
        if count < 2 or self._losses != count or abs(by / count - 1) > 1e-6:
            return
        self._warn(
            "division",
            "each loss of this window was divided by %d, the number of its micro-batches, and acc divides by the sum "
            "of weights once more: pass the plain loss, acc.backward(loss). A loss that is the mean over %d samples of "
            "its own is right as it is",
            count,
            count,
        )

    def _warn_of_drops(self) -> None:
        if self._drops > 1 and (self._dropped_one or self._window.micro_batches == 0):
            self._warn(
                "drops",
                "zero_() has dropped %d windows with micro-batches that no step has used: step() opens the next "
                "window itself; delete zero_() before backward and before step()",
                self._drops,
            )
        if not self._dropped_one:
            self._drops = 0

    def _warn_of_scaler(self) -> None:
        """Look for a GradScaler that has scaled losses but was never updated, because nothing stepped through it."""
        for scaler in _scalers():
            if scaler._per_optimizer_states or scaler.get_scale() != scaler._init_scale:
                continue
            if scaler._growth_tracker is not None and scaler._growth_tracker.item() == 0:
                _log.warning(
                    "a GradScaler has scaled losses, and the accumulator was built without one: where these are its "
                    "losses, gradients stay scaled. Build it with FusedAccumulator(..., scaler=scaler)"
                )
                return

    def _warn(self, what: str, message: str, *values: Any) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(message, *values)

    def see_clip(self) -> None:
        """Note that `acc.clip_grad_norm_` has run."""
        self._clipped = True

    # ---- calls of others

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Refuse a step without gradients, or with gradients other than those that `finalize` made."""
        if self._window.phase is not Phase.FINALIZED:
            if not has_closure:  # a closure has yet to compute the gradients
                self._check_closed(optimizer)
        elif id(optimizer) not in self._stepped and self._window.handed_out:
            self._check_handed_out(optimizer)
            unknown = self._clipped and self._scaler.scaler is None and not self._looked_for_unscaling
            if unknown and self._holds(owned((optimizer,))):  # another accumulator's optimizer may have a scale
                self._check_not_unscaled_late(optimizer)

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check that what a closure computed was finalized."""
        self._stepped.add(id(optimizer))
        if has_closure and self._window.phase is not Phase.FINALIZED and not torch.compiler.is_compiling():
            self._check_closed(optimizer)

    def _check_closed(self, optimizer: Optimizer) -> None:
        count = self._window.micro_batches
        if (count or self._uncounted()) and self._holds(owned((optimizer,))):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside a window: the gradients of {count} micro-batches are in the "
                "accumulator, and this step would not see them. Call acc.step(optimizer) instead, or, in the long "
                "form, acc.finalize(optimizer) before; acc.zero_() drops the window"
            )

    def _check_handed_out(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:  # nearly always the first group has one
            for p in group["params"]:
                if p.grad is not None:
                    return
        if self._holds(owned((optimizer,))):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() finds no .grad of those that finalize() handed out: delete "
                "zero_grad() between finalize() and the step; acc.zero_() comes after it"
            )

    def _check_not_unscaled_late(self, optimizer: Optimizer) -> None:
        """Refuse a scaler that divides what an accumulator without a scaler has clipped.

        The first step shows it, as each does: a fused optimizer has a scale, and the scaler keeps a record of others.
        """
        if getattr(optimizer, "grad_scale", None) is not None or any(
            scaler._per_optimizer_states.get(id(optimizer), {}).get("stage") is OptState.UNSCALED
            for scaler in _scalers()
        ):
            raise RuntimeError(
                "scaler.step(optimizer) unscales gradients after acc.clip_grad_norm_() has clipped them: build the "
                "accumulator with the scaler, FusedAccumulator(..., scaler=scaler)"
            )
        self._looked_for_unscaling = True

    def before_clip(self, params: list[Tensor]) -> None:
        """Refuse torch's clipping if the accumulator holds every gradient."""
        if self._has_uncounted_or_sums() and all(p.grad is None for p in params) and self._holds(params):
            self._refuse_clipping()

    def before_norm(self, grads: list[Tensor]) -> None:
        """Refuse torch's norm of no gradients at all while the accumulator has some."""
        if not grads and self._has_uncounted_or_sums():
            self._refuse_clipping()

    def _has_uncounted_or_sums(self) -> bool:
        """Whether gradients are in the accumulator, where torch does not see them."""
        open_ = self._window.phase is not Phase.FINALIZED
        return open_ and (self._window.micro_batches > 0 or self._uncounted())

    def _refuse_clipping(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_ (or clip_grad_value_, get_total_norm, clip_grads_with_norm_) inside a "
            "window finds no .grad, since the gradients are in the accumulator: delete it and call acc.step(optimizer, "
            "max_norm=...), or clip between acc.finalize(optimizer) and the step"
        )

    def _holds(self, params: list[Tensor]) -> bool:
        """Whether this window has a sum for one of these parameters or masters."""
        if self._uncounted():  # captures hold gradients of parameters that are not touched yet
            return any(self._store.place(p) is not None for p in params)
        touched = {id(t) for _, s in self._store.touched() for t in (s.param, self._store.target(s.param))}
        return any(id(p) in touched for p in params)


def _other(node: Any) -> Tensor | None:
    """Return the factor or divisor of a product's or quotient's first factor, if no gradient goes there."""
    if node.next_functions[1][0] is not None:
        return None
    other = node._saved_other
    return other if type(other) is Tensor else None  # not a FakeTensor


def _number(other: Any) -> float | None:
    """Return its value if the host knows it."""
    if other is None or other.dim() != 0 or other.device.type != "cpu" or other.is_complex():
        return None
    return float(other.tolist())  # not item(): tolist() is no op that a dispatch mode would see


def _is_scale_of(scaler: torch.amp.GradScaler, factor: Tensor) -> bool:
    scale = scaler._scale
    return scale is not None and factor.device == scale.device and factor.data_ptr() == scale.data_ptr()


def _scalers() -> Iterator[torch.amp.GradScaler]:
    """Find all GradScalers that have scaled a loss. Torch keeps no list of them, so do not call this in every step."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.amp.GradScaler) and found.is_enabled() and found._scale is not None:
            yield found


def warn_of_nothing(ran_backward: bool, after_backward: bool) -> None:
    """Warn of a micro-batch without any gradient.

    Args:
        ran_backward: Whether the accumulator ran its backward.
        after_backward: Whether the accumulator ran the previous micro-batch's backward, in the same window.
    """
    if ran_backward:
        _log.warning(
            "backward() found no gradient: the loss reaches none of the accumulator's parameters. It counts as a "
            "micro-batch whose gradient is zero"
        )
    elif after_backward:
        _log.warning(
            "accumulate() found no gradient, and counted nothing: acc.backward() has accumulated what it computed, "
            "and no backward ran since. Delete acc.accumulate()"
        )
    else:
        _log.warning(
            "accumulate() found no gradient, and counted nothing: if a backward ran before it, zero_grad() must "
            "not come between the two; if none did, delete this accumulate()"
        )
