"""The end of a window: judge it, divide, hand the result to optimizers and to the scaler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import as_scalar
from ..buffers.devices import move
from ..buffers.flat import FlatBuffer
from ..buffers.norms import clip_coefficient, total_norm
from ..buffers.store import Store, has_accumulator
from ..ops.schema import State
from ..ranks.reduction import Reduction
from .handout import Handout
from .metrics import Metrics
from .noise_scale import NoiseMeter
from .optimizers import (
    check_optimizer,
    check_ownership,
    has_step_pre_hooks,
    lacks_momentum,
    owned,
    steps_scaled_gradients,
)
from .scaling import LossScaler
from .state import Window
from .verdict import Verdict, judge


class Ending:
    """Ends windows of one accumulator.

    Args:
        store: Flat buffers and states.
        scaler: Gets the verdict.
        overflow: As FusedAccumulator's argument.
        noise: Is told of every window.
        reduction: Sums windows over ranks; None for a process alone.

    Attributes:
        skipped: Whether the last step was skipped; on the device until somebody reads it.
        last_norm: The last norm that was computed.
        metrics: Of the last window that ended.
    """

    def __init__(
        self,
        store: Store,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        reduction: Reduction | None = None,
    ) -> None:
        self.skipped: bool | Tensor = False
        self.last_norm: Tensor | None = None
        self.metrics = Metrics(store.device)
        self._captured = False  # whether `skipped` belongs to a CUDA graph, and changes with every replay
        self._store = store
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._reduction = reduction
        noise.shards = store.shards
        self.open_window()

    def open_window(self) -> None:
        """Forget what was handed out."""
        self._handout = Handout(self._store)
        self._norm: Tensor | None = None  # of the sums over all ranks, fp64 0-d
        self._noise_sums: Tensor | None = None

    def was_skipped(self) -> bool:
        """`skipped`, read from the device at most once (of a CUDA graph, each time: a replay changes it)."""
        if _is_capturing(self.skipped):
            raise RuntimeError(
                "whether to step must be read from the device, which the capture of a CUDA graph does not allow: "
                "use one of torch's fused optimizers (fused=True, capturable=True), after a warm-up window"
            )
        skipped = bool(self.skipped)
        if not self._captured:
            self.skipped = skipped
        return skipped

    def check(self, caller: str, optimizers: Sequence[Optimizer]) -> None:
        """Refuse to end a window whose gradients would be wrong, lost or stepped by nobody.

        Args:
            caller: The method's name, for messages.
            optimizers: All that step this window.

        Raises:
            TypeError: an optimizer is none, or wrapped by a trainer.
            RuntimeError: says what is out of order, and names the parameter.
        """
        if not optimizers:
            raise TypeError(f"{caller} needs the optimizers that will step this window")
        for optimizer in optimizers:
            check_optimizer(optimizer, caller)
        self._store.check_drift()
        self._scaler.check_not_unscaled(lambda o: any(o is named for named in optimizers))
        self._scaler.check_not_stepped(optimizers)
        for entry in self._store.named:
            if entry.param.grad is not None:
                raise RuntimeError(
                    f"{caller}: {entry.name!r} has a .grad that was never accumulated; "
                    + (
                        "call acc.accumulate() after backward (acc.backward does), or acc.discard() to drop it"
                        if self._store.place(entry.param) is not None
                        else "it was unfrozen inside a window, which counts from the next one on: call acc.discard()"
                    )
                )
        self._check_ownership(optimizers)
        for p in owned(optimizers):
            if p.grad is not None and not has_accumulator(p):
                raise RuntimeError(
                    f"{caller}: an optimizer owns a parameter of shape {tuple(p.shape)} with a .grad of its own and "
                    "no accumulator; it would be stepped as it is, scaled and not averaged. Give all parameters of the "
                    "optimizer to the accumulator, or build an optimizer for each"
                )

    def _check_ownership(self, optimizers: Sequence[Optimizer]) -> None:
        touched = {id(s.param) for _, s in self._store.touched()}
        named = ((e.name, self._store.target(e.param)) for e in self._store.named if id(e.param) in touched)
        check_ownership(optimizers, named)

    def divisor(self, window: Window, given: float | Tensor | None) -> Tensor | None:
        """Check what the user wants to divide by; fp64 0-d on the first device, None for the sum of weights."""
        if window.averaged:
            return torch.ones((), dtype=torch.float64, device=self._store.device)
        if given is None:
            return None
        scalar = as_scalar(given, "divisor", self._store.device, allow_zero=False)
        if isinstance(scalar, Tensor):
            window.decided_on_device = True
            return scalar
        return torch.full((), scalar, dtype=torch.float64, device=self._store.device)

    def finalize(self, window: Window, optimizers: Sequence[Optimizer], divisor: Tensor | None) -> None:
        """Average and hand out."""
        verdict, divided = self._judge(window, optimizers, divisor, divides=True)
        self._finish(window, optimizers, verdict, None if divided else verdict.divisor)

    def clip(self, norm: Tensor, max_norm: float | Tensor) -> None:
        """Multiply what was handed out, which has the norm `norm`, so that its norm is at most `max_norm`."""
        self._handout.multiply(clip_coefficient(norm, max_norm))

    def norm(self, norm_type: float) -> Tensor:
        """The norm of the sums as they are, fp64 0-d."""
        if self._store.shards is not None:
            return self._store.shards.total_norm(self._store.buffers, norm_type, self._store.device)
        return total_norm(self._store.buffers, norm_type, self._store.device)

    def result(self, norm: Tensor) -> Tensor:
        """A norm as the user gets it."""
        self.last_norm = norm.to(self._store.result_dtype)
        self.metrics.see_norm(self.last_norm)
        return self.last_norm

    def step(
        self, window: Window, optimizer: Optimizer, divisor: Tensor | None, max_norm: float | Tensor | None
    ) -> Tensor | None:
        """Average, clip, step and update the scale; returns the norm where `max_norm` is given."""
        fused = steps_scaled_gradients(optimizer)
        folded = fused and self._can_fold(optimizer)
        # What is clipped is divided once, by both; but the mean itself may overflow when it is rounded, clipped or not.
        averages = not folded and (max_norm is None or self._store.rounds)
        verdict, divided = self._judge(window, (optimizer,), divisor, divides=averages, needs_norm=max_norm is not None)
        norm, coefficient = None, None
        if max_norm is not None:
            norm = (self.norm(2.0) if self._norm is None else self._norm) / verdict.divisor
            coefficient = clip_coefficient(norm, max_norm)
        divide_by = verdict.divisor if coefficient is None else verdict.divisor / coefficient
        if averages:
            verdict = self._finish(window, (optimizer,), verdict, None if divided else verdict.divisor)
            if coefficient is not None:
                self._handout.multiply(coefficient)
        else:
            verdict = self._finish(window, (optimizer,), verdict, None if folded else divide_by)
        try:
            if fused:
                optimizer.grad_scale = divide_by.float() if folded else None  # type: ignore[attr-defined]
                optimizer.found_inf = verdict.skip.clone()  # type: ignore[attr-defined]
            self._step_optimizer(optimizer, may_skip=not fused and (self._overflow is not None or window.may_be_empty))
        except BaseException:
            if folded:  # whoever goes on by hand finds the averaged gradients that finalize() promises
                self._handout.divide(divide_by)
            raise
        finally:
            for name in ("grad_scale", "found_inf") if fused else ():
                vars(optimizer).pop(name, None)
        may_be_empty = window.may_be_empty or self._store.shards is not None  # another rank's may be, and then all are
        self._scaler.update(keep=verdict.empty if may_be_empty else None)
        return norm

    def _judge(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | None,
        *,
        divides: bool,
        needs_norm: bool = False,
    ) -> tuple[Verdict, bool]:
        """Judge the window, with several ranks that of all; then sum it over ranks.

        Args:
            window: What ends.
            optimizers: That step it.
            divisor: See `divisor()`.
            divides: Whether sums that are reduced are to be divided at once.
            needs_norm: Whether their norm will be asked for.

        Returns:
            The verdict, and whether sums were divided.
        """
        check_sums(self._store)
        state = self._store.state()
        self._noise_sums = self._noise.sums(self._store.device)
        if self._reduction is None or window.averaged:
            state = torch.zeros_like(state) if window.dropped else state
            verdict = judge(state, divisor)
            if self._store.shards is not None:
                if self._noise_sums is not None:
                    self._store.shards.sum(self._noise_sums)
                verdict = self._store.shards.agree(verdict, state[State.WEIGHT])
            return verdict, False
        window.reducing = True
        squares = None if self._noise_sums is None else self._noise_sums[0]
        reduced = self._reduction.agree(window, squares, divisor)
        verdict = reduced.verdict
        measures = needs_norm or self._overflow is not None or self._noise_sums is not None
        sums = {device: torch.zeros(1, dtype=torch.float64, device=device) for device in self._store.states}

        def look(buffer: FlatBuffer, parts: list[Tensor]) -> None:
            if measures:
                buffer.ops.norm_(sums[buffer.device], parts)
            if divides:
                by = move(verdict.divisor, buffer.device, buffer.dtype)
                for part in parts:
                    part.div_(by)

        self._reduction.finish(look)
        of_sum = sum((move(s, self._store.device) for s in sums.values()), torch.zeros_like(state[:1]))[0]
        if measures:
            self._norm = of_sum.sqrt()
        if self._overflow is not None:  # each rank's sum was finite; theirs together may not be
            verdict = verdict.with_overflow(~torch.isfinite(of_sum))
        if self._noise_sums is not None:
            self._noise_sums = torch.stack([reduced.of_micro_batches, of_sum])
            self._noise_sums = torch.where(reduced.all_measure, self._noise_sums, torch.nan)  # does not count
        if reduced.error is not None:
            raise RuntimeError(reduced.error)
        self._check_ownership(optimizers)  # of what other ranks touched
        window.reducing = False
        return verdict, divides

    def _step_optimizer(self, optimizer: Optimizer, may_skip: bool) -> None:
        with torch.enable_grad():  # as where the user's own hooks would find it
            if self._scaler.scaler is not None:
                self._scaler.scaler.step(optimizer)
            elif not may_skip or not self.was_skipped():
                optimizer.step()

    def _can_fold(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients are exactly this window's fp32 views."""
        if self._store.result_dtype != torch.float32 or has_step_pre_hooks(optimizer):
            return False  # hooks are to see the averaged gradient
        return all(
            p.dtype == torch.float32 and (p.grad is None or self._store.place(p) is not None)
            for p in owned((optimizer,))
        )

    def _finish(
        self, window: Window, optimizers: Sequence[Optimizer], verdict: Verdict, divisor: Tensor | None
    ) -> Verdict:
        """Divide (None: leave the sums), hand out `.grad`, and tell the scaler the verdict."""
        if divisor is not None:
            self._handout.divide(divisor)
        overflow = self._handout.round()
        if overflow is not None and self._overflow is not None:
            if self._store.shards is not None:
                self._store.shards.maximum(overflow)
            verdict = verdict.with_overflow(overflow)
        window.verdict = verdict
        self.skipped, self._captured = verdict.skip, _is_capturing(verdict.skip)
        self.metrics.end_window(window.micro_batches, self._store.state(), verdict.skip, verdict.found_inf)
        if not self._withhold(window, optimizers):
            self._handout.give()
        for optimizer in optimizers:
            self._scaler.record(optimizer, verdict.skip, verdict.found_inf)
        self._noise.end_window(self._store.state(), verdict.skip, self._noise_sums)
        return verdict

    def _withhold(self, window: Window, optimizers: Sequence[Optimizer]) -> bool:
        """Whether no `.grad` is handed out at all, so that optimizers leave their state alone.

        So where the weights are known to sum to zero or the window to be dropped, and where an overflow would leave the
        momentum of torch's fused SGD uninitialised; that is worth a synchronisation.
        """
        if window.dropped or (not window.decided_on_device and window.host_weight == 0):
            return True
        touched = {id(self._store.target(segment.param)) for _, segment in self._store.touched()}
        return any(lacks_momentum(o, touched) for o in optimizers) and self.was_skipped()


def check_sums(store: Store) -> None:
    """Look for overflow in the sums that were added to without a look; it counts as one of the last micro-batch."""
    for buffer in store.buffers:
        if not buffer.unchecked:
            continue
        found = torch.zeros(1, dtype=torch.float64, device=buffer.device)
        segments = sorted(buffer.unchecked)
        buffer.ops.check_finite_([buffer.views[i] for i in segments], segments, found, buffer.flags, tag=1)
        state = store.states[buffer.device]
        for flag in (State.FOUND_INF, State.POISONED):
            torch.maximum(state[flag], found[0], out=state[flag])
        buffer.unchecked.clear()


def _is_capturing(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing()
