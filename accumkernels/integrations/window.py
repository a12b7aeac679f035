"""What the adapters share: a window driven by a trainer that divides its losses and decides when to step."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import Split, as_scalar
from ..batch_statistics import check_independent
from ..buffers.flat import FlatBuffer, Segment
from ..buffers.parameters import local, shaped_like
from ..capture.inbox import MicroBatch
from ..errors import expect, logger
from ..splitting.run import BatchReport
from ..window.coupled import CoupledLoss
from ..window.loss_items import Items, items_at
from ..window.misuse import division, last_node
from ..window.optimizers import check_optimizer, may_call_closure, needs_closure
from .optimizer_accumulator import OptimizerAccumulator

_log = logger(__name__)


@dataclass
class WindowNotes:
    """What the trainer and its loop have done with one window.

    Attributes:
        stepped: Whether the optimizer was stepped with it.
        left: After the step, its `.grad`s and their versions.
        dropped: Whether `zero_grad` came before.
        overrun: Whether a backward has reached its parameters since it ended.
        running: The micro-batch whose backward `run_for_all` has started, until it is counted or dropped.
        divided_by: What the loop has divided its loss by; None where that is not known.
        items: What its loss averages, if it came without a weight.
        backwards: How many the trainer's current micro-batch has had.
        promised: The norm to clip to in the step, and where the norm before clipping goes.
    """

    stepped: bool = False
    left: list[tuple[weakref.ref[Tensor], int] | None] = field(default_factory=list)
    dropped: bool = False
    overrun: bool = False
    running: MicroBatch | None = None
    divided_by: float | None = None
    items: Sequence[Items | None] = ()
    backwards: int = 0
    promised: tuple[float | Tensor, Tensor] | None = None


class TrainerWindow:
    """The windows of one optimizer, driven by a trainer. A trainer has one of these for each of its optimizers.

    A trainer divides each loss by a number of steps before it scales it. We keep this division, so that 16-bit
    intermediates, overflows and the loss scale are the same as in the trainer's own accumulation, and undo it in the
    pass that adds the gradients. So the gradient of a window is `sum_i w_i g_i / sum_i w_i` of the undivided losses,
    over the micro-batches of all ranks. Losses that are added up as they are (`sums`) are averaged over ranks, as in
    DistributedDataParallel, and not divided otherwise.

    Args:
        modules: The modules with parameters that the optimizer steps, wrapped in DistributedDataParallel or sharded by
            FSDP2 if there are several ranks.
        optimizer: With `master_weights=True` it gets the masters in place of 16-bit parameters, and keeps its state. A
            parameter that is added to it later is accumulated from the next window on.
        scaler: The trainer's GradScaler.
        exclusive: Whether no other optimizer steps parameters of the modules.
        closures: Whether the trainer gives its optimizers a closure in each step, as an optimizer may expect.
        **options: Of FusedAccumulator.

    Attributes:
        made_up_for: What the next micro-batch's loss was divided by, and its gradients are multiplied by; None: 1.
        divisions: How many of the last nodes of its graph are such divisions, or the loss scale.
        ends: Whether it is the window's last on this rank; other ranks may end theirs differently.
        sends: Whether sums can be sent to other ranks while its backward runs.
        sums: Whether losses are added up as they are; the same for all micro-batches of a window.
        current: Made anew, before a forward, when the optimizer has got other parameters, and for another scaler.
        accumulator: The same for good.
        engine: The accumulator's.
        requires_closure: Whether the optimizer cannot step without a closure.
        takes_closure: Whether it may call one that it is given.
        gets_closure: Whether a step gives it one.
        folds: Whether no code looks at `.grad` before the step or after it.
        splits_differ: Whether a loss function runs that other ranks may call another number of times.
        inside: Whether the trainer has said that a micro-batch of its loop begins, and not yet that it ends.
        number: The number of the window in which it began.
        expected_end: The number of the window that the trainer's last micro-batch was to end; None inside a window.
        all_windows: Those of all optimizers, held weakly, in one order on all ranks, if a backward may end it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        exclusive: bool = True,
        closures: bool = False,
        **options: Any,
    ) -> None:
        check_optimizer_once(optimizer)
        self.modules = list(modules)
        self.optimizer = optimizer
        self.made_up_for: float | Tensor | None = None
        self.divisions = 0
        self.ends = self.sends = False
        self.sums = False
        self.splits_differ = False
        self._scaler = _enabled(scaler)
        self.requires_closure, self.takes_closure = needs_closure(optimizer), may_call_closure(optimizer)
        self.gets_closure = self.requires_closure or (closures and self.takes_closure)
        self.exclusive = exclusive
        self.inside = False
        self.folds = False
        # Sums that are `.grad`s now: whose, and the `.grad` of which tensor, of which version.
        self._shown: list[tuple[FlatBuffer, Segment, Tensor, Tensor, int]] = []
        self._idle = False
        self.number = 0
        self.expected_end: int | None = None
        self.all_windows: Sequence[weakref.ref[TrainerWindow]] = ()
        self._accumulate = functools.partial(
            OptimizerAccumulator, self.modules, optimizer, exclusive=exclusive, make_notes=WindowNotes, **options
        )
        self.current = self._accumulate(scaler=self._scaler, masters={})
        self.accumulator, self.engine = self.current.accumulator, self.current.engine

    # ---- the accumulator

    def release(self) -> None:
        """Restore the model and the optimizer, keeping what was trained."""
        self._drop()
        self.current.remove()

    def _drop(self) -> None:
        if self.engine.window.sent.count and not self.finalized:  # after an exception: no rank sums the rest
            if self.engine.scaler is not None:
                self.engine.scaler.withdraw()
            self.engine.store.drop_grads()
        else:
            self.close()

    def _renew(self) -> None:
        """Accumulate anew, with the same masters, in the same accumulator: the loop may have registered it."""
        self._drop()
        self.current = self._accumulate(scaler=self._scaler, masters=self.current.remove())
        self.current.engine.succeed(self.engine)
        vars(self.accumulator).update(vars(self.current.accumulator))
        self.current.accumulator, self.engine = self.accumulator, self.current.engine

    def scales_by(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Whether losses are scaled by this one."""
        return self._scaler is _enabled(scaler)

    def scale_by(self, scaler: torch.amp.GradScaler | None) -> None:
        """Scale losses by another one, between windows."""
        self._scaler = _enabled(scaler)
        self._renew()

    @property
    def inside_no_sync(self) -> bool:
        """Whether the loop is inside `no_sync` of a DistributedDataParallel module."""
        for no_sync in self.current.no_syncs:
            if no_sync.depth > 0:
                return True
        return False

    @property
    def several_ranks(self) -> bool:
        """Whether other ranks may have micro-batches in this window."""
        return self.engine.ranks.ends_together

    @property
    def evaluates(self) -> bool:
        """Whether the optimizer gets a closure that it may evaluate at weights that it has moved: the model's."""
        store = self.engine.store
        plain = self.gets_closure and self._scaler is None
        return plain and all(store.target(entry.param) is entry.param for entry in store.named)

    # Of the open window, or the one that was finalized. The user's own `zero_()` opens one, too. No frame, as below.
    notes = property(attrgetter("engine.window.notes"))
    # Whether `.grad` holds the averaged gradient, as also after a step that has raised. Asked often: it has no frame.
    finalized = property(attrgetter("engine.window.phase.is_finalized"))

    @property
    def spent(self) -> bool:
        """Whether it has ended, and its gradients were stepped or dropped."""
        if not self.finalized or self.notes.stepped or self.notes.dropped:
            return self.finalized
        return all(p.grad is None for p in self.accumulator.parameters())  # by way of the model

    def share(self, given: Set[int]) -> tuple[bool, bool]:
        """Whether any parameter is among those of these ids, and whether all are but frozen ones."""
        some, whole = False, True
        for entry in self.engine.store.named:
            if id(entry.param) in given:
                some = True
            elif entry.param.requires_grad:
                whole = False
        return some, whole

    def enter(self, waits: bool) -> None:
        """Before the trainer's next micro-batch begins, open the next window if the last one has ended.

        Args:
            waits: Whether a window that has ended and was not stepped is left as it is.

        Raises:
            RuntimeError: As `open` and `check_not_local`.
        """
        if self.expected_end == self.engine.window.number and not self.finalized:
            self._miss_end()
        if self.engine.ranks.ends_together:
            self.check_not_local()
        if not (waits and self.finalized and not self.spent):
            self.open()
        self.notes.backwards, self.inside, self.number = 0, True, self.engine.window.number

    def _miss_end(self) -> None:
        """Tell other ranks of a window that this rank has not ended.

        They may wait at its end, and would take the end of the next window for it.
        """
        self.engine.window.miss_end()
        if self.accumulator.micro_batches and self.several_ranks and "missed end" not in self.engine.misuse.once:
            self.engine.misuse.once.add("missed end")
            _log.warning(
                "the last micro-batch of a window came without optimizer.step() on this rank, so its micro-batches go "
                "to the next window. If other ranks have stepped, all stop there with an error: a rank that leaves a "
                "micro-batch out steps all the same"
            )

    def check_not_local(self) -> None:
        """Refuse windows that ranks would step by themselves.

        Raises:
            RuntimeError: the loop is inside `no_sync`, though no micro-batch begins there.
        """
        if self.inside_no_sync and self.several_ranks:
            raise RuntimeError(
                "a step inside no_sync(), as in accelerate's LocalSGD: each rank would step by its own gradients, but "
                "FusedAccumulator adds up a window over all ranks. Use LocalSGD with accelerate's own Accelerator, or "
                "leave it out, LocalSGD(..., enabled=False): a window communicates once, however many micro-batches "
                "it has"
            )

    # ---- micro-batches

    def open(self) -> None:
        """Before a forward or a backward, open the next window if the last one has ended.

        Raises:
            RuntimeError: the last one was neither stepped nor dropped.
        """
        if self.notes.stepped:
            self._open_for_own()
        if self.finalized:
            if not self.spent:
                raise RuntimeError(
                    "backward after the last one of its window: step the optimizer before, or drop the window with "
                    "optimizer.zero_grad(). A micro-batch has one backward: add up its losses, and let the trainer "
                    "count micro-batches (accelerate: `with accelerator.accumulate(model)`, or no_sync around all but "
                    "the last backward of a window)"
                )
            self.close()
        if self.engine.window.micro_batches == 0 and not self._shown and self.current.outgrown:
            self._renew()

    def begin(self, divided_by: float | Tensor, divisions: int, *, sums: bool = False, ends: bool = False) -> None:
        """Before a backward, set the factor of its gradients.

        Args:
            divided_by: What the trainer divides its loss by.
            divisions: See the attribute, as the following.
            sums: Whether losses are added up.
            ends: Whether it ends the window.

        Raises:
            RuntimeError: The window is broken or loaded as averaged, or has micro-batches of the other kind.
        """
        if self._shown:
            self.take_back()
        self.engine.check_open("backward()")
        if self.engine.window.micro_batches == 0:
            self.sums = sums
        elif self.sums != sums:
            raise RuntimeError(
                "a backward with a weight and one without in one window, outside of accelerator.accumulate(): give "
                "all of them a weight, or none"
            )
        self.notes.running = None
        plain = sums or (not isinstance(divided_by, Tensor) and divided_by == 1)
        self.made_up_for, self.divisions, self.ends = None if plain else divided_by, divisions, ends
        self.sends = ends and self.current.sends_in_backward

    def backward(
        self, loss: Tensor, weight: float | Tensor | None, divide_by: float, caller: Any, **kwargs: Any
    ) -> None:
        """Run and count a micro-batch, after `open` and `begin`.

        Args:
            loss: The trainer's.
            weight: What it counts; None: 1.
            divide_by: What the trainer divides the loss by, and has not yet.
            caller: See `MisuseDetector.inspect_loss`.
            **kwargs: Of `Tensor.backward`.
        """
        engine = self.engine
        engine.misuse.inspect_loss(engine.window, loss, self.divisions, caller)
        engine.backward(loss / divide_by, self._next(weight, self.sends), **kwargs)

    def backward_coupled(
        self,
        chunks: Iterable[Any],
        encode: Callable[[Any], Any],
        loss_fn: Callable[..., Tensor],
        weight: float | Tensor | None,
    ) -> None:
        """`backward` for a loss over chunks, which `loss_fn` has divided."""
        engine = self.engine
        check_independent(engine.module)
        coupled, micro_batch = CoupledLoss(chunks, encode, loss_fn), self._next(weight, self.sends)
        engine.backward_coupled(coupled, micro_batch, self.divisions + 1)

    def backward_batch(
        self, batch: Any, loss_fn: Callable[[Any], Any], together: bool = False, /, **options: Any
    ) -> BatchReport:
        """`FusedAccumulator.backward_batch`, after `open` and `begin`. Losses that are sums are added up over parts.

        Args:
            batch: The batch.
            loss_fn: Returns the loss of a part, divided as `begin` says; or a tuple of that and its weight (and more).
            together: Whether ranks are to split into equally many parts, if one module has all parameters.
            **options: Of `FusedAccumulator.backward_batch`.
        """
        if self.sums:
            options["weight"] = lambda part: 1.0
        together = together and self.engine.module is not None
        self.splits_differ = self.several_ranks and not (self.engine.store.sharded or together)
        try:
            return self.engine.backward_batch(
                batch,
                loss_fn,
                Split(**options),
                divided_by=self.made_up_for,
                last=self.sends,
                splits_together=together,
            )
        finally:
            self.splits_differ = False

    def _next(self, weight: float | Tensor | None, last: bool) -> MicroBatch:
        if weight is None or self.sums:
            weight = 1.0
        else:
            weight = as_scalar(weight, "weight", self.engine.store.layout.device)
        return self.engine.micro_batch(weight, last=last, divided_by=self.made_up_for)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, scaled if there is a GradScaler."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def note_loss(self, loss: Tensor, caller: Any) -> None:
        """Note what is known of a loss before a backward that the engine does not run; see `inspect_loss`."""
        node, notes = last_node(loss, self.divisions), self.notes
        _, notes.divided_by = division(node)
        notes.items = () if caller is None else (items_at(loss, node, caller),)

    def weigh(self, loss: Tensor, weight: float | Tensor | None, last: bool = False) -> tuple[Tensor, MicroBatch]:
        """The loss to run backward of, weighted if backward may cross ranks; and the micro-batch."""
        return self.engine.runner.weigh(self.engine.window, loss, self._next(weight, last))

    def take(self, loss: Tensor | None) -> None:
        """Count the current micro-batch; `loss` is its unscaled loss."""
        micro_batch = self.notes.running or self.engine.micro_batch(1.0, divided_by=self.made_up_for)
        self.notes.running = None
        with torch.no_grad():
            self.engine.accumulate(micro_batch._replace(loss=loss))
        observed = self.engine.window.observed
        observed.divisors.append(self.notes.divided_by)
        observed.items += self.notes.items
        self.notes.divided_by, self.notes.items = None, ()

    @property
    def reached(self) -> bool:
        """Whether a backward has left gradients that were not counted."""
        for entry in self.engine.store.named:
            if entry.param.grad is not None:
                return True
        return self.engine.runner.captures.inbox.uncounted

    # ---- sums shown as `.grad` inside a window, as autograd leaves gradients, and taken back with the loop's changes:
    # ---- on one rank, and only if they are not divided, as in stock torch

    def show(self) -> None:
        """Let `.grad` be the sum so far."""
        for buffer, segment in self.engine.store.touched():
            view = buffer.expose().views[segment.index]
            target = self.engine.store.target(segment.param)
            grad = view if view.dtype == target.dtype else view.to(target.dtype)
            target.grad = shaped_like(grad, target) if buffer.sharded else grad
            self._shown.append((buffer, segment, target, grad, grad._version))

    @torch.no_grad()
    def take_back(self) -> None:
        """Take `.grad` back as the loop left it: changed, replaced, or None; if all are None, drop the window."""
        shown, self._shown = self._shown, []
        if all(target.grad is None for _, _, target, _, _ in shown):
            self.close()
            return
        for buffer, segment, target, grad, version in shown:
            if target.grad is None:
                buffer.touch(segment.index, False)
                continue
            found, view = local(target.grad), buffer.views[segment.index]
            replaced = found is not grad and found is not view
            if replaced or (grad.dtype != view.dtype and grad._version != version):
                view.copy_(found)
            target.grad = None

    # ---- the end of a window

    def finalize(self, *, together: bool = True) -> None:
        """Average and set `.grad`, unless that is done or nothing was accumulated.

        Args:
            together: Whether to ask first which windows other ranks end now.

        Raises:
            RuntimeError: It has ended, and a backward has reached its parameters since.
        """
        if self.notes.stepped:
            self._open_for_own()
        if self.notes.overrun and not self.spent:
            raise RuntimeError(
                "a loss has reached parameters of an optimizer whose window had ended, and neither was stepped or "
                "cleared: call optimizer.zero_grad() before its own losses, or keep its parameters out of others' "
                "(requires_grad_(False), detach(), Lightning's toggle_optimizer). Losses of one step, such as a "
                "discriminator's two, are added up for one backward (or accelerate's no_sync is put around all but the "
                "last)"
            )
        if self.finalized:
            return
        if together and len(self.all_windows) > 1 and self.several_ranks:
            for window in self._ended_now():
                window.finalize(together=False)
            return
        self._take_uncounted()
        if self.engine.window.micro_batches == 0 and not self.several_ranks:
            self.engine.check_open("the end of a window", adds=False)  # a first backward may have raised
            return
        self.accumulator.finalize(self.optimizer, divisor=self._divisor() if self.sums else None)

    def _ended_now(self) -> list[TrainerWindow]:
        """This window, and those of `all_windows` that other ranks end now; collective.

        A last backward may reach other optimizers on other ranks: each rank would wait in another window's end, or take
        its sums for those of another.
        """
        windows = [window for ref in self.all_windows if (window := ref()) is not None]
        first = windows[0].engine
        found = first.ranks.largest([int(window is self) for window in windows], first.store.layout.device)
        return [window for window, ends in zip(windows, found, strict=True) if ends and not window.finalized]

    def _open_for_own(self) -> None:
        """Open the next window if a backward of the loop's own, which opens none, has left gradients since the step."""
        grads = [(entry.param, entry.param.grad) for entry in self.engine.store.named]
        for (_, grad), left in zip(grads, self.notes.left, strict=True):
            if grad is not None and (left is None or left[0]() is not grad or left[1] != grad._version):
                self.close()
                for p, own in grads:
                    p.grad = own
                return

    def _take_uncounted(self) -> None:
        """Before the end, take what the loop made of `.grad`, and gradients of backwards that the trainer did not see.

        If the window's last micro-batch was marked as the last, there are no such gradients.
        """
        if self._shown:
            self.take_back()
        self.notes.running = None
        if self.reached:  # `loss.backward()` in place of the trainer's: as in stock, its gradients count once
            if self.engine.window.micro_batches and not self.sums and "own backward" not in self.engine.misuse.once:
                self.engine.misuse.once.add("own backward")
                _log.warning(
                    "a backward that the trainer has not run has left gradients at the end of a window: they count as "
                    "one more micro-batch of weight 1. Add that loss to the trainer's, which is divided and weighted"
                )
            with torch.no_grad():
                self.engine.accumulate(self.engine.micro_batch(1.0))
        if self.current.sends_in_backward and self.accumulator.micro_batches:
            self.engine.ranks.sender.end_last(self.engine.window.sent)

    def _divisor(self) -> float | None:
        """The sum of weights of all ranks; for sums the number of ranks, unless FSDP2 has divided by it."""
        if not self.sums:
            return None
        return 1.0 if self.engine.store.sharded else float(self.engine.ranks.size)

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradient of all parameters; returns its norm before clipping."""
        if self.notes.stepped or self.notes.overrun or not self.finalized:
            self.finalize()
        if not self.finalized:
            return torch.zeros(())
        return self.accumulator.clip_grad_norm_(max_norm, norm_type)

    def clip_in_step(self, max_norm: float | Tensor) -> Tensor:
        """Clip in `step`, which fills in the norm returned here; no code looks at `.grad` before."""
        store = self.engine.store
        norm = torch.zeros((), dtype=store.layout.result_dtype, device=store.layout.device)
        self.notes.promised = max_norm, norm
        return norm

    def step(self, result: Any, *, again: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step the optimizer and update the scale, as GradScaler does; a window with an overflow is skipped.

        `.grad` stays until the next window, as after any optimizer's step. Where it `folds`, the optimizer's own pass
        averages and clips if it can, and `.grad` is None afterwards. The norm of `clip_in_step` gets its value.

        Args:
            result: A closure's result; an optimizer that needs a closure gets one that returns it.
            again: See `once`.
            **kwargs: Of the optimizer's `step`.
        """
        if self.engine.ranks.ends_together:
            self.check_not_local()
        notes = self.notes
        max_norm, norm = notes.promised or (None, None)
        found = self._step(result, max_norm, again, kwargs)
        notes.promised = None  # kept if it raises: the next step clips, too
        if norm is not None and found is not None:
            norm.copy_(found)

    def _step(
        self, result: Any, max_norm: float | Tensor | None, again: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Step, and return the norm before clipping, with `max_norm`."""
        if self.notes.stepped:
            self._open_for_own()
        if self.notes.stepped:
            raise RuntimeError("optimizer.step() twice for one window: no backward has run since the last step")
        self._idle = False
        with contextlib.nullcontext() if self._scaler is None else separated(self._scaler, self.optimizer):
            if not self.finalized:
                if self.folds and not kwargs and not self.gets_closure:
                    self._take_uncounted()
                    ran = self.accumulator.micro_batches > 0
                    if ran or self.several_ranks:
                        norm = self.accumulator.step(self.optimizer, max_norm=max_norm, divisor=self._divisor())
                        self._idle = not ran and not self.engine.ending.last.reached
                        return norm
            if self.notes.overrun or not self.finalized:
                self.finalize()
            # After `finalize`, which has asked the other ranks, sums are those of all.
            self._idle = self.engine.window.micro_batches == 0 and 1 not in self.engine.store.touched_bytes()
            if self._idle:  # as in stock torch: nothing moves, and schedulers go on
                self.notes.left, self.notes.stepped = [None] * len(self.engine.store.named), self.finalized
                if self._scaler is None and not self.gets_closure:
                    self.optimizer.step(**kwargs)
                return None
            norm = None if max_norm is None else self.accumulator.clip_grad_norm_(max_norm)
            closure = once(self.optimizer, result, again) if self.gets_closure else contextlib.nullcontext(())
            with closure as args:
                if self._scaler is not None and self.engine.scaler is not None:
                    assert self.engine.window.outcome is not None
                    verdict = self.engine.window.outcome.verdict
                    # Another optimizer's update has forgotten that its gradients are unscaled.
                    self.engine.scaler.record(self.optimizer, verdict.skip, verdict.found_inf)
                    self._scaler.step(self.optimizer, *args, **kwargs)
                    self._scaler.update()
                elif not self.engine.ending.was_skipped():
                    self.optimizer.step(*args, **kwargs)
        if self.engine.ranks.size > 1:
            self.notes.dropped = self.spent  # all ranks drop it, or the next end says which do not
        self.notes.left = [
            None if (grad := entry.param.grad) is None else (weakref.ref(grad), grad._version)
            for entry in self.engine.store.named
        ]
        self.notes.stepped = True  # last: what an interrupt leaves would count again, as the loop's own
        return norm

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for overflow or weights that sum to zero; not for lack of backwards."""
        return not self._idle and self.accumulator.step_was_skipped

    def metrics(self) -> dict[str, float | Tensor]:
        """The accumulator's metrics of the last window; the loss of sums is divided as their gradient is."""
        values = self.accumulator.metrics()
        divisor = self._divisor()
        if divisor is not None and "loss" in values:
            values["loss"] *= values["weight"] / divisor
        return values

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """The accumulator's state, for one checkpoint of all ranks, which call this together.

        Args:
            whole: Whether the open window is in it. Without, this may be called at any moment, on any ranks.
        """
        done = 0 if self.spent else self.accumulator.micro_batches
        if whole and self.several_ranks:  # and any of them may be inside a window
            (done,) = self.engine.ranks.largest([done], self.engine.store.layout.device)
        if whole and self.spent and (done or self.engine.store.unplaced()):
            self.close()
        if not whole or self.spent:  # whose `.grad`s hooks may look at until the trainer clears them
            return self.engine.state_dict(reduced=False, whole=False)
        return self.accumulator.state_dict(reduced=self.several_ranks and done > 0)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let a parameter have a `.grad` inside a window, as in the trainer's own accumulation.

        If no parameter has any, torch.distributed.checkpoint makes the state of an optimizer that has none yet, by a
        step with zeros; they would stay in `.grad`, or the step is an error in an open window.
        """
        _, segment = next(iter(self.engine.store.touched()), (None, None))
        target = None if segment is None else self.engine.store.target(segment.param)
        if target is None or self.finalized or target.grad is not None:
            yield
            return
        target.grad = torch.zeros_like(target)
        try:
            yield
        finally:
            target.grad = None

    @contextlib.contextmanager
    def moving_masters(self) -> Iterator[None]:
        """Let other code than a step of the optimizer move its weights, and round masters into the model afterwards."""
        masters = self.engine.store.masters
        if masters is not None:
            masters.take_over()  # what was written to the model
        yield
        if masters is not None:
            masters.round()

    def close(self) -> None:
        """Drop the window, stepped or not, and open the next; collective if sums are being sent to other ranks.

        A rank that drops what all have finalized differs from those that step it, and says so at the next end.
        """
        if self.engine.window.sent.count and not self.finalized:
            self.finalize()
        dropped = self.notes.dropped or (self.finalized and not self.notes.stepped)
        self._shown = []
        self.accumulator.zero_()
        if dropped:
            self.engine.window.miss_end()

    def drop_grads(self, set_to_none: bool) -> None:
        """Run the optimizer's own `zero_grad`, which drops a window that has ended and was not stepped.

        A step before the next window finds what is left in `.grad`, and updates the scale by what was there.
        """
        self.notes.dropped = self.finalized and not self.notes.stepped
        type(self.optimizer).zero_grad(self.optimizer, set_to_none)


def _enabled(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    return scaler if scaler is not None and scaler.is_enabled() else None


# ---- Steps of a trainer's optimizer, with or without a closure, when other optimizers share its GradScaler


def check_optimizer_once(optimizer: Optimizer) -> None:
    """Refuse wrapped optimizers, and optimizers that evaluate the loss more than once in a step.

    Raises:
        TypeError: Names the optimizer, and what to use instead.
    """
    check_optimizer(optimizer, "accumkernels.integrations")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss of a window several times in one step, which trainers with micro-batches cannot; "
            "use it with accumkernels.FusedAccumulator itself, which FusedAccumulator.step(lbfgs) shows"
        )


NOT_RUN = object()  # the result of a closure that the optimizer itself is to run


@contextlib.contextmanager
def once(
    optimizer: Optimizer, result: Any, again: Callable[[], Any] | None = None
) -> Iterator[tuple[Callable[[], Any]]]:
    """The argument of one step of an optimizer that needs a closure, whose backward has already run.

    The result is that of weights and gradients as the step finds them: SAM changes them before it evaluates.

    Args:
        optimizer: Evaluates the closure.
        result: What the first evaluation returns; or NOT_RUN.
        again: Runs the closure in a window of its own, in other evaluations; None: they are refused.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = [_versions(params)]
    results = [] if result is NOT_RUN else [result]

    def inspect(*_: Any) -> None:
        if len(found) == 1:  # else in a step within the step, as of a base class, which may come after a change
            found.append(_versions(params))

    def closure() -> Any:
        if results and _versions(params) == found[-1]:
            return results.pop()
        if again is not None:
            return again()
        raise TypeError(
            f"{type(optimizer).__name__} evaluates its closure twice in one step, or after it has changed weights or "
            "gradients, as SAM, which FusedAccumulator cannot drive here: gradients of the first evaluation are those "
            "of a whole window. accelerate and Lightning's manual optimization can, without a GradScaler and masters "
            "of 16-bit parameters: closure(), then optimizer.step(closure). For loops of your own see docs/swapping.md"
        )

    last = optimizer.register_step_pre_hook(inspect)  # after hooks of others, which may change gradients
    try:
        yield (closure,)
    finally:
        last.remove()


def _versions(params: list[Tensor]) -> list[tuple[int, int, int | None]]:
    """What differs after a change of weights or of `.grad`s."""
    return [(p._version, id(p.grad), None if p.grad is None else p.grad._version) for p in params]


@contextlib.contextmanager
def separated(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Iterator[None]:
    """Hide a GradScaler's state of other optimizers from this one's step and update, and restore it afterwards."""
    records = scaler._per_optimizer_states
    others = {key: records.pop(key) for key in list(records) if key != id(optimizer)}
    try:
        yield
    finally:
        scaler._per_optimizer_states.update(others)


# ---- The argument `split` of the adapters

_OPTIONS = {"micro_batch", "budget", "cost", "multiple_of"}


def split_options(split: Any) -> dict[str, Any] | None:
    """The options of `FusedAccumulator.backward_batch` that the argument `split` of an adapter stands for.

    Args:
        split: "auto", the most that a part may cost, a dict of options, or None.

    Raises:
        TypeError, ValueError: It is none of these.
    """
    if split is None:
        return None
    if isinstance(split, Mapping):
        if unknown := sorted(map(str, split.keys() - _OPTIONS)):
            raise ValueError(f"split has {', '.join(map(repr, unknown))}, it may have {', '.join(sorted(_OPTIONS))}")
        return dict(split)
    if split == "auto":
        return {}
    expect(split, Real, "split", "'auto', the most that a part may cost, a dict of options, or None", but=bool)
    if not float(split) > 0:
        raise ValueError(f"split must be positive, got {split}")
    return {"budget": split}
