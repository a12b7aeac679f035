"""The end of a window: judge it, divide it, hand gradients to optimizers and the verdict to the scaler."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import as_scalar
from ..buffers.store import Store
from ..ops.schema import Judged
from ..ranks.base import Ended, LocalStats, Ranks
from .grad_scaler import LossScaler
from .grads import WindowGrads, clip_coefficient
from .inspection import Inspection
from .noise_scale import NoiseMeter
from .optimizer_steps import OptimizerSteps
from .optimizers import owned
from .selection import Part
from .state import Phase, Window
from .verdict import Metrics, Verdict


class End:
    """Ends the windows of one accumulator.

    Args:
        store: Flat buffers and states.
        ranks: Judge and reduce windows together.
        scaler: Gets the verdict.
        overflow: FusedAccumulator's argument.
        noise: Measures every window.

    Attributes:
        last_norm: The last norm computed.
        reached: Whether any rank had a gradient in the last window that ended.
        metrics: Metrics of the last window that ended.
        steps: Checks the optimizers before a window ends, then steps them.
    """

    def __init__(self, store: Store, ranks: Ranks, scaler: LossScaler, overflow: str | None, noise: NoiseMeter) -> None:
        self.last_norm: Tensor | None = None
        self.reached = False
        self.metrics = Metrics(store.device)
        self.steps = OptimizerSteps(store, scaler)
        self._skipped: bool | Tensor = False  # whether the last step was skipped; on the device until somebody reads it
        self._captured = False  # whether `_skipped` belongs to a CUDA graph and changes with every replay
        self._graphs = False  # whether any window was captured: a graph holds addresses of buffers
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._limit: tuple[tuple[float, torch.device], Tensor] | None = None

    def was_skipped(self) -> bool:
        """Whether the last step was skipped, read from the device at most once.

        In a CUDA graph it is read each time, since a replay changes it.
        """
        if isinstance(self._skipped, Tensor) and _captures(self._skipped):
            raise RuntimeError(
                "whether to step must be read from the device, which the capture of a CUDA graph does not allow: "
                "use one of torch's fused optimizers (fused=True, capturable=True), after a warm-up window"
            )
        skipped = bool(self._skipped)
        if not self._captured:
            self._skipped = skipped
        return skipped

    def divisor(self, window: Window, given: float | Tensor | None) -> Tensor | None:
        """Check the user's divisor; returns fp64 0-d on the first device, None for the sum of weights."""
        if window.phase is Phase.AVERAGED:
            return torch.ones((), dtype=torch.float64, device=self._store.device)
        if given is None:
            return None
        scalar = as_scalar(given, "divisor", self._store.device, allow_zero=False)
        if isinstance(scalar, Tensor):
            window.divide_on_device()
            return scalar
        return torch.full((), scalar, dtype=torch.float64, device=self._store.device)

    def limit(self, max_norm: float | Tensor | None) -> Tensor | None:
        """Check the user's clipping norm; returns fp64 0-d on the first device, cached for a number."""
        if max_norm is None:
            return None
        device = self._store.device
        if type(max_norm) is not float or self._limit is None or self._limit[0] != (max_norm, device):
            scalar = as_scalar(max_norm, "max_norm", device, allow_inf=True)
            if isinstance(scalar, Tensor):
                return scalar
            if self._limit is None or self._limit[0] != (scalar, device):
                with torch.inference_mode(False):
                    self._limit = (scalar, device), torch.full((), scalar, dtype=torch.float64, device=device)
        return self._limit[1]

    def finalize(self, window: Window, optimizers: Sequence[Optimizer], divisor: Tensor | None) -> None:
        """Average the sums and hand out gradients."""
        verdict, ended = self._judge(window, optimizers, divisor, divides=True)
        divide_by = None if ended.divided else verdict.divisor
        self._finish(window, optimizers, verdict, ended, WindowGrads(self._store), divide_by)

    def skip_empty(self) -> None:
        """End a window without micro-batches, in a process that ends its windows alone."""
        self._skipped = True
        self.metrics.end_empty_window()

    def norm(self, norm_type: float) -> Tensor:
        """Compute the norm of the undivided sums, fp64 0-d."""
        return self._ranks.norm_to_clip(self._store.buffers, norm_type, self._store.device)

    def result(self, norm: Tensor) -> Tensor:
        """Convert a norm to what the user gets."""
        self.last_norm = norm.to(self._store.result_dtype)
        self.metrics.see_norm(self.last_norm)
        return self.last_norm

    def results(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Convert the norms of parts to what the user gets; the last norm becomes their total norm."""
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
        """Average, clip, step all optimizers or none, update the scale; returns the parts' norms, or the total norm."""
        folding = self.steps.plan.folding()  # these get the undivided sums; the others get averages
        # Divide the window while it is reduced if every sum must be divided. A clipped window is divided once, by
        # divisor and coefficient together; but a rounded mean may overflow whether it is clipped or not.
        averages = not folding and (max_norm is None or self._store.rounds)
        verdict, ended = self._judge(window, optimizers, divisor, divides=averages, max_norm=max_norm, parts=parts)
        judged = verdict  # judges the undivided sums, whatever rounding does to them
        grads = WindowGrads(self._store)
        norms, coefficients = self._measure(parts, verdict, ended) if parts else ([], [])

        if averages:
            divide_by = None if ended.divided else verdict.divisor
            verdict = self._finish(window, optimizers, verdict, ended, grads, divide_by)
            if max_norm is not None:
                grads.multiply(verdict.coefficient)
        for part, coefficient in zip(parts, coefficients, strict=True):
            grads.multiply(coefficient, part.ids)
        if not averages:
            some = len(folding) < len(optimizers)
            sums = {id(p) for p in owned(folding)} if some else frozenset()
            divide_by = judged.divide_by if some else None
            verdict = self._finish(window, optimizers, verdict, ended, grads, divide_by, sums)

        asks = self._scaler.scaler is None and len(self.steps.plan.fused) < len(optimizers)
        try:
            may_skip = asks and (self._overflow is not None or window.may_be_empty)
            self.steps.run(optimizers, folding, verdict, may_skip and self.was_skipped())
        except BaseException:
            if folding:  # code that goes on by hand finds the averaged gradients that finalize() promises
                grads.divide(judged.divide_by, only={id(p) for p in owned(folding)})
            raise
        if self._scaler.scaler is not None:
            self._scaler.update(keep=verdict.empty if window.may_be_empty else None)
        found = verdict.exact if self._store.result_dtype == torch.float64 else verdict.single
        return norms if parts else [found[Judged.NORM]]

    def _measure(self, parts: Sequence[Part], verdict: Verdict, ended: Ended) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the norm of each part's average, and its clipping coefficient."""
        norms = [self._ranks.total_norm(self._store.buffers, 2.0, self._store.device, part.ids) for part in parts]
        if not ended.divided:
            norms = [norm / verdict.divisor for norm in norms]
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
    ) -> tuple[Verdict, Ended]:
        """Judge the window together with all ranks, which reduce its sums if they have not yet.

        With `divides`, reduced sums are divided at once. Their average is clipped to `max_norm`, or each of `parts` by
        its own norm.
        """
        store, checks = self._store, self._overflow is not None
        state = store.state()
        squares = self._noise.sums(store.device) if self._noise.measuring else None
        report = LocalStats(
            state=state,
            touched=store.touched_bytes(),
            dropped=window.dropped,
            squares=squares,
            divisor=divisor,
            weighed_after=window.weighed_after,
            micro_batches=window.micro_batches,
            window=window.number,
            resumed=window.resumed,
            loss=window.loss.sums,
            norms=1 + len(parts) if parts else int(max_norm is not None),
            limit=self.limit(sum(part.max_norm for part in parts)) if parts else max_norm,
            averaged=window.phase is Phase.AVERAGED,
            idle=self._idle(window, state),
        )
        look = Inspection(
            store,
            window,
            norm=functools.partial(self._ranks.total_norm, store.buffers, 2.0, store.device),
            check=functools.partial(store.check_sums, window.micro_batches, checks),
            checks=checks,
            measures=max_norm is not None or squares is not None or (checks and not divides),
            divides=divides,
            unchecked=store.unchecked,
        )
        ended = self._ranks.end_window(report, look)
        stats = ended.stats
        if stats.loss is not None:
            window.loss.agree(stats.loss)
        if stats.touched is not None:
            self.steps.refresh(optimizers)  # other ranks may have touched more parameters
        return Verdict(store.ops, stats.state, stats.divisor, ended.norm, max_norm, ended.overflow), ended

    def _idle(self, window: Window, state: Tensor) -> bytes:
        """Find what frozen parameters could give back; nothing once a CUDA graph may hold its addresses."""
        self._graphs = self._graphs or _captures(state)
        return b"" if self._graphs or window.phase is Phase.AVERAGED else self._store.idle()

    def _finish(
        self,
        window: Window,
        optimizers: Sequence[Optimizer],
        verdict: Verdict,
        ended: Ended,
        grads: WindowGrads,
        divisor: Tensor | None,
        sums: Set[int] = frozenset(),
    ) -> Verdict:
        """Divide all but `sums` (ids of tensors) by `divisor`, set `.grad`, and give the scaler the verdict."""
        if divisor is not None:
            grads.divide(divisor, but=sums)
        if self._store.rounds:
            overflow = grads.round()
            if self._overflow is not None:
                verdict = verdict.with_overflow(self._ranks.maximum(overflow))
        averaged, skip = window.phase is Phase.AVERAGED, verdict.skip
        self.reached = 1 in self._store.touched_bytes()
        window.finalize(verdict, grads, ended.stats.idle)
        self._skipped, self._captured = skip, _captures(skip)
        self.metrics.end_window(window.micro_batches, verdict.exact, window.loss.sums)
        # Set no `.grad`, so that optimizers leave their state alone, if the host knows that there is no weight, or if
        # an overflow would leave the momentum of torch's fused SGD undefined, which is worth a synchronisation.
        plan = self.steps.plan
        if not window.known_empty and not (plan.fused_sgd and plan.lack_momentum() and self.was_skipped()):
            window.hand_out()
        if self._scaler.scaler is not None:
            for optimizer in optimizers:
                self._scaler.record(optimizer, skip, verdict.found_inf)
        if ended.squares is not None and not averaged:  # a loaded average was measured before it was saved
            self._noise.end_window(self._store.state(), skip, ended.squares)
        return verdict

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; synchronises."""
        norm = self.last_norm
        return {"step_was_skipped": self.was_skipped(), "last_norm": None if norm is None else norm.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self._skipped, self._captured = state["step_was_skipped"], False
        norm = state["last_norm"]
        if norm is not None:
            norm = torch.tensor(norm, dtype=self._store.result_dtype, device=self._store.device)
        self.last_norm = norm


def _captures(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
