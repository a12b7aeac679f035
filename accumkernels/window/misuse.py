"""Detects half-swapped loops: raises errors that say what to change, and warns where the loop may be intended."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..buffers.parameters import local
from ..buffers.store import Store
from ..devices import is_capturing
from ..errors import logger, wrong_type
from ..hooks import Follower, follow
from ..ranks.base import Ranks, backward_may_cross_ranks
from ..ranks.ddp import first_wrapped
from .grad_scaler import LossScaler
from .loss_items import is_divided_sum, items_at, unequal_items
from .optimizers import owned
from .state import Observed, Phase, Window

_log = logger(__name__)


class MisuseDetector(Follower):
    """Watches what a loop does beside its calls of one accumulator. It never reads from a device in every window.

    Args:
        engine: The accumulator's, held weakly: its window is the one that optimizers and torch's clipping meet.
        store: Holds the parameters.
        ranks: If other ranks take part in a window, only all of them together know whether it is empty.
        scaler: The accumulator's scaler.
        uncounted: Whether captures hold gradients that nobody counted.
        flush: Adds what is counted and on its way to the sums.

    Attributes:
        once: What was said, or looked for, and is not again.
    """

    def __init__(
        self,
        engine: Any,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler | None,
        uncounted: Callable[[], bool],
        flush: Callable[[Window], None],
    ) -> None:
        self._engine = weakref.ref(engine)
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._uncounted = uncounted
        self._flush = flush
        self.once: set[str] = set()
        self._own_backwards = 0  # windows that ran a loop's own backward and were stepped without a scaler
        follow(self)

    # ---- a loss

    def inspect_loss(self, window: Window, loss: object, made: int = 0, caller: Any = None) -> None:
        """Look at the last nodes of the loss's graph, before its backward.

        Args:
            window: That it belongs to.
            loss: The loss.
            made: How many of its last nodes a trainer has made, by divisions or a loss scale that are made up for.
            caller: The frame that has called backward without a weight; None: it gave one.

        Raises:
            TypeError: the loss is no tensor.
            RuntimeError: a GradScaler has already scaled it.
        """
        if not isinstance(loss, Tensor):
            raise wrong_type("loss", "a tensor", loss)
        node, divided_by = last_node(loss, made) if made else loss.grad_fn, None
        if node is not None and node.name() in _FACTORS:
            factor, divided_by = division(node)
            if factor is not None:
                self._check_not_scaled(factor)
        window.observed.divisors.append(divided_by)
        if caller is not None and "unequal items" not in self.once:
            window.observed.items.append(items_at(loss, node, caller))
        if (first := window.micro_batches == 0) or window.observed.leftovers:
            self._inspect_leftovers(window.observed, first)

    def _inspect_leftovers(self, observed: Observed, first: bool) -> None:
        """Look for gradients that another loss left before a window, and that its first backward adds.

        A generator's loss leaves gradients in the discriminator. A stock loop drops them by the zero_grad before the
        next backward, which a swapped loop has deleted. A loop that runs a backward of its own before each acc.backward
        has gradients before the first one too, and means them; but it also has them before the second one.

        Args:
            observed: Of the window.
            first: Whether it is the first backward of its window; an earlier first one may have failed.
        """
        if "leftovers" in self.once:
            return
        grads = [p.grad for buffer in self._store.buffers for p in buffer.params if p.grad is not None]
        uncounted = self._uncounted()
        there = bool(grads) or uncounted
        if first and there is not observed.leftovers:
            observed.note_leftovers(there)
        if not there:
            return
        if not first and uncounted:
            _log.warning(
                "gradients of another loss were added while its backward ran (release='backward'), and count in the "
                "micro-batch of this acc.backward: zero_grad() in between cannot take them back. Ask for what you "
                "need, torch.autograd.grad(loss, inputs), or freeze the parameters meanwhile; if the gradients are "
                "meant, pass the sum of the losses to acc.backward"
            )
        if not first or not (uncounted or any(map(_is_something, grads))):
            self.once.add("leftovers")  # they are meant, or zeros, as zero_grad(set_to_none=False) leaves them

    def _check_not_scaled(self, factor: Tensor) -> None:
        scaler = None if self._scaler is None else self._scaler.scaler
        reads = "scalers" not in self.once
        if scaler is not None and _is_scale_of(scaler, factor, reads):
            raise RuntimeError(
                "backward(): this loss was scaled already, and would be scaled twice: pass the plain loss, "
                "acc.backward(loss), not acc.backward(scaler.scale(loss))"
            )
        if not reads or factor.dim() != 0 or factor.dtype is not torch.float32:
            return
        self.once.add("scalers")
        if any(_is_scale_of(other, factor, reads) for other in _scalers()):
            self.once.remove("scalers")
            raise RuntimeError(
                "backward(): a GradScaler that the accumulator was not built with has scaled this loss: build it with "
                "FusedAccumulator(..., scaler=scaler), and pass the plain loss, acc.backward(loss)"
            )

    # ---- a weight that comes after backward

    def inspect_late_weight(self, synchronised: str | None) -> None:
        """Warn where backward adds up gradients over ranks before their weight is known; asked once.

        Args:
            synchronised: A SyncBatchNorm of the model's.
        """
        if "late weights" in self.once:
            return
        self.once.add("late weights")
        if not backward_may_cross_ranks():
            return
        name, what = synchronised, "is a SyncBatchNorm, whose backward adds up"
        if name is None:  # a module that was built after the accumulator; the constructor refuses one that was there
            name = first_wrapped((entry.name, entry.param) for entry in self._store.named)
            what = "is in a DistributedDataParallel module that is not the accumulator's `params` and averages"
        if name is not None:
            _log.warning(
                "accumulate(weight): %r %s gradients of all ranks in backward, before the weight is known; unequal "
                "weights then give another gradient. Call acc.backward(loss, weight), which puts them into losses",
                name,
                what,
            )

    # ---- the end of a window

    def inspect_end(self, window: Window, caller: str, divisor: object, touched: bytes) -> None:
        """Look at a window before it ends.

        Args:
            window: The window.
            caller: The method's name, for messages.
            divisor: The user's; None: the sum of weights.
            touched: For each segment, 1 if it holds a sum of the window.

        Raises:
            RuntimeError: none of its micro-batches had a gradient.
        """
        observed = window.observed
        calls = window.micro_batches + window.found_nothing
        single = self._ranks.size == 1 and not self._ranks.ends_together
        if calls and single and 1 not in touched and not window.dropped:
            raise RuntimeError(
                f"{caller}: no gradient was found in any of this window's {calls} micro-batches. zero_grad() between "
                "backward and accumulate() throws gradients away, and so does a hook that steps an optimizer in "
                "backward, after each micro-batch: remove it. A loss that reaches none of the accumulator's parameters "
                "makes none. acc.zero_() drops the window (AK19)"
            )
        if divisor is None and observed.divisors and observed.divisors[0] is not None:
            self._warn_of_division(window, observed.divisors[0])
        if divisor is None and len(observed.items) == window.micro_batches > 1 and "unequal items" not in self.once:
            if counts := unequal_items(observed.items, self.once):
                self._warn_of_unequal(counts)
        if observed.drops > 1 and (observed.after_drop or window.micro_batches == 0):
            self._warn(
                "drops",
                "zero_() has dropped %d windows with micro-batches that no step has used: step() opens the next "
                "window itself; delete zero_() before backward and before step()",
                observed.drops,
            )
        if "averages" not in self.once:
            self._warn_of_averages()
        if observed.leftovers:
            self._warn(
                "leftovers",
                "gradients of another loss were there before this window's first acc.backward, which has added them: "
                "keep the parameters out of that loss, module.requires_grad_(False), or drop its gradients by "
                "acc.zero_() before the window. If they are meant, pass the sum of the losses to acc.backward (AK39)",
            )
        if caller == "step()" and window.micro_batches > len(observed.divisors) and self._scaler is None:
            self._own_backwards += 1
            if self._own_backwards == 2:  # by now, another model's scaler would have been updated
                self._warn_of_scaler()

    def _warn_of_division(self, window: Window, by: float) -> None:
        count, divisors = window.micro_batches, window.observed.divisors
        if count < 2 or divisors != [by] * count or abs(by / count - 1) > 1e-6:
            return
        self._warn(
            "division",
            "each loss of this window was divided by %d, the number of its micro-batches, and acc divides by the sum "
            "of weights once more: pass the plain loss, acc.backward(loss), or leave the division to the trainer. A "
            "factor that the loss has by definition, as 0.5 * mse, or as a mean over %d samples, is right (AK38)",
            count,
            count,
        )

    def _warn_of_unequal(self, counts: str) -> None:
        self._warn(
            "unequal items",
            "the losses of this window are means over unequal numbers of items (%s) and count the same, since they got "
            "no weight: the result is not the gradient of all samples at once. Pass the number that each averages, "
            "len(x) or how many labels are not ignored: acc.backward(loss, weight=...), accelerator.backward(loss, "
            "weight=...), Lightning's FusedAccumulation(weight=lambda batch: ...). If they are to count the same, the "
            "weight is 1",
            counts,
        )

    def _warn_of_averages(self) -> None:
        self.once.add("averages")
        if self._ranks.size > 1 or self._ranks.has_stages or not backward_may_cross_ranks():
            return
        # By the end of its first window, a loop has called what it trains. A rank may be alone on a wrapper's .module.
        name = first_wrapped(((entry.name, entry.param) for entry in self._store.named), averages=True)
        if name is not None:
            _log.warning(
                "process_group=False says that this rank trains alone, and %r is in a DistributedDataParallel module "
                "whose forward was called, so that backward averages gradients of all ranks. Buckets are taken before "
                "that, and sums of weights are this rank's: ranks drift apart. Pass that module itself as params; or "
                "call its .module, if the rank is to train alone",
                name,
            )

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
        if what not in self.once:
            self.once.add(what)
            _log.warning(message, *values)

    # ---- calls of others

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Refuse a step without gradients, or with gradients other than those that `finalize` made."""
        engine = self._engine()
        if engine is None:
            return
        window = engine.window
        if window.phase is not Phase.FINALIZED:
            if not has_closure:  # a closure has yet to compute the gradients
                self._check_closed(window, optimizer)
        elif id(optimizer) not in window.observed.stepped and window.exposed:
            self._check_handed_out(window, optimizer)
            scaled = self._scaler is not None and self._scaler.unscales(optimizer)
            if scaled and self._holds(window, owned((optimizer,))):
                raise RuntimeError(
                    f"{type(optimizer).__name__}: scaler.update() came between acc.finalize() and this step, which "
                    "unscales averages that are unscaled already: call scaler.update() once, after all steps. If each "
                    "step updates, as optimizer.step() of Lightning Fabric does, give each optimizer an accumulator, "
                    "and finalize it right before its step"
                )
            unknown = window.clipped and self._scaler is None and "unscaling" not in self.once
            if unknown and self._holds(window, owned((optimizer,))):  # another accumulator's optimizer may have a scale
                self._check_not_unscaled_late(optimizer)

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Check that what a closure computed was finalized."""
        engine = self._engine()
        if engine is None:
            return
        window = engine.window
        window.observed.stepped.add(id(optimizer))
        if has_closure and window.phase is not Phase.FINALIZED and not torch.compiler.is_compiling():
            self._check_closed(window, optimizer)

    def _check_closed(self, window: Window, optimizer: Optimizer) -> None:
        count = window.micro_batches
        if (count or self._uncounted()) and self._holds(window, owned((optimizer,))):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside a window: the gradients of {count} micro-batches are in the "
                "accumulator, and this step would not see them. Call acc.step(optimizer) instead, or, in the long "
                "form, acc.finalize(optimizer) before; acc.zero_() drops the window. In a trainer, "
                "step the optimizer that it has prepared (AK20)"
            )

    def _check_handed_out(self, window: Window, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:  # nearly always the first group has one
            for p in group["params"]:
                if p.grad is not None:
                    return
        if "dropped grads" not in self.once and self._holds(window, owned((optimizer,))):
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
        self.once.add("unscaling")

    def before_clip(self, params: list[Tensor]) -> None:
        """Refuse torch's clipping if the accumulator holds every gradient, or if masters have some."""
        engine = self._engine()
        if engine is None:
            return
        window = engine.window
        if self._has_sums(window) and all(p.grad is None for p in params) and self._holds(window, params):
            self._refuse_clipping()
        if self._store.masters is not None and window.exposed:
            masters = (self._store.target(p) for p in params if p.grad is None)
            if any(master.grad is not None for master in masters):
                raise RuntimeError(
                    "torch.nn.utils.clip_grad_norm_ (or clip_grad_value_, clip_grads_with_norm_) finds no .grad: after "
                    "finalize(), those of 16-bit and offloaded parameters are on their fp32 masters. Pass "
                    "acc.parameters() in place of model.parameters()"
                )

    def before_norm(self, grads: list[Tensor]) -> None:
        """Refuse torch's norm of no gradients at all while the accumulator has some."""
        engine = self._engine()
        if not grads and engine is not None and self._has_sums(engine.window):
            self._refuse_clipping()

    def _has_sums(self, window: Window) -> bool:
        """Whether gradients are in the accumulator, counted or not, where torch does not see them."""
        return window.phase is not Phase.FINALIZED and (window.micro_batches > 0 or self._uncounted())

    def _refuse_clipping(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_ (or clip_grad_value_, get_total_norm, clip_grads_with_norm_) inside a "
            "window finds no .grad, since the gradients are in the accumulator: delete it and call acc.step(optimizer, "
            "max_norm=...), or clip between acc.finalize(optimizer) and the step. In a trainer, clip by its "
            "own means: accelerator.clip_grad_norm_(), self.clip_gradients() (AK21)"
        )

    def _holds(self, window: Window, params: list[Tensor]) -> bool:
        """Whether the window has a sum for one of these parameters or masters."""
        if self._uncounted():  # captures hold gradients of parameters that are not touched yet
            return any(self._store.segment_of(p) is not None for p in params)
        if window.phase is not Phase.FINALIZED:
            self._flush(window)
        touched = {id(t) for _, s in self._store.touched() for t in (s.param, self._store.target(s.param))}
        return any(id(p) in touched for p in params)


