"""The optimizers of a window: facts about them, the checks before it ends, the plan, and their steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from numbers import Real
from operator import is_, itemgetter, methodcaller

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..buffers.store import Store, has_accumulator
from ..errors import expect, logger, short
from ..hooks import has_global_step_pre_hooks
from ..ops.schema import VerdictField
from .grad_scaler import LossScaler
from .verdict import Verdict, is_known_zero

_log = logger(__name__)

# ---- Facts about the optimizers that step FusedAccumulator's windows

_UNWRAP = "or pass the optimizer it wraps (`optimizer.optimizer`)"
# Wrappers that decide themselves when to step: the module that they are in or below (the first that fits counts), what
# to do instead.
_TRAINERS = {
    "accelerate": f"let accumkernels.integrations.accelerate.Accelerator prepare it, {_UNWRAP}",
    "lightning.fabric": "pass the optimizer it wraps (`optimizer.optimizer`)",
    "lightning": f"give the Trainer accumkernels.integrations.lightning.FusedAccumulation, {_UNWRAP}",
    "lightning_fabric": "pass the optimizer it wraps (`optimizer.optimizer`)",
    "pytorch_lightning": (
        f"with `lightning`, give the Trainer accumkernels.integrations.lightning.FusedAccumulation, {_UNWRAP}"
    ),
    "deepspeed": "DeepSpeed accumulates gradients itself and cannot be combined with FusedAccumulator",
}

# Methods of LOMO, AdaLomo and their relatives.
_STEPS_IN_BACKWARD = ("fused_backward", "fuse_update")


@functools.cache  # 25 microseconds each, and two calls per step
def _step_parameters(optimizer_class: type[Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(optimizer_class.step).parameters


def check_optimizer(optimizer: object, caller: str) -> None:
    """Refuse objects that are no torch optimizer, and optimizers that a trainer has wrapped or that step in backward.

    Raises:
        TypeError: says what was passed, and what to pass instead.
    """
    module = type(optimizer).__module__
    package = module.partition(".")[0]
    advice = next((advice for name, advice in _TRAINERS.items() if f"{module}.".startswith(f"{name}.")), None)
    if advice is not None and hasattr(optimizer, "optimizer"):
        raise TypeError(f"{caller}: {type(optimizer).__qualname__} of {package} wraps an optimizer; {advice} (AK22)")
    if isinstance(optimizer, Real | Tensor):
        option = "max_norm" if caller == "step()" else "divisor"
        raise TypeError(
            f"{caller}: {short(optimizer)} is not an optimizer: write acc.{caller[:-1]}optimizer, "
            f"{option}={short(optimizer)})"
        )
    if isinstance(optimizer, list | tuple):
        raise TypeError(f"{caller}: name optimizers one by one, as {caller[:-1]}first, second), not in a list")
    if any(hasattr(optimizer, name) for name in _STEPS_IN_BACKWARD):
        raise TypeError(
            f"{caller}: {type(optimizer).__qualname__} steps while backward runs, in every micro-batch, and keeps no "
            "gradient that could be accumulated: train without FusedAccumulator, or with another optimizer"
        )
    looks_like_one = hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad")
    if looks_like_one and not isinstance(optimizer, Optimizer | type):
        wrapped = (name for name in ("opt", "optimizer") if isinstance(getattr(optimizer, name, None), Optimizer))
        name = next(wrapped, None)
        raise TypeError(
            f"{caller}: {type(optimizer).__qualname__} of {package} is not a torch.optim.Optimizer. End the window by "
            "acc.finalize() without it, then call its own step() if acc.step_was_skipped is False, then acc.zero_()"
            + ("" if name is None else f"; or pass the torch optimizer that it wraps, its attribute {name!r}")
            + " (AK23)"
        )
    expect(optimizer, Optimizer, f"{caller}: optimizer", "a torch.optim.Optimizer")


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = _step_parameters(type(optimizer)).get("closure")  # type: ignore[arg-type]
    return closure is not None and closure.default is inspect.Parameter.empty


def may_call_closure(optimizer: Optimizer) -> bool:
    """Whether `step` takes a closure, and may call it without asking whether there is one: torch's own ask."""
    kind = type(optimizer)
    return "closure" in _step_parameters(kind) and not kind.__module__.startswith("torch.optim.")  # type: ignore[arg-type]


def check_no_closure(optimizer: Optimizer) -> None:
    """Refuse optimizers whose `step` must evaluate the loss itself.

    Raises:
        TypeError: shows the long form.
    """
    if needs_closure(optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            f"step() cannot drive {type(optimizer).__name__}, whose step takes a closure. Inside it, the long form:\n"
            "    def closure():\n"
            "        acc.zero_()\n"
            "        for x, y in window:\n"
            "            loss = loss_fn(model(x), y)\n"
            "            acc.backward(loss)\n"
            "        acc.finalize(optimizer)\n"
            "        return loss\n"
            "    optimizer.step(closure)"
        )


