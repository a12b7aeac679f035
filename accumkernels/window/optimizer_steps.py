"""The optimizers of a window: what is refused before it ends, what follows from them alone, and their steps."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from operator import is_, itemgetter

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..boundary import with_graph
from ..buffers.store import Store, has_accumulator
from ..hooks import has_global_step_pre_hooks
from ..ops.schema import Judged
from .grad_scaler import LossScaler
from .optimizers import (
    check_no_closure,
    check_optimizer,
    check_ownership,
    is_fused_sgd,
    lacks_momentum,
    owned,
    steps_scaled_gradients,
)
from .verdict import Verdict, is_known_zero

_params_of = itemgetter("params")


class StepPlan:
    """Who owns what, and who can take sums as they are.

    Made once for optimizers, their param groups and the parameters touched; later windows only see that it fits.

    Args:
        store: Flat buffers and masters.
        optimizers: All optimizers that step the window; none for an update by hand.
        ignored: `id`s of parameters that need no optimizer.

    Attributes:
        foreign_params: Tensors of the optimizers that are not accumulated here.
        fused: Those of torch's own fused optimizers, which scale gradients themselves and skip by themselves.
        fused_sgd: Those of them that are SGD.

    Raises:
        RuntimeError: names the first parameter that was accumulated and that none of them, or more than one, owns.
    """

    def __init__(self, store: Store, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        self._store = store
        self._named = tuple(optimizers)
        self._ignored = ignored
        self._owned = owned(optimizers)
        self._touched = store.touched_bytes()
        if optimizers:  # else, whoever asked for that updates parameters by hand
            touched = {id(s.param) for _, s in store.touched()}
            named = ((e.name, store.target(e.param)) for e in store.named if id(e.param) in touched)
            check_ownership(optimizers, named, ignored)
        self.foreign_params = [p for p in self._owned if store.place(p) is None]
        self.fused = [o for o in optimizers if steps_scaled_gradients(o)]
        self.fused_sgd = [o for o in optimizers if is_fused_sgd(o)]
        self._fp32 = [  # with what must have no gradient for all that they find to be sums of the window
            (o, [p for p in owned((o,)) if store.place(p) is None])
            for o in self.fused
            if all(p.dtype == torch.float32 for p in owned((o,)) if store.place(p))
        ]

    def fits(self, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> bool:
        """Whether the same optimizers own the same tensors, and the same segments hold sums."""
        if len(optimizers) != len(self._named) or not all(map(is_, optimizers, self._named)):
            return False
        found: list[Tensor] = []
        for optimizer in optimizers:
            found += chain.from_iterable(map(_params_of, optimizer.param_groups))
        return (
            len(found) == len(self._owned)
            and all(map(is_, found, self._owned))
            and self._store.touched_bytes() == self._touched
            and ignored == self._ignored
        )

    def folding(self) -> list[Optimizer]:
        """Those that average and clip in their own pass.

        All gradients that they will find are fp32 sums of this window, and no hook is to see averages.
        """
        folding: list[Optimizer] = []
        if not self._fp32 or self._store.result_dtype != torch.float32 or has_global_step_pre_hooks():
            return folding
        for optimizer, foreign_params in self._fp32:
            for p in foreign_params:
                if p.grad is not None:
                    break
            else:
                if not optimizer._optimizer_step_pre_hooks:
                    folding.append(optimizer)
        return folding

    def lack_momentum(self) -> bool:
        """Whether a fused SGD is about to make the momentum of a parameter, which it leaves undefined if it skips."""
        touched = {id(self._store.target(segment.param)) for _, segment in self._store.touched()}
        return any(lacks_momentum(o, touched) for o in self.fused_sgd)


class OptimizerSteps:
    """Checks and steps the optimizers of one accumulator's windows.

    Args:
        store: Flat buffers and masters.
        scaler: Steps them, where there is one.

    Attributes:
        plan: Of the optimizers that were checked last.
    """

    plan: StepPlan

    def __init__(self, store: Store, scaler: LossScaler) -> None:
        self._store = store
        self._scaler = scaler
        self._ignored: Set[int] = frozenset()
        self._checked: tuple[object, ...] = ()  # the caller, and the optimizers that it can drive
        self.plan = StepPlan(store, ())

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
        if (caller, *optimizers) != self._checked:
            self._check_kinds(caller, optimizers)
        self._store.check_drift()
        if self._scaler.scaler is not None:
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
        self._ignored = ignored
        self.refresh(optimizers)
        for p in self.plan.foreign_params:
            if p.grad is not None and not has_accumulator(p):
                raise RuntimeError(
                    f"{caller}: an optimizer owns a parameter of shape {tuple(p.shape)} with a .grad of its own and "
                    "no accumulator; it would be stepped as it is, scaled and not averaged. Give all parameters of the "
                    "optimizer to the accumulator, or build an optimizer for each"
                )

    def _check_kinds(self, caller: str, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and (caller == "step()" or self._scaler.scaler is not None):
            why = "" if caller == "step()" else ": GradScaler keeps the verdict of a window by optimizer"
            raise TypeError(f"{caller} needs the optimizers that will step this window{why}")
        for optimizer in optimizers:
            check_optimizer(optimizer, caller)
            if caller == "step()":
                check_no_closure(optimizer)
        self._checked = (caller, *optimizers)

    def refresh(self, optimizers: Sequence[Optimizer]) -> None:
        """Plan anew where the plan does not fit."""
        if not self.plan.fits(optimizers, self._ignored):
            self.plan = StepPlan(self._store, optimizers, self._ignored)

    @with_graph  # as where the user's own hooks would find it
    def run(
        self, optimizers: Sequence[Optimizer], folding: Sequence[Optimizer], verdict: Verdict, skipped: bool
    ) -> None:
        """Step them, in the order given.

        Args:
            optimizers: Those that were checked.
            folding: Those of them that get sums as they are, and what to divide these by.
            verdict: Of the window, for those that skip by themselves.
            skipped: For the others, where there is no scaler that knows.
        """
        fused, scaled = self.plan.fused, self._scaler.scaler is not None
        surely = is_known_zero(verdict.skip)
        try:
            for optimizer in fused:
                scale = verdict.single[Judged.DIVIDE_BY] if optimizer in folding else None
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                if not surely:  # also for a scaler whose own `step` does not set it
                    optimizer.found_inf = verdict.skip.clone()  # type: ignore[attr-defined]
            for optimizer in optimizers:
                if scaled:
                    self._scaler.step(optimizer, optimizer in fused)
                elif optimizer in fused or not skipped:
                    optimizer.step()
        finally:
            for optimizer in fused:
                for name in ("grad_scale", "found_inf"):
                    vars(optimizer).pop(name, None)