def last_node(loss: Tensor, made: int) -> Any:
    """The last node of a loss's graph but for those that a trainer has made; None where these are not found."""
    node = loss.grad_fn
    for _ in range(made):
        node = node.next_functions[0][0] if node is not None and node.name() in _FACTORS else None
    return node


def division(node: Any) -> tuple[Tensor | None, float | None]:
    """Return the factor that the last node of a loss's graph is, and what it divides by, None where not known.

    Args:
        node: Before backward, which frees what it has saved.
    """
    name = None if node is None else node.name()
    factor = None
    if name == "DivBackward0":
        by = None if is_divided_sum(node) else _number(_other(node))
    else:
        factor = _other(node) if name == "MulBackward0" else None
        number = _number(factor)
        by = 1 / number if number else None
    # (a + b) / 2 is a mean of its own.
    is_mean = by is not None and by > 1.5 and abs(by / _summands(node) - 1) < 1e-6
    return factor, None if is_mean else by


_FACTORS = ("MulBackward0", "DivBackward0")


def _summands(node: Any) -> int:
    """How many losses were added up in what a product or quotient takes."""
    stack, count = [node.next_functions[0][0]], 0
    while stack and count < 100:
        term = stack.pop()
        if term is not None and term.name() == "AddBackward0":
            stack += [inner for inner, _ in term.next_functions if inner is not None]
        else:
            count += 1
    return count


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