def owned(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """List all parameters in the optimizers' groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def check_ownership(optimizers: Sequence[Optimizer], targets: Iterable[tuple[str, Tensor]], ignored: Set[int]) -> None:
    """Check that exactly one of the optimizers steps each accumulated parameter.

    Args:
        optimizers: The arguments of `finalize` or `step`.
        targets: Name and tensor that an optimizer must own, for every parameter accumulated in this window.
        ignored: `id`s of those that need no optimizer.

    Raises:
        RuntimeError: names the first parameter that none, or more than one, owns.
    """
    owners: dict[int, int] = {}
    for p in owned(optimizers):
        owners[id(p)] = owners.get(id(p), 0) + 1
    for name, target in targets:
        n = owners.get(id(target), 0)
        if n > 1 or (n == 0 and id(target) not in ignored):
            how = "no optimizer" if n == 0 else "more than one optimizer"
            raise RuntimeError(
                f"{how} named in finalize() or step() owns {name!r}, whose gradient was accumulated; build the "
                "optimizers over acc.parameters() and name all of them together"
                + (", or name what is meant to stay as it is: ignore=[parameter]" if n == 0 else "")
                + " (AK18)"
            )


def steps_scaled_gradients(optimizer: Optimizer) -> bool:
    """Whether `step` takes `optimizer.grad_scale` and `optimizer.found_inf`: torch's own fused optimizers."""
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and type(optimizer).__module__.startswith("torch.optim.")
        and "grad_scaler" not in _step_parameters(type(optimizer))  # type: ignore[arg-type]
        and not _is_patched(optimizer)
    )


def _is_patched(optimizer: Optimizer) -> bool:
    """Whether this optimizer alone has another `step`, whose code may look for averages; a scheduler's only counts."""
    step = vars(optimizer).get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", step)
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


# ---- The optimizers of a window: the checks before it ends, the plan made from them alone, and their steps

_params_of = itemgetter("params")
_own_step = methodcaller("get", "step")  # of an optimizer's attributes: None where its `step` is the class's


