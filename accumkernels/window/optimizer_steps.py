"""The optimizers of a window: the checks before it ends, the plan made from them alone, and their steps."""

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
    """Maps parameters to optimizers, and finds the optimizers that can take undivided sums.

    The plan is made once for optimizers, their param groups and the parameters touched; later windows only check it.

    Args:
        store: Flat buffers and masters.
        optimizers: All optimizers that step the window; none for an update by hand.
        ignored: `id`s of parameters that need no optimizer.

    Attributes:
        foreign_params: Tensors of the optimizers that this accumulator does not accumulate.
        fused: torch's own fused optimizers, which scale gradients and skip steps themselves.
        fused_sgd: The SGDs among `fused`.

    Raises:
        RuntimeError: names the first accumulated parameter that none of them, or more than one, owns.
    """

    def __init__(self, store: Store, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        self._store = store
        self._named = tuple(optimizers)
        self._ignored = ignored
        self._owned = owned(optimizers)
        self._touched = store.touched_bytes()
        self._layout = store.layout
        if optimizers:  # without any, the caller updates parameters by hand
            touched = {id(s.param) for _, s in store.touched()}
            named = ((e.name, store.target(e.param)) for e in store.named if id(e.param) in touched)
            check_ownership(optimizers, named, ignored)
        self.foreign_params = [p for p in self._owned if store.place(p) is None]
        self.fused = [o for o in optimizers if steps_scaled_gradients(o)]
        self.fused_sgd = [o for o in optimizers if is_fused_sgd(o)]
        self._fp32 = [  # optimizers with only fp32 sums, and the tensors whose `.grad` must be None for that
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
            and self._store.layout == self._layout
            and self._store.touched_bytes() == self._touched
            and ignored == self._ignored
        )

    def folding(self) -> list[Optimizer]:
        """List the optimizers that average and clip in their own pass.

        All gradients that they will find are fp32 sums of this window, and no hook should see averages.
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
        """Whether a fused SGD is about to create a parameter's momentum, which stays undefined if it skips."""
        touched = {id(self._store.target(segment.param)) for _, segment in self._store.touched()}
        return any(lacks_momentum(o, touched) for o in self.fused_sgd)


class OptimizerSteps:
    """Checks and steps the optimizers of one accumulator's windows.

    Args:
        store: Flat buffers and masters.
        scaler: Steps the optimizers, if there is one.

    Attributes:
        plan: The plan for the optimizers that were checked last.
    """

    plan: StepPlan

    def __init__(self, store: Store, scaler: LossScaler) -> None:
        self._store = store
        self._scaler = scaler
        self._ignored: Set[int] = frozenset()
        self._checked: tuple[object, ...] = ()  # the calling method, and the optimizers that it can drive
        self.plan = StepPlan(store, ())

    def check(self, caller: str, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        """Refuse to end a window whose gradients would be wrong or lost, or which no optimizer would step.

        Args:
            caller: The method's name, for messages.
            optimizers: All optimizers that step this window; none for `finalize` and an update by hand.
            ignored: `id`s of parameters that need no optimizer.

        Raises:
            TypeError: an argument is no optimizer, or one that a trainer has wrapped.
            RuntimeError: says what is wrong, and names the parameter.
        """
        if (caller, *optimizers) != self._checked:
            self._check_kinds(caller, optimizers)
        self._store.check_drift()
        if self._store.masters is not None and caller != "step()":
            self._store.masters.take_over()  # hooks on the step do so too, but before a closure, and not if compiled
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
        """Make a new plan if the old one does not fit."""
        if not self.plan.fits(optimizers, self._ignored):
            self.plan = StepPlan(self._store, optimizers, self._ignored)

    @with_graph  # the optimizers' hooks then find the mode that they expect
    def run(
        self, optimizers: Sequence[Optimizer], folding: Sequence[Optimizer], verdict: Verdict, skipped: bool
    ) -> None:
        """Step the optimizers in the given order.

        Args:
            optimizers: The checked optimizers.
            folding: Those of them that get undivided sums, and the divisor.
            verdict: The window's verdict, for optimizers that skip by themselves.
            skipped: Whether to skip the others, if no scaler knows.
        """
        fused, scaled = self.plan.fused, self._scaler.scaler is not None
        surely = is_known_zero(verdict.skip)
        masters = self._store.masters
        try:
            if masters is not None:
                masters.begin_steps()
            for optimizer in fused:
                scale = verdict.single[Judged.DIVIDE_BY] if optimizer in folding else None
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                if not surely:  # set it also for a scaler whose own `step` does not
                    optimizer.found_inf = verdict.skip.clone()  # type: ignore[attr-defined]
            for optimizer in optimizers:
                if scaled:
                    self._scaler.step(optimizer, optimizer in fused)
                elif optimizer in fused or not skipped:
                    optimizer.step()
        finally:
            if masters is not None:
                masters.end_steps()
            for optimizer in fused:
                for name in ("grad_scale", "found_inf"):
                    vars(optimizer).pop(name, None)