def _is_scale_of(scaler: torch.amp.GradScaler, factor: Tensor, reads: bool) -> bool:
    """Whether a factor is the scale, or (if the host may wait for it) a copy of one that lives on the host."""
    scale = scaler._scale
    if scale is not None and scale.is_cpu and not factor.is_cpu:  # see LossScaler.keep_on_host
        return reads and factor.dim() == 0 and factor.dtype == scale.dtype and factor.item() == scale.item()
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
            "backward() found no gradient: the loss reaches none of the accumulator's parameters, or a hook took what "
            "it found, as one does that steps an optimizer. It counts as a micro-batch whose gradient is zero"
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


def _is_something(grad: torch.Tensor) -> bool:
    """Whether a gradient is not all zeros, as far as the host may ask."""
    if grad.layout is not torch.strided or is_capturing(grad.device):
        return True
    return bool(local(grad).any())


# ---- Notices loops in which no window ends: half-swapped ones, which train nothing and would say nothing

FEW = 10  # micro-batches of a loop that was meant to train
MANY = 1000  # micro-batches of a window that few mean; and LONGER times those of the longest window before
LONGER = 10

_never_ended: set[Patience] = set()  # accumulators with at least FEW micro-batches and no end
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_ended.clear)  # a fork has copies, whose windows its parent may end


