"""What the adapters share: a window driven by a trainer that divides its losses and decides when to step."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator, Parts
from ..arguments import as_scalar
from ..capture.captures import MicroBatch
from ..splitting.run import BatchReport
from ..window.optimizers import needs_closure
from .optimizer_accumulator import OptimizerAccumulator
from .stepping import apart, check_optimizer_once, once
from .visible_grads import VisibleGrads

_log = logging.getLogger(__name__)


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
        alone: Whether no other optimizer steps parameters of the modules.
        **options: Of FusedAccumulator.

    Attributes:
        divided_by: What the loss of the next micro-batch was divided by.
        sums: Whether losses are added up as they are; the same for all micro-batches of a window.
        finalized: Whether `.grad` holds the averaged gradient.
        stepped: Whether the optimizer was stepped with it.
        folds: Whether no code looks at `.grad` before the step or after it.
        under_way: The micro-batch whose backward `run` has started, until it is counted.
        micro_batch: The number of backwards in the trainer's current micro-batch; None if the trainer does not say.
        due: The number of the window that the trainer's last micro-batch was to end; None inside a window.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        alone: bool = True,
        **options: Any,
    ) -> None:
        check_optimizer_once(optimizer)
        self.modules = list(modules)
        self.optimizer = optimizer
        self.divided_by: float | Tensor = 1
        self.sums = False
        self.finalized = False
        self.stepped = False
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.alone = alone
        self.micro_batch: int | None = None
        self.folds = False
        self._promised: tuple[float | Tensor, Tensor] | None = None
        self._visible = VisibleGrads()
        self._idle = False
        self.due: int | None = None
        self._warned = False  # of a window whose end was left out
        self.under_way: MicroBatch | None = None
        self._current = OptimizerAccumulator(self.modules, optimizer, self._scaler, alone=alone, **options)

    # ---- the accumulator

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator, which is replaced when the optimizer gets other parameters."""
        return self._current.accumulator

    @property
    def parts(self) -> Parts:
        """The accumulator's parts."""
        return self._current.parts

    def release(self) -> None:
        """Restore the model and the optimizer, keeping what was trained."""
        self._drop()
        self._current.remove()

    def _drop(self) -> None:
        if self.parts.ranks.sender.begun and not self.finalized:  # after an exception: no rank sums the rest
            self.parts.scaler.forget()
            self.parts.store.drop_grads()
        else:
            self.close()

    @property
    def inside_no_sync(self) -> bool:
        """Whether the loop is inside `no_sync` of a DistributedDataParallel module."""
        return self._current.inside_no_sync

    @property
    def several_ranks(self) -> bool:
        """Whether other ranks may have micro-batches in this window."""
        return self.parts.ranks.ends_together

    def split_together(self, together: bool) -> bool:
        """Let ranks split batches into equally many parts, or as they must; returns whether they are equally many."""
        return self._current.split_together(together) or self.parts.ranks.sharded

    def targets(self, params: list[Tensor]) -> list[Tensor]:
        """The tensors that the optimizer steps for these parameters of the model."""
        return self.accumulator.param_groups([{"params": params}])[0]["params"]

    def go_on(self) -> None:
        """Before the trainer's next micro-batch, tell other ranks of a window that this rank has not ended.

        They may wait at its end, and would take the end of the next window for it.
        """
        window = self.parts.window()
        if self.due != window.number or self.finalized:
            return
        window.miss_end()
        if self.accumulator.micro_batches and self.several_ranks and not self._warned:
            self._warned = True
            _log.warning(
                "the last micro-batch of a window came without optimizer.step() on this rank, so its micro-batches go "
                "to the next window. If other ranks have stepped, all stop there with an error: a rank that leaves a "
                "micro-batch out steps all the same"
            )

    # ---- micro-batches

    def open(self) -> None:
        """Before a forward or a backward, open the next window if the last one has ended.

        Raises:
            RuntimeError: the last one was neither stepped nor dropped.
        """
        if self.finalized:
            if not self.stepped and any(p.grad is not None for p in self.accumulator.parameters()):
                raise RuntimeError(
                    "backward after the last one of its window: step the optimizer before, or drop the window with "
                    "optimizer.zero_grad(). A micro-batch has one backward: add up its losses, and let the trainer "
                    "count micro-batches (accelerate: `with accelerator.accumulate(model)`, or no_sync around all but "
                    "the last backward of a window)"
                )
            self.close()
        if self.accumulator.micro_batches == 0 and not self._visible and self._current.outgrown:
            self._drop()
            self._current.renew()

    def begin(self, sums: bool = False) -> None:
        """Before a backward, set the factor of its gradients.

        Raises:
            RuntimeError: The window has micro-batches of the other kind.
        """
        self.take_back()
        if self.accumulator.micro_batches == 0:
            self.sums = sums
        elif self.sums != sums:
            raise RuntimeError(
                "a backward with a weight and one without in one window, outside of accelerator.accumulate(): give "
                "all of them a weight, or none"
            )
        self.parts.scaler.make_up_for(1 if sums else self.divided_by)
        self.under_way = None

    def backward(self, loss: Tensor, weight: float | Tensor, *, last: bool = False, **kwargs: Any) -> None:
        """Run and count a micro-batch, after `open` and `begin`.

        Args:
            loss: The trainer's.
            weight: What it counts.
            last: Whether it ends the window on this rank; other ranks may end theirs differently.
            **kwargs: Of `Tensor.backward`.
        """
        last = last and self._current.sends_in_backward
        self.accumulator.backward(loss, 1.0 if self.sums else weight, last=last, **kwargs)

    def backward_coupled(
        self,
        chunks: Iterable[Any],
        encode: Callable[[Any], Any],
        loss_fn: Callable[..., Tensor],
        weight: float | Tensor,
        *,
        last: bool = False,
    ) -> None:
        """`backward` for a loss over chunks."""
        last = last and self._current.sends_in_backward
        self.accumulator.backward_coupled(chunks, encode, loss_fn, weight=1.0 if self.sums else weight, last=last)

    def backward_batch(
        self, batch: Any, loss_fn: Callable[[Any], Any], *, last: bool = False, **options: Any
    ) -> BatchReport:
        """`FusedAccumulator.backward_batch`, after `open` and `begin`. Losses that are sums are added up over parts.

        Args:
            batch: The batch.
            loss_fn: Returns the loss of a part, divided by `divided_by`; or a tuple of that and its weight.
            last: Whether it ends the window, see `backward`.
            **options: Of `FusedAccumulator.backward_batch`.
        """
        if self.sums:
            options["weight"] = lambda part: 1.0
        marks_last = last and self._current.sends_in_backward
        (report,) = (
            self.accumulator.backward_batch(whole, loss_fn, **options)
            for whole in (self.accumulator.window([batch]) if marks_last else [batch])
        )
        return report

    def run(
        self, backward: Callable[[Tensor], None], loss: Tensor, weight: float | Tensor, *, last: bool = False
    ) -> None:
        """Run a micro-batch by a backward of the caller's, after `open` and `begin`, and before `take`.

        Args:
            backward: Called with the loss to run backward of.
            loss: The trainer's loss, scaled.
            weight: What it counts.
            last: See `backward`.
        """
        loss, self.under_way = self.weigh(loss, weight, last and self._current.sends_in_backward)
        self.parts.runner.run(functools.partial(backward, loss), (loss,), self.under_way)

    def weigh(self, loss: Tensor, weight: float | Tensor, last: bool = False) -> tuple[Tensor, MicroBatch]:
        """The loss to run backward of, weighted if backward may cross ranks; and the micro-batch."""
        weight = as_scalar(1.0 if self.sums else weight, "weight", self.parts.store.device)
        return self.parts.runner.weigh(loss, self.parts.runner.micro_batch(weight, last))

    def take(self, loss: Tensor | None = None) -> None:
        """Count the current micro-batch; `loss` is its unscaled loss."""
        micro_batch, self.under_way = self.under_way or self.parts.runner.micro_batch(1.0), None
        with torch.no_grad():
            self.parts.runner.accumulate(micro_batch._replace(loss=loss))

    @property
    def reached(self) -> bool:
        """Whether a backward has left gradients that were not counted."""
        return self.parts.runner.is_uncounted() or any(entry.param.grad is not None for entry in self.parts.store.named)

    # ---- `.grad` inside a window of sums, as autograd leaves it

    def show(self) -> None:
        """Let `.grad` be the sum so far."""
        self._visible.show(self.parts.store)

    def take_back(self) -> None:
        """Take `.grad` back as the loop left it; if the loop dropped all of it, drop the window."""
        if self._visible and self._visible.take_back():
            self.close()

    # ---- the end of a window

    def finalize(self) -> None:
        """Average and set `.grad`, unless that is done or nothing was accumulated."""
        if self.finalized:
            return
        self._take_uncounted()
        if self.accumulator.micro_batches == 0 and not self.several_ranks:
            return
        self.accumulator.finalize(self.optimizer, divisor=self._divisor())
        self.finalized = True

    def _take_uncounted(self) -> None:
        """Before the end, take what the loop made of `.grad`, and gradients of backwards that the trainer did not see.

        If the window's last micro-batch was marked as the last, there are no such gradients.
        """
        self.take_back()
        self.under_way = None
        if self.reached:  # `loss.backward()` in place of the trainer's: as in stock, its gradients count once
            self.parts.scaler.make_up_for(1)
            self.take()
        if self._current.sends_in_backward and self.accumulator.micro_batches:
            self.parts.ranks.sender.end_last()

    def _divisor(self) -> float | None:
        """The sum of weights of all ranks; for sums the number of ranks, unless FSDP2 has divided by it."""
        if not self.sums:
            return None
        return 1.0 if self.parts.ranks.sharded else float(self.parts.ranks.size)

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradient of all parameters; returns its norm before clipping."""
        self.finalize()
        if not self.finalized:
            return torch.zeros(())
        return self.accumulator.clip_grad_norm_(max_norm, norm_type)

    def clip_in_step(self, max_norm: float | Tensor) -> Tensor:
        """Clip in `step_as_agreed`, which fills in the norm returned here; no code looks at `.grad` before."""
        store = self.parts.store
        self._promised = max_norm, torch.zeros((), dtype=store.result_dtype, device=store.device)
        return self._promised[1]

    def step_as_agreed(self, result: Any = None, **kwargs: Any) -> None:
        """`step`, folding and clipping as `folds` and `clip_in_step` have set."""
        max_norm, norm = self._promised or (None, None)
        self._promised = None
        found = self.step(result, max_norm=max_norm, fold=self.folds, **kwargs)
        if norm is not None and found is not None:
            norm.copy_(found)

    def step(
        self, result: Any = None, *, max_norm: float | Tensor | None = None, fold: bool = False, **kwargs: Any
    ) -> Any:
        """Step the optimizer and update the scale, as GradScaler does; a window with an overflow is skipped.

        `.grad` stays until the next window, as after any optimizer's step.

        Args:
            result: A closure's result; an optimizer that needs a closure gets one that returns it.
            max_norm: Clip to this norm.
            fold: No code looks at `.grad` any more, so the optimizer's own pass averages and clips if it can. `.grad`
                is None afterwards.
            **kwargs: Of the optimizer's `step`.

        Returns:
            The norm before clipping, with `max_norm`.
        """
        if self.stepped:
            raise RuntimeError("optimizer.step() twice for one window: no backward has run since the last step")
        self._idle = False
        closure_needed = needs_closure(self.optimizer)
        with apart(self._scaler, self.optimizer):
            if not self.finalized:
                self._take_uncounted()
                ran = self.accumulator.micro_batches > 0
                if fold and (ran or self.several_ranks) and not kwargs and not closure_needed:
                    norm = self.accumulator.step(self.optimizer, max_norm=max_norm, divisor=self._divisor())
                    self._reset()
                    self._idle = not ran and not self.parts.end.reached
                    return norm
                self.finalize()
            no_rank_ran = next(iter(self.parts.store.touched()), None) is None  # `finalize` has asked the others
            self._idle = self.accumulator.micro_batches == 0 and no_rank_ran
            if self._idle:  # as in stock torch: nothing moves, and schedulers go on
                self.stepped = self.finalized
                if self._scaler is None and not closure_needed:
                    self.optimizer.step(**kwargs)
                return None
            norm = None if max_norm is None else self.accumulator.clip_grad_norm_(max_norm)
            args = (once(self.optimizer, result),) if closure_needed else ()
            if self._scaler is not None:
                verdict = self.parts.window().verdict
                assert verdict is not None
                # Another optimizer's update has forgotten that its gradients are unscaled.
                self.parts.scaler.record(self.optimizer, verdict.skip, verdict.found_inf)
                self._scaler.step(self.optimizer, *args, **kwargs)
                self._scaler.update()
            elif not self.accumulator.step_was_skipped:
                self.optimizer.step(*args, **kwargs)
        self.stepped = True
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

    def state_dict(self) -> dict[str, Any]:
        """The accumulator's state, for one checkpoint of all ranks, which call this together."""
        if self.stepped:
            self.close()
        done = self.accumulator.micro_batches
        if self.several_ranks:  # and any of them may be inside a window
            counts = torch.tensor([done], device=self.parts.store.device)
            done = int(self.parts.ranks.joined(counts, largest=True).item())
        return self.accumulator.state_dict(reduced=self.several_ranks and done > 0)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let a parameter have a `.grad` inside a window, as in the trainer's own accumulation.

        If no parameter has any, torch.distributed.checkpoint makes the state of an optimizer that has none yet, by a
        step with zeros; they would stay in `.grad`, or the step is an error in an open window.
        """
        _, segment = next(iter(self.parts.store.touched()), (None, None))
        target = None if segment is None else self.parts.store.target(segment.param)
        if target is None or self.finalized or target.grad is not None:
            yield
            return
        target.grad = torch.zeros_like(target)
        try:
            yield
        finally:
            target.grad = None

    def close(self) -> None:
        """Drop the window, stepped or not, and open the next; collective if sums are being sent to other ranks.

        A rank that drops what all have finalized differs from those that step it, and says so at the next end.
        """
        if self.parts.ranks.sender.begun:
            self.finalize()
        dropped = self.finalized and not self.stepped
        self._visible.forget()
        self.accumulator.zero_()
        if dropped:
            self.parts.window().miss_end()
        self._reset()

    def _reset(self) -> None:
        self.finalized = self.stepped = False
        self.micro_batch = None if self.micro_batch is None else 0
