"""The end of a window: judge it, divide, hand the result to optimizers and to the scaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import as_scalar
from ..boundary import with_graph
from ..buffers.devices import is_known_zero, move
from ..buffers.flat import FlatBuffer
from ..buffers.norms import clip_coefficient
from ..buffers.parameters import NamedParameter
from ..buffers.store import Store, has_accumulator
from ..ops.schema import Judged, State
from ..ranks.base import LocalStats, Ranks, SingleProcess
from .handout import Handout
from .metrics import Metrics
from .noise_scale import NoiseMeter
from .optimizers import (
    check_no_closure,
    check_optimizer,
    has_step_pre_hooks,
    is_fused_sgd,
    lacks_momentum,
    owned,
    steps_scaled_gradients,
)
from .scaling import LossScaler
from .selection import Part
from .state import Phase, Window, WindowLoss
from .step_plan import StepPlan
from .verdict import Verdict


class End:
    """Ends the windows of one accumulator.

    Args:
        store: Flat buffers and states.
        ranks: They judge and reduce windows together.
        scaler: Gets the verdict.
        overflow: As FusedAccumulator's argument.
        noise: Is told of every window.
        loss: Has the losses of a window's micro-batches.

    Attributes:
        last_norm: The last norm that was computed.
        reached: Whether any rank had a gradient in the last window that ended.
        metrics: Of the last window that ended.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        scaler: LossScaler,
        overflow: str | None,
        noise: NoiseMeter,
        loss: WindowLoss,
    ) -> None:
        self.last_norm: Tensor | None = None
        self.reached = False
        self.metrics = Metrics(store.device)
        self._skipped: bool | Tensor = False  # whether the last step was; on the device until somebody reads it
        self._captured = False  # whether `_skipped` belongs to a CUDA graph, and changes with every replay
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._loss = loss
        self._plan: StepPlan | None = None
        self._ignored: Set[int] = frozenset()
        self._limit: tuple[tuple[float, torch.device], Tensor] | None = None
        self.open_window()

    def open_window(self) -> None:
        """Forget what was handed out."""
        self._handout = Handout(self._store)
        self._noise_sums: Tensor | None = None
        self._loss_sums = self._loss.later()

    def was_skipped(self) -> bool:
        """Whether the last step was skipped, read from the device at most once.

        In a CUDA graph it is read each time, since a replay changes it.
        """
        if _is_capturing(self._skipped):
            raise RuntimeError(
                "whether to step must be read from the device, which the capture of a CUDA graph does not allow: "
                "use one of torch's fused optimizers (fused=True, capturable=True), after a warm-up window"
            )
        skipped = bool(self._skipped)
        if not self._captured:
            self._skipped = skipped
        return skipped

    def check(self, caller: str, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        """Refuse to end a window whose gradients would be wrong or lost, or which no optimizer would step.

        Args:
            caller: The method's name, for messages.
            optimizers: All optimizers that step this window; none for `finalize` and an update by hand.
            ignored: `id`s of parameters that need no optimizer.

        Raises:
            TypeError: an optimizer is none, or wrapped by a trainer.
            RuntimeError: says what is out of order, and names the parameter.
        """
        if not optimizers and (caller == "step()" or self._scaler.scaler is not None):
            why = "" if caller == "step()" else ": GradScaler keeps the verdict of a window by optimizer"
            raise TypeError(f"{caller} needs the optimizers that will step this window{why}")
        for optimizer in optimizers:
            check_optimizer(optimizer, caller)
            if caller == "step()":
                check_no_closure(optimizer)
        self._store.check_drift()
        self._scaler.check_not_unscaled(lambda o: any(o is named for named in optimizers))
        self._scaler.check_not_stepped(optimizers)
        for entry in self._store.named:
            if entry.param.grad is not None:
                self._refuse_uncounted(caller, entry)
        self._ignored = ignored
        for p in self._plan_step(optimizers).foreign_params:
            if p.grad is not None and not has_accumulator(p):
                raise RuntimeError(
                    f"{caller}: an optimizer owns a parameter of shape {tuple(p.shape)} with a .grad of its own and "
                    "no accumulator; it would be stepped as it is, scaled and not averaged. Give all parameters of the "
                    "optimizer to the accumulator, or build an optimizer for each"
                )

    def _refuse_uncounted(self, caller: str, entry: NamedParameter) -> None:
        raise RuntimeError(
            f"{caller}: {entry.name!r} has a .grad that was never accumulated; "
            + (
                "call acc.accumulate() after backward (acc.backward does), or acc.discard() to drop it"
                if self._store.place(entry.param) is not None
                else "it was unfrozen inside a window, which counts from the next one on: call acc.discard()"
            )
        )

    def _plan_step(self, optimizers: Sequence[Optimizer]) -> StepPlan:
        if self._plan is None or not self._plan.fits(self._store, optimizers, self._ignored):
            self._plan = StepPlan(self._store, optimizers, self._ignored)
        return self._plan

    def divisor(self, window: Window, given: float | Tensor | None) -> Tensor | None:
        """Check what the user wants to divide by; fp64 0-d on the first device, None for the sum of weights."""
        if window.phase is Phase.AVERAGED:
            return torch.ones((), dtype=torch.float64, device=self._store.device)
        if given is None:
            return None
        scalar = as_scalar(given, "divisor", self._store.device, allow_zero=False)
        if isinstance(scalar, Tensor):
            window.decided_on_device = True
            return scalar
        return torch.full((), scalar, dtype=torch.float64, device=self._store.device)

    def limit(self, max_norm: float | Tensor | None) -> Tensor | None:
        """Check what the user wants to clip to; fp64 0-d on the first device. That of a number is made once."""
        if max_norm is None:
            return None
        device = self._store.device
        scalar = as_scalar(max_norm, "max_norm", device, allow_inf=True)
        if isinstance(scalar, Tensor):
            return scalar
        if self._limit is None or self._limit[0] != (scalar, device):
            with torch.inference_mode(False):
                self._limit = (scalar, device), torch.full((), scalar, dtype=torch.float64, device=device)
        return self._limit[1]

    def finalize(self, window: Window, optimizers: Sequence[Optimizer], divisor: Tensor | None) -> None:
        """Average and hand out."""
        verdict, divided = self._judge(window, optimizers, divisor, divides=True)
        self._finish(window, optimizers, verdict, None if divided else verdict.divisor)

    def skip_empty(self) -> None:
        """End a window without micro-batches, of a process that ends its windows alone."""
        self._skipped = True
        self.metrics.end_empty_window()

    def clip(self, norm: Tensor, max_norm: float | Tensor) -> None:
        """Multiply what was handed out, which has the norm `norm`, so that its norm is at most `max_norm`."""
        self._handout.multiply(clip_coefficient(norm, max_norm))

    def norm(self, norm_type: float) -> Tensor:
        """The norm of the sums as they are, fp64 0-d."""
        return self._ranks.total_norm(self._store.buffers, norm_type, self._store.device)

    def result(self, norm: Tensor) -> Tensor:
        """A norm as the user gets it."""
        self.last_norm = norm.to(self._store.result_dtype)
        self.metrics.see_norm(self.last_norm)
        return self.last_norm

    def results(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Norms of parts as the user gets them; the last norm is that of all of them together."""
        if norms:
            self.result(torch.linalg.vector_norm(torch.stack(list(norms))))
        return [norm.to(self._store.result_dtype) for norm in norms]

    def step(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | None,
        max_norm: Tensor | None,
        parts: Sequence[Part] = (),
    ) -> Sequence[Tensor]:
        """Average, clip, step all optimizers or none, update the scale; the norms of parts, or that of all."""
        fused = [o for o in optimizers if steps_scaled_gradients(o)]
        folded = [o for o in fused if self._can_fold(o)]
        # A window is divided while it is reduced where every sum is to be. What is clipped is divided once, by both;
        # but a mean that is rounded may overflow whether it is clipped or not.
        averages = not folded and (max_norm is None or self._store.rounds)
        verdict, divided = self._judge(window, optimizers, divisor, divides=averages, max_norm=max_norm, parts=parts)
        judged = verdict  # of sums as they are, whatever rounding them does
        norms, coefficients = self._measure(parts, None if divided or not parts else verdict.divisor)

        # Folded optimizers get the sums as they are; the others get averages.
        if averages:
            verdict = self._finish(window, optimizers, verdict, None if divided else verdict.divisor)
            if max_norm is not None:
                self._handout.multiply(verdict.coefficient)
            for part, coefficient in zip(parts, coefficients, strict=True):
                self._handout.multiply(coefficient, part.ids)
        else:
            for part, coefficient in zip(parts, coefficients, strict=True):
                self._handout.multiply(coefficient, part.ids)
            some = len(folded) < len(optimizers)
            sums = {id(p) for p in owned(folded)} if some else frozenset()
            verdict = self._finish(window, optimizers, verdict, judged.divide_by if some else None, sums)

        may_skip = self._overflow is not None or window.may_be_empty
        try:
            for optimizer in fused:
                scale = verdict.single(Judged.DIVIDE_BY) if optimizer in folded else None
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                if not is_known_zero(verdict.skip):  # also for a scaler whose own `step` does not set it
                    optimizer.found_inf = verdict.skip.clone()  # type: ignore[attr-defined]
            for optimizer in optimizers:
                self._step_optimizer(optimizer, optimizer in fused, may_skip)
        except BaseException:
            if folded:  # whoever goes on by hand finds the averaged gradients that finalize() promises
                self._handout.divide(judged.divide_by, only={id(p) for p in owned(folded)})
            raise
        finally:
            for optimizer in fused:
                for name in ("grad_scale", "found_inf"):
                    vars(optimizer).pop(name, None)
        # Where ranks agree on the device alone, another's window may be empty, and then all are.
        may_be_empty = window.may_be_empty or self._ranks.judged_together
        self._scaler.update(keep=verdict.empty if may_be_empty else None)
        exact = self._store.result_dtype == torch.float64
        return norms if parts else [verdict.norm if exact else verdict.single(Judged.NORM)]

    def _measure(self, parts: Sequence[Part], divisor: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        """The norm of each part's average, and what clips it; `divisor` where sums are not divided yet."""
        norms = [self._ranks.total_norm(self._store.buffers, 2.0, self._store.device, part.ids) for part in parts]
        if divisor is not None:
            norms = [norm / divisor for norm in norms]
        return norms, [clip_coefficient(norm, part.max_norm) for norm, part in zip(norms, parts, strict=True)]

    def _judge(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | None,
        *,
        divides: bool,
        max_norm: Tensor | None = None,
        parts: Sequence[Part] = (),
    ) -> tuple[Verdict, bool]:
        """Judge the window, together with all ranks, and reduce its sums where that is still to be done.

        Args:
            window: What ends.
            optimizers: They step it.
            divisor: See `divisor()`.
            divides: Whether sums that are reduced are to be divided at once.
            max_norm: What their average is to be clipped to.
            parts: What is clipped by norms of its own.

        Returns:
            The verdict, and whether sums were divided.
        """
        # The averages of a window that was loaded as finalized are those of all ranks already.
        ranks = SingleProcess() if window.phase is Phase.AVERAGED and self._ranks.reduces_sums else self._ranks
        if ranks.reduces_sums:
            window.phase = Phase.REDUCING

        norm = None
        if not ranks.reduces_sums and any(buffer.unchecked for buffer in self._store.buffers):
            norm = None if max_norm is None else self.norm(2.0)
            self.check_sums(window, norm)

        # Every rank reports, and all know the same afterwards.
        sums = self._noise.sums(self._store.device)
        touched = self._store.touched_bytes()
        squares = None if sums is None else sums[0]
        report = LocalStats(
            state=self._store.state(),
            touched=touched,
            dropped=window.dropped,
            squares=squares,
            divisor=divisor,
            weighed_after=window.weighed_after,
            micro_batches=window.micro_batches,
            window=window.number,
            loss=self._loss.later(),
            norms=1 + len(parts) if parts else int(max_norm is not None),
            limit=self.limit(sum(part.max_norm for part in parts)) if parts else max_norm,
        )
        agreement = ranks.all_reduce_stats(report)
        shared = agreement.loss
        self._loss_sums = report.loss if shared is None else lambda: shared
        if not ranks.reduces_sums:
            if agreement.error is not None:
                raise RuntimeError(agreement.error)
            if ranks.judged_together:
                window.agreed(agreement)
                self._store.agreed(agreement.state, None)
            self._noise_sums = None if sums is None else ranks.sum_over_shards(sums)
            if norm is None and max_norm is not None:
                norm = self.norm(2.0)
            return Verdict(self._store.ops, agreement.state, agreement.divisor, norm, max_norm), False
        verdict = Verdict(self._store.ops, agreement.state, agreement.divisor)
        window.agreed(agreement)
        self._store.agreed(agreement.state, agreement.touched)

        # Reduce, and look at each part when it is there.
        checks = self._overflow is not None
        measures = max_norm is not None or agreement.squares is not None
        of_sum = self._reduce(verdict.divisor if divides else None, measures or (checks and not divides))
        measures = measures or checks
        if agreement.error is not None:  # all ranks have one, and none waits for this one any more
            raise RuntimeError(agreement.error)
        if measures:
            of_sum = ranks.sum_over_shards(of_sum)
        self.check_sums(window, of_sum if measures else None)
        if checks:  # each rank's sum was finite; theirs together may not be
            verdict = verdict.with_overflow((~torch.isfinite(of_sum)).double())
        if max_norm is not None:
            verdict = verdict.clipped(of_sum.sqrt(), max_norm)
        if agreement.squares is not None:  # nan where a rank did not measure, and then the window does not count
            self._noise_sums = torch.stack([agreement.squares, of_sum])

        self._plan_step(optimizers)  # also for what other ranks touched
        window.phase = Phase.OPEN
        return verdict, divides

    def check_sums(self, window: Window, norm: Tensor | None = None) -> None:
        """Look for an overflow in sums that were added to without a look.

        In which micro-batch it was is not known: it counts as the last, and with it all that were found before.

        Args:
            window: The sums are its.
            norm: Of the sums, or its square, where it is known: what the host can read spares a pass over them.
        """
        unchecked = [buffer for buffer in self._store.buffers if buffer.unchecked]
        if not unchecked:
            return
        finite = norm is not None and norm.device.type == "cpu" and bool(torch.isfinite(norm))
        if self._overflow is not None and not finite:
            tag = max(max(buffer.unchecked.values()) for buffer in unchecked)
            for buffer in unchecked:
                found = torch.zeros(1, dtype=torch.float64, device=buffer.device)
                segments = list(buffer.unchecked)
                views = [buffer.views[index] for index in segments]
                buffer.ops.check_finite_(views, segments, found, buffer.flags, tag=tag)
                earlier = (found > 0) & (buffer.flags > tag - max(window.micro_batches, 1))
                buffer.flags.masked_fill_(earlier, tag)
                state = self._store.states[buffer.device]
                for flag in (State.FOUND_INF, State.POISONED):
                    state[flag].clamp_(min=found[0])
        for buffer in unchecked:
            buffer.unchecked.clear()

    def _reduce(self, divisor: Tensor | None, measures: bool) -> Tensor:
        """Reduce the flat buffers, and look at each part when it is there.

        Args:
            divisor: Of the sums; None to leave them as they are.
            measures: Whether to take their norm, before they are divided.

        Returns:
            The squared norm of the sums, fp64 0-d. Without `measures` the pass that divides tells what matters of it:
            inf where a quotient is not finite, else 0.
        """
        device = self._store.device
        seen = {d: torch.zeros(1, dtype=torch.float64, device=d) for d in self._store.states}
        divisors = {} if divisor is None else {d: move(divisor, d) for d in self._store.states}

        def look(buffer: FlatBuffer, parts: list[Tensor]) -> None:
            if measures:
                buffer.ops.norm_(seen[buffer.device], parts)
            if divisor is not None:
                found_inf = None if measures else seen[buffer.device]
                buffer.ops.scaled_copy_(parts, parts, divisor=divisors[buffer.device], found_inf=found_inf)

        self._ranks.reduce(look)
        total = sum((move(s, device) for s in seen.values()), torch.zeros(1, dtype=torch.float64, device=device))[0]
        return total if measures else torch.where(total > 0, torch.inf, 0.0).double()

    @with_graph  # as where the user's own hooks would find it
    def _step_optimizer(self, optimizer: Optimizer, skips_itself: bool, may_skip: bool) -> None:
        if self._scaler.scaler is not None:
            self._scaler.step(optimizer, skips_itself)
        elif skips_itself or not may_skip or not self.was_skipped():
            optimizer.step()

    def _can_fold(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients are exactly this window's fp32 views, which no hook is to see averaged."""
        assert self._plan is not None
        return (
            self._store.result_dtype == torch.float32
            and not has_step_pre_hooks(optimizer)
            and self._plan.all_sums(optimizer)
        )

    def _finish(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        verdict: Verdict,
        divisor: Tensor | None,
        sums: Set[int] = frozenset(),
    ) -> Verdict:
        """Divide, hand out `.grad`, and tell the scaler the verdict.

        Args:
            window: What ends.
            optimizers: They step it.
            verdict: Of the window.
            divisor: None to leave all sums as they are.
            sums: ids of the tensors that get their sums undivided.
        """
        if divisor is not None:
            self._handout.divide(divisor, but=sums)
        overflow = self._handout.round()
        if overflow is not None and self._overflow is not None:
            verdict = verdict.with_overflow(self._ranks.maximum(overflow))
        averaged = window.phase is Phase.AVERAGED
        self.reached = any(1 in buffer.touched for buffer in self._store.buffers)
        window.finalize(verdict)
        skip = verdict.skip
        self._skipped, self._captured = skip, _is_capturing(skip)
        self.metrics.end_window(window.micro_batches, verdict.exact, self._loss_sums)
        if not self._withhold(window, optimizers):
            self._handout.assign_grads()
            window.handed_out = True
        for optimizer in optimizers:
            self._scaler.record(optimizer, skip, verdict.found_inf)
        if not averaged:  # else it was counted before it was saved
            self._noise.end_window(self._store.state(), skip, self._noise_sums)
        return verdict

    def _withhold(self, window: Window, optimizers: Sequence[Optimizer]) -> bool:
        """Whether no `.grad` is handed out at all, so that optimizers leave their state alone.

        That is so where the weights are known to sum to zero or the window was dropped, and where an overflow would
        leave the momentum of torch's fused SGD uninitialised, which is worth a synchronisation.
        """
        if window.known_empty:
            return True
        suspects = [o for o in optimizers if is_fused_sgd(o)]
        if not suspects:
            return False
        touched = {id(self._store.target(segment.param)) for _, segment in self._store.touched()}
        return any(lacks_momentum(o, touched) for o in suspects) and self.was_skipped()

    # ---- checkpoints

    def loss_sums(self) -> Tensor | None:
        """Those of the window that was finalized, of all ranks; see `WindowLoss.sums`."""
        return self._loss_sums()

    def state_dict(self) -> dict[str, Any]:
        """Plain values; synchronises."""
        norm = self.last_norm
        return {"step_was_skipped": self.was_skipped(), "last_norm": None if norm is None else norm.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._skipped, self._captured = state["step_was_skipped"], False
        norm = state["last_norm"]
        if norm is not None:
            norm = torch.tensor(norm, dtype=self._store.result_dtype, device=self._store.device)
        self.last_norm = norm


def _is_capturing(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing()