class Patience:
    """How long the windows of one accumulator may become before something is said.

    A long window may be meant, so this only warns, once while it is open, and once when the process ends, if it ends
    without an exception. An accumulator that is gone counts, too, since a loop in a function is over by then; not if
    another one ends a window later: then it was a probe, and the program trains.

    Args:
        owner: The accumulator, held weakly.

    Attributes:
        limit: The number of micro-batches at which the open window calls `record`.
        longest: How many the longest window had that ended; only a longer one calls `end`.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._once: set[str] = set()  # what was said, or need not be
        self.limit = FEW
        self.longest = 0

    def record(self, count: int) -> None:
        """Look at an open window that has reached the limit with `count` micro-batches."""
        if self.longest == 0 and "never ended" not in self._once:
            _never_ended.add(self)
        if count < MANY:
            self.limit = MANY
            return
        self.limit = sys.maxsize
        if "long" not in self._once:
            self._once.add("long")
            before = f"the longest before had {self.longest}" if self.longest else "none has ended yet"
            _log.warning(
                "this window has %d micro-batches, and %s: nothing is trained until acc.step(optimizer), or "
                "acc.finalize(optimizer) and the optimizer's own step, ends it. A window that is meant to be that long "
                "is right as it is (AK12)",
                count,
                before,
            )

    def end(self, count: int, used: bool) -> None:
        """See a window of `count` micro-batches end, or be dropped if it was not `used`."""
        if used:
            _never_ended.discard(self)
            _never_ended.difference_update([other for other in _never_ended if other.is_freed()])
            self.longest = count
        if self.longest or self in _never_ended:
            self.limit = max(MANY, LONGER * self.longest)
        else:
            self.limit -= count  # before the first window that ends, those that were dropped count together

    def silence(self) -> None:
        """Say nothing when the process ends: the sums were read, saved or loaded, or are not wanted any more."""
        self._once.add("never ended")
        _never_ended.discard(self)

    def is_freed(self) -> bool:
        """Whether its accumulator is."""
        return self._owner() is None


@atexit.register
def _warn_at_exit() -> None:
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    if not failed and _never_ended:
        _log.warning(
            "the process ends, and no window of a FusedAccumulator with %d micro-batches or more has ever ended: what "
            "it accumulated has trained nothing. End each window by acc.step(optimizer), or acc.finalize(optimizer), "
            "the optimizer's own step and acc.zero_()",
            FEW,
        )
