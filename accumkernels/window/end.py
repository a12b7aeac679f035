"""The end of a window: decide on it, divide it, hand gradients to optimizers and the verdict to the scaler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import as_scalar
from ..buffers.flat import FlatBuffer
from ..buffers.parameters import move
from ..buffers.store import Store
from ..devices import is_capturing
from ..errors import logger, wrong_type
from ..ops.schema import VerdictField
from ..ranks.base import Ended, GlobalStats, LocalStats, Ranks
from .grad_scaler import LossScaler
from .noise_scale import NoiseMeter
from .optimizers import OptimizerSteps, owned
from .state import Outcome, Phase, Window
from .verdict import Verdict, WindowGrads, clip_coefficient

_log = logger(__name__)
_MANY_SKIPPED = 50  # windows in a row: a GradScaler that begins at 2**16 needs 40 at most to find a scale


class _Last(NamedTuple):
    """The last window that ended.

    Attributes:
        skipped: Whether its step was skipped; on the device until somebody reads it.
        captured: Whether that belongs to a CUDA graph, and changes with every replay.
        reached: Whether any rank had a gradient.
        micro_batches: Number of its `accumulate` calls.
        verdict: fp64, see `ops.schema.VerdictField`; nobody changes it any more. None: no window has ended.
        loss: See `WindowLoss.sums`; called when metrics are read.
        waited: See `Window`.
        norm: Its norm, if it was computed.
        counted: How many windows have ended, and were skipped, whose verdicts the host has.
        skipped_before: How many windows in a row before it took no step, as far as the host knows.
    """

    skipped: bool | Tensor = False
    captured: bool = False
    reached: bool = False
    micro_batches: int = 0
    verdict: Tensor | None = None
    loss: Callable[[], Tensor | None] = lambda: None
    waited: float = 0.0
    norm: Tensor | None = None
    counted: tuple[float, float] = (0.0, 0.0)
    skipped_before: int = 0


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
        last: The last window that ended.
        steps: Checks the optimizers before a window ends, then steps them.
    """

    def __init__(
        self, store: Store, ranks: Ranks, scaler: LossScaler | None, overflow: str | None, noise: NoiseMeter
    ) -> None:
        self.last_norm: Tensor | None = None
        self.steps = OptimizerSteps(store, scaler)
        self.last = _Last()
        self._graphs = False  # whether any window was captured: a graph holds addresses of buffers
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._overflow = overflow
        self._noise = noise
        self._limit: tuple[tuple[float, torch.device], Tensor] | None = None
        # Windows, and skipped windows, whose verdicts are on the device: fp64 [2], changed in place, so that a replayed
        # CUDA graph counts too.
        self._counts: Tensor | None = None
        if store.layout.device.type != "cpu":
            with torch.inference_mode(False):
                self._counts = torch.zeros(2, dtype=torch.float64, device=store.layout.device)

    def was_skipped(self) -> bool:
        """Whether the last step was skipped, read from the device at most once.

        In a CUDA graph it is read each time, since a replay changes it.
        """
        last = self.last
        if isinstance(last.skipped, Tensor) and is_capturing(last.skipped.device):
            raise RuntimeError(
                "whether to step must be read from the device, which the capture of a CUDA graph does not allow: "
                "use one of torch's fused optimizers (fused=True, capturable=True), after a warm-up window (AK24)"
            )
        skipped = bool(last.skipped)
        if not last.captured:
            self.last = last._replace(skipped=skipped)
        return skipped

    def divisor(self, window: Window, given: float | Tensor | None) -> Tensor | None:
        """Check the user's divisor; returns fp64 0-d on the first device, None for the sum of weights."""
        if window.phase is Phase.AVERAGED:
            return torch.ones((), dtype=torch.float64, device=self._store.layout.device)
        if given is None:
            return None
        scalar = as_scalar(given, "divisor", self._store.layout.device, allow_zero=False)
        if isinstance(scalar, Tensor):
            window.divide_on_device()
            return scalar
        return torch.full((), scalar, dtype=torch.float64, device=self._store.layout.device)

    def limit(self, max_norm: float | Tensor | None) -> Tensor | None:
        """Check the user's clipping norm; returns fp64 0-d on the first device, cached for a number."""
        if max_norm is None:
            return None
        device = self._store.layout.device
        if type(max_norm) is not float or self._limit is None or self._limit[0] != (max_norm, device):
            scalar = as_scalar(max_norm, "max_norm", device, allow_inf=True)
            if isinstance(scalar, Tensor):
                return scalar
            if self._limit is None or self._limit[0] != (scalar, device):
                with torch.inference_mode(False):
                    self._limit = (scalar, device), torch.full((), scalar, dtype=torch.float64, device=device)
        return self._limit[1]

    def finalize(self, window: Window, optimizers: Sequence[Optimizer], divisor: Tensor | None) -> None:
        """Average the sums and assign gradients."""
        verdict, ended = self._decide(window, optimizers, divisor, divides=True)
        divide_by = None if ended.divided else verdict.divisor
        self._finish(window, optimizers, verdict, ended, WindowGrads(self._store), divide_by)

    def skip_empty(self) -> None:
        """End a window without micro-batches, in a process that ends its windows alone."""
        verdict = torch.zeros(len(VerdictField), dtype=torch.float64, device=self._store.layout.device)
        verdict[: VerdictField.SKIP + 1] = 1
        self.last = _Last(skipped=True, verdict=verdict, counted=self._count(verdict)[0])

    def _count_skipped(self) -> int:
        """Count the windows in a row that took no step, of which the last is one, and warn when they become many."""
        if self.last.micro_batches == 0:
            return 0
        number = self.last.skipped_before + 1
        if number == _MANY_SKIPPED:
            _log.warning(
                "%d windows in a row took no step, so that nothing is trained: their gradients are not finite, or all "
                "their weights are 0. acc.overflow_report() names the parameters of the last bad micro-batch; "
                "acc.step_was_skipped and metrics() say it of a window",
                number,
            )
        return number

    def _count(self, verdict: Tensor) -> tuple[tuple[float, float], bool | Tensor]:
        """Count a window that ends; returns the counts that the host has, and whether the window was skipped."""
        ended, skipped = self.last.counted
        if verdict.is_cpu:  # a number costs a tenth of a tensor
            numbers = verdict.tolist()
            counted = ended + numbers[VerdictField.ENDED], skipped + numbers[VerdictField.SKIP]
            return counted, bool(numbers[VerdictField.SKIP])
        if self._counts is not None:
            self._counts.add_(verdict[VerdictField.ENDED : VerdictField.SKIP + 1])
        return (ended, skipped), verdict[VerdictField.SKIP]

    def metrics(self) -> dict[str, float | Tensor]:
        """Return what loggers want of the last window, and counts of all, in tensors of their own; nothing is read."""
        last = self.last
        ended = torch.tensor(last.counted, dtype=torch.float64, device="cpu")
        if self._counts is not None:
            ended = self._counts.clone()
        found: dict[str, float | Tensor] = {"windows": ended[0], "windows_skipped": ended[1]}
        if self._store.slots is not None:
            found["offload_wait"] = last.waited
        if last.verdict is not None:
            verdict, loss = last.verdict.clone(), last.loss()
            found["micro_batches"] = last.micro_batches
            found["micro_batches_used"], found["weight"] = verdict[VerdictField.USED], verdict[VerdictField.WEIGHT]
            found["found_inf"] = verdict[VerdictField.FOUND_INF].float()
            found["step_skipped"] = verdict[VerdictField.SKIP].float()
            if loss is not None:
                found["loss"] = loss[0] / loss[1]
            if last.norm is not None:
                found["grad_norm"] = last.norm.clone()
        return found

    def norm(self, norm_type: float) -> Tensor:
        """Compute the norm of the undivided sums, fp64 0-d."""
        return self._ranks.norm_to_clip(self._store.buffers, norm_type, self._store.layout.device)

    def result(self, norm: Tensor) -> Tensor:
        """Convert a norm to what the user gets."""
        self.last_norm = norm.to(self._store.layout.result_dtype)
        self.last = self.last._replace(norm=self.last_norm)
        return self.last_norm

    def results(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Convert the norms of parts to what the user gets; the last norm becomes their total norm."""
        if norms:
            self.result(torch.linalg.vector_norm(torch.stack(list(norms))))
        return [norm.to(self._store.layout.result_dtype) for norm in norms]

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
        averages = not folding and (max_norm is None or self._store.layout.rounds)
        verdict, ended = self._decide(window, optimizers, divisor, divides=averages, max_norm=max_norm, parts=parts)
        undivided = verdict  # decides on the undivided sums, whatever rounding does to them
        grads = WindowGrads(self._store)
        norms, coefficients = self._measure(parts, verdict, ended) if parts else ([], [])

        if averages:
            divide_by = None if ended.divided else verdict.divisor
            verdict = self._finish(window, optimizers, verdict, ended, grads, divide_by)
            if max_norm is not None:
                with window.changing():
                    grads.multiply(verdict.coefficient)
        for part, coefficient in zip(parts, coefficients, strict=True):
            with window.changing():
                grads.multiply(coefficient, part.ids)
        try:
            if not averages:
                some = len(folding) < len(optimizers)
                sums = {id(p) for p in owned(folding)} if some else frozenset()
                divide_by = undivided.divide_by if some else None
                verdict = self._finish(window, optimizers, verdict, ended, grads, divide_by, sums)
            asks = self._scaler is None and len(self.steps.plan.fused) < len(optimizers)
            # A window that was loaded may have overflowed where overflows are checked.
            may_skip = asks and (self._overflow is not None or window.may_be_empty or window.resumed)
            self.steps.run(optimizers, folding, verdict, may_skip and self.was_skipped())
        except BaseException:
            if folding and window.phase is Phase.FINALIZED:  # code that goes on finds averages, as of finalize()
                with window.changing():
                    grads.divide(undivided.divide_by, only={id(p) for p in owned(folding)})
            raise
        if self._scaler is not None:
            self._scaler.update(keep=verdict.empty if window.may_be_empty else None)
        found = verdict.exact if self._store.layout.result_dtype == torch.float64 else verdict.single
        return norms if parts else [found[VerdictField.NORM]]

    def _measure(self, parts: Sequence[Part], verdict: Verdict, ended: Ended) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the norm of each part's average, and its clipping coefficient."""
        norms = [
            self._ranks.total_norm(self._store.buffers, 2.0, self._store.layout.device, part.ids) for part in parts
        ]
        if not ended.divided:
            norms = [norm / verdict.divisor for norm in norms]
        return norms, [clip_coefficient(norm, part.max_norm) for norm, part in zip(norms, parts, strict=True)]

    def _decide(
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
        squares = None if window.squares is None else window.squares.sums(store.layout.device)
        touched = store.touched_bytes()
        if not self._graphs and is_capturing(state.device):
            self._graphs = True
            for buffer in store.buffers:
                buffer.expose().stay()
        # What frozen parameters could give back: nothing once a CUDA graph may hold its addresses.
        idle = b"" if self._graphs or window.phase is Phase.AVERAGED else store.idle(touched)
        report = LocalStats(
            state=state,
            touched=touched,
            dropped=window.dropped,
            squares=squares,
            weights=window.weights,
            divisor=divisor,
            weighed_after=window.weighed_after,
            micro_batches=window.micro_batches,
            window=window.number,
            resumed=window.resumed,
            loaded=window.loaded,
            loss=window.loss.sums,
            norms=1 + len(parts) if parts else int(max_norm is not None),
            limit=self.limit(sum(part.max_norm for part in parts)) if parts else max_norm,
            averaged=window.phase is Phase.AVERAGED,
            idle=idle,
            sent=window.sent,
        )
        inspector = Inspection(
            store,
            window,
            norm=functools.partial(self._ranks.total_norm, store.buffers, 2.0, store.layout.device),
            check=functools.partial(store.check_sums, window.micro_batches, checks),
            checks=checks,
            measures=max_norm is not None or squares is not None or (checks and not divides),
            divides=divides,
            unchecked=store.unchecked,
        )
        ended = self._ranks.end_window(report, inspector)
        stats = ended.stats
        if stats.loss is not None:
            window.loss.adopt(stats.loss)
        if stats.touched is not None:
            self.steps.refresh(optimizers)  # other ranks may have touched more parameters
        return Verdict(store.ops, stats.state, stats.divisor, ended.norm, max_norm, ended.overflow), ended

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
        averaged = window.phase is Phase.AVERAGED
        if self._store.layout.rounds:
            grads.allocate()  # out of memory here, the sums are as they were
        if divisor is not None:
            window.begin_ending()
            grads.divide(divisor, but=sums)
        rounds = self._store.layout.rounds
        if rounds or self._ranks.rounds:
            device = self._store.layout.device
            overflow = grads.round() if rounds else torch.zeros(1, dtype=torch.float64, device=device)
            if self._overflow is not None:
                verdict = verdict.with_overflow(self._ranks.maximum(overflow))
        skip = verdict.skip
        counted, skipped = self._count(verdict.exact)
        captured, reached = self._graphs and is_capturing(skip.device), 1 in self.steps.plan.touched
        about = window.micro_batches, verdict.exact, window.loss.sums, window.waited
        before = self._count_skipped() if self.last.skipped is True else 0  # a frame less for nearly all
        self.last = _Last(skipped, captured, reached, *about, counted=counted, skipped_before=before)
        # Set no `.grad`, so that optimizers leave their state alone, if the host knows that there is no weight, or if
        # an overflow would leave the momentum of torch's fused SGD undefined, which is worth a synchronisation.
        plan = self.steps.plan
        empty = window.dropped or window.host_weight == 0
        withholds = empty or (plan.fused_sgd and plan.lack_momentum() and self.was_skipped())
        window.finalize(Outcome(verdict, grads, ended.stats.idle), exposes=not withholds)
        if self._scaler is not None:
            for optimizer in optimizers:
                self._scaler.record(optimizer, skip, verdict.found_inf)
        if ended.squares is not None and not averaged:  # a loaded average was measured before it was saved
            self._noise.end_window(self._store.state(), skip, ended.squares)
        return verdict

    def succeed(self, before: End) -> None:
        """Go on from where another one has stopped."""
        self.last, self.last_norm, self._counts = before.last, before.last_norm, before._counts

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain values; synchronises."""
        norm = self.last_norm
        return {"step_was_skipped": self.was_skipped(), "last_norm": None if norm is None else norm.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self.last = self.last._replace(skipped=state["step_was_skipped"], captured=False, reached=False)
        norm = state["last_norm"]
        if norm is not None:
            norm = torch.tensor(norm, dtype=self._store.layout.result_dtype, device=self._store.layout.device)
        self.last_norm = norm


# ---- A user's selection of an accumulator's parameters, to clip together or to exempt from ownership


class Part(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        ids: `id`s of the parameters and of their masters.
        max_norm: Largest 2-norm of their averaged gradient.
    """

    ids: Set[int]
    max_norm: float | Tensor


def read_parts(max_norm: Sequence[Any], store: Store) -> list[Part]:
    """Read `step`'s `max_norm` given as a list of (parameters, number).

    Raises:
        TypeError, ValueError: names the wrong entry.
    """
    parts: list[Part] = []
    taken: set[int] = set()
    for index, entry in enumerate(max_norm):
        name = f"max_norm[{index}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise wrong_type(name, "a pair (parameters, max_norm)", entry)
        ids = select(entry[0], name, store)
        for named in store.named if taken & ids else ():
            if id(named.param) in taken & ids:
                raise ValueError(f"{name}: {named.name!r} is in an entry before it; a gradient is clipped once")
        taken |= ids
        parts.append(Part(ids, as_scalar(entry[1], name, store.layout.device, allow_inf=True)))
    return parts


def select(params: Tensor | Iterable[Tensor], name: str, store: Store) -> Set[int]:
    """Return the `id`s of parameters and of their masters; the user may pass either.

    Args:
        params: One or more tensors.
        name: The argument's name, for messages.
        store: The accumulator's store.

    Raises:
        TypeError: `params` is neither, or holds something else.
        ValueError: a tensor does not belong to this accumulator.
    """
    if not isinstance(params, Iterable):
        raise wrong_type(name, "an iterable of parameters", params)
    known = {id(t): entry.param for entry in store.named for t in (entry.param, store.target(entry.param))}
    found: set[int] = set()
    for p in [params] if isinstance(params, Tensor) else params:
        if not isinstance(p, Tensor):
            raise wrong_type(f"{name}: a parameter", "a tensor", p)
        if id(p) not in known:
            raise ValueError(f"{name}: a tensor of shape {tuple(p.shape)} is not one of the accumulator's parameters")
        param = known[id(p)]
        found |= {id(param), id(store.target(param))}
    return found


# ---- The checks, norms and divisions of a window's sums while it ends


@dataclass
class Inspection:
    """Inspects the sums of one window; ranks decide when (`ranks.base.Look`).

    Args:
        store: Holds the sums.
        window: The window of the sums.
        norm: Computes the norm of the undivided sums of all ranks, fp64 0-d.
        check: Looks for overflows in unchecked sums; see `Store.check_sums`.
        checks: Whether an overflow matters.
        measures: Whether to measure reduced sums before they are divided.
        divides: Whether to divide them at once.
        unchecked: Whether anything was added to the sums without a check.
    """

    store: Store
    window: Window
    norm: Callable[[], Tensor]
    check: Callable[[Tensor | None], Tensor]
    checks: bool
    measures: bool
    divides: bool
    unchecked: bool
    _seen: dict[torch.device, Tensor] = field(default_factory=dict, init=False)
    _divisors: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    def begin_reducing(self) -> None:
        """Note that from here on, a failure loses the sums."""
        self.window.begin_ending()
        self._seen = {d: torch.zeros(1, dtype=torch.float64, device=d) for d in self.store.states}

    def adopt(self, stats: GlobalStats) -> None:
        """Take over all ranks' statistics of the window."""
        self.window.adopt(stats)
        self.store.adopt(stats.state, stats.touched)
        if self._seen and self.divides:
            divisor = Verdict(self.store.ops, stats.state, stats.divisor).divisor
            self._divisors = {d: move(divisor, d) for d in self.store.states}

    def inspect(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
        """Inspect these parts of sums, which are reduced."""
        seen = self._seen[buffer.device]
        if self.measures:
            buffer.ops.norm_(seen, parts)
        if self.divides:
            found_inf = None if self.measures else seen
            buffer.ops.scaled_copy_(parts, parts, divisor=self._divisors[buffer.device], found_inf=found_inf)

    def squared_norm(self) -> Tensor:
        """Return the squared norm of everything seen, fp64 0-d.

        If nothing was measured, the dividing pass gives what matters: inf where a quotient is not finite, else 0.
        """
        device = self.store.layout.device
        parts = (move(seen, device) for seen in self._seen.values())
        total = sum(parts, torch.zeros(1, dtype=torch.float64, device=device))[0]
        return total if self.measures else torch.where(total > 0, torch.inf, 0.0).double()