class StepPlan:
    """Maps parameters to optimizers, and finds the optimizers that can take undivided sums.

    The plan is made once for optimizers, their param groups and the parameters touched; later windows only check it.

    Args:
        store: Flat buffers and masters.
        optimizers: All optimizers that step the window; none for an update by hand.
        ignored: `id`s of parameters that need no optimizer.

    Attributes:
        ignored: As the argument.
        touched: For each segment, in the order of buffers, 1 if it holds a sum of the window.
        is_seen: Whether hooks show each step: not those of an update by hand, and of wrappers as most Lookaheads are,
            which do not call `Optimizer.__init__`.
        foreign_params: Tensors of the optimizers that this accumulator does not accumulate.
        fused: torch's own fused optimizers, which scale gradients and skip steps themselves.
        fused_sgd: torch's own SGDs in one kernel, also with a `step` that was patched.

    Raises:
        RuntimeError: names the first accumulated parameter that none of them, or more than one, owns.
    """

    def __init__(self, store: Store, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        self._store = store
        self._named = tuple(optimizers)
        self._steps = list(map(_own_step, map(vars, optimizers)))
        self.ignored = ignored
        self._owned = owned(optimizers)
        self.touched = store.touched_bytes()
        self._layout = store.layout
        if optimizers:  # without any, the caller updates parameters by hand
            touched = {id(s.param) for _, s in store.touched()}
            named = ((e.name, store.target(e.param)) for e in store.named if id(e.param) in touched)
            check_ownership(optimizers, named, ignored)
        self.foreign_params = [p for p in self._owned if store.segment_of(p) is None]
        self.is_seen = bool(optimizers) and all(getattr(type(o).step, "hooked", False) for o in optimizers)
        self.fused = [o for o in optimizers if steps_scaled_gradients(o)]
        self.fused_sgd = [
            o for o in optimizers if isinstance(o, torch.optim.SGD) and getattr(o, "_step_supports_amp_scaling", False)
        ]
        self._fp32 = [  # optimizers with only fp32 sums, and the tensors whose `.grad` must be None for that
            (o, [p for p in owned((o,)) if store.segment_of(p) is None])
            for o in self.fused
            if all(p.dtype == torch.float32 for p in owned((o,)) if store.segment_of(p))
        ]

    def fits(self, optimizers: Sequence[Optimizer], ignored: Set[int]) -> bool:
        """Whether the same optimizers own the same tensors, and the same segments hold sums."""
        if len(optimizers) != len(self._named) or not all(map(is_, optimizers, self._named)):
            return False
        found: list[Tensor] = []
        for optimizer in optimizers:
            found += chain.from_iterable(map(_params_of, optimizer.param_groups))
        return (
            len(found) == len(self._owned)
            and all(map(is_, found, self._owned))
            and self._store.layout is self._layout
            and self._store.touched_bytes() == self.touched
            and ignored == self.ignored
            and list(map(_own_step, map(vars, optimizers))) == self._steps
        )

    def folding(self) -> list[Optimizer]:
        """List the optimizers that average and clip in their own pass.

        All gradients that they will find are fp32 sums of this window, and no hook should see averages.
        """
        folding: list[Optimizer] = []
        if not self._fp32 or self._store.layout.result_dtype != torch.float32 or has_global_step_pre_hooks():
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
        """Whether a fused SGD is about to create a parameter's momentum.

        Torch allocates the buffers uninitialised on the first step, and leaves them so if found_inf is set.
        """
        touched = {id(self._store.target(segment.param)) for _, segment in self._store.touched()}
        return any(
            group["momentum"] != 0 and optimizer.state.get(p, {}).get("momentum_buffer") is None
            for optimizer in self.fused_sgd
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in touched
        )


class OptimizerSteps:
    """Checks and steps the optimizers of one accumulator's windows.

    Args:
        store: Flat buffers and masters.
        scaler: Steps the optimizers, if there is one.

    Attributes:
        plan: The plan for the optimizers that were checked last.
    """

    def __init__(self, store: Store, scaler: LossScaler | None) -> None:
        self._store = store
        self._scaler = scaler
        self._checked: tuple[object, ...] = ()  # the calling method, and the optimizers that it can drive
        self.plan = StepPlan(store, ())

    def check(self, caller: str, optimizers: Sequence[Optimizer], ignored: Set[int]) -> None:
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
        if self._store.masters is not None:
            self._store.masters.take_over()  # hooks on the step do so too, but before a closure, and not if compiled
        if self._scaler is not None:
            self._scaler.check_not_unscaled(lambda o: any(o is named for named in optimizers))
            self._scaler.check_not_stepped(optimizers)
        for entry in self._store.named:
            if entry.param.grad is not None:
                raise RuntimeError(
                    f"{caller}: {entry.name!r} has a .grad that was never accumulated; "
                    + (
                        "call acc.accumulate() after backward (acc.backward does), or acc.discard() to drop it"
                        if self._store.segment_of(entry.param) is not None
                        else "it was there before the parameter was frozen, or the parameter was unfrozen inside a "
                        "window, which counts from the next one on: call acc.discard()"
                    )
                    + " (AK17)"
                )
        self.refresh(optimizers, ignored)
        for p in self.plan.foreign_params:
            if p.grad is not None and not has_accumulator(p):
                raise RuntimeError(
                    f"{caller}: an optimizer owns a parameter of shape {tuple(p.shape)} with a .grad of its own and "
                    "no accumulator; it would be stepped as it is, scaled and not averaged. Give the module that has "
                    "it, as a loss with parameters, to FusedAccumulator too, by nn.ModuleList([model, criterion]). In "
                    "accelerate pass it to prepare() with the model; in other trainers put it into the model"
                )

    def _check_kinds(self, caller: str, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers and (caller == "step()" or self._scaler is not None):
            why = "" if caller == "step()" else ": GradScaler keeps the verdict of a window by optimizer"
            raise TypeError(f"{caller} needs the optimizers that will step this window{why}")
        for optimizer in optimizers:
            check_optimizer(optimizer, caller)
            if caller == "step()":
                check_no_closure(optimizer)
            modes = all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))
            if modes and self._store.masters is not None and not self._checked:  # nothing tells when they are called
                _log.warning(
                    "eval() and train() of %s move the fp32 masters alone: acc.load_state_dict(acc.state_dict()) after "
                    "each gives the model their values",
                    type(optimizer).__name__,
                )
        self._checked = (caller, *optimizers)

    def refresh(self, optimizers: Sequence[Optimizer], ignored: Set[int] | None = None) -> None:
        """Make a new plan if the old one does not fit; `ignored` are the same as before if None."""
        ignored = self.plan.ignored if ignored is None else ignored
        if not self.plan.fits(optimizers, ignored):
            self.plan = StepPlan(self._store, optimizers, ignored)

    def run(self, optimizers: Sequence[Optimizer], folding: list[Optimizer], verdict: Verdict, skipped: bool) -> None:
        """Step the optimizers in the given order.

        Args:
            optimizers: The checked optimizers.
            folding: Those of them that get undivided sums, and the divisor; each is taken out once it has divided.
            verdict: The window's verdict, for optimizers that skip by themselves.
            skipped: Whether to skip the others, if no scaler knows.
        """
        fused = self.plan.fused
        surely = is_known_zero(verdict.skip)
        masters, graph = self._store.masters, torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # as the optimizers' hooks expect, in a tenth of enable_grad()'s time
        try:
            if masters is not None:
                masters.begin_steps()
            for optimizer in fused:
                scale = verdict.single[VerdictField.DIVIDE_BY] if optimizer in folding else None
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                if not surely:  # set it also for a scaler whose own `step` does not
                    optimizer.found_inf = verdict.skip.clone()  # type: ignore[attr-defined]
            for optimizer in optimizers:
                if self._scaler is not None:
                    self._scaler.step(optimizer, optimizer in fused)
                elif optimizer in fused or not skipped:
                    optimizer.step()
                if optimizer in folding:
                    folding.remove(optimizer)
        except BaseException:
            if masters is not None:  # those that were stepped, or the next forward would use the weights before
                masters.round_late(unseen=True)
            raise
        finally:
            torch._C._set_grad_enabled(graph)
            if masters is not None:
                masters.end_steps()
            for optimizer in fused:
                for name in ("grad_scale", "found_inf"):
                    vars(optimizer).pop(name, None)
