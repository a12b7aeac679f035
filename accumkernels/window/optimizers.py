"""Facts about the optimizers that step FusedAccumulator's windows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import expect

_UNWRAP = "or pass the optimizer it wraps (`optimizer.optimizer`)"
# Wrappers that decide themselves when to step: name of the package, what to do instead.
_TRAINERS = {
    "accelerate": f"let accumkernels.integrations.accelerate.Accelerator prepare it, {_UNWRAP}",
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
    package = type(optimizer).__module__.partition(".")[0]
    if package in _TRAINERS and hasattr(optimizer, "optimizer"):
        raise TypeError(
            f"{caller}: {type(optimizer).__qualname__} of {package} wraps an optimizer; {_TRAINERS[package]}"
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
        )
    expect(optimizer, Optimizer, f"{caller}: optimizer", "a torch.optim.Optimizer")


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot be called without a closure."""
    closure = _step_parameters(type(optimizer)).get("closure")  # type: ignore[arg-type]
    return closure is not None and closure.default is inspect.Parameter.empty


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


def check_ownership(
    optimizers: Sequence[Optimizer], targets: Iterable[tuple[str, Tensor]], ignored: Set[int] = frozenset()
) -> None:
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
            )


def steps_scaled_gradients(optimizer: Optimizer) -> bool:
    """Whether `step` takes `optimizer.grad_scale` and `optimizer.found_inf`: torch's own fused optimizers."""
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and type(optimizer).__module__.startswith("torch.optim.")
        and "grad_scaler" not in _step_parameters(type(optimizer))  # type: ignore[arg-type]
    )


def is_fused_sgd(optimizer: Optimizer) -> bool:
    """Whether this is torch's SGD in one kernel."""
    return isinstance(optimizer, torch.optim.SGD) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def lacks_momentum(optimizer: Optimizer, touched: Set[int]) -> bool:
    """Whether a fused SGD is about to create a parameter's momentum.

    Torch allocates the buffers uninitialised on the first step, and leaves them so if found_inf is set.

    Args:
        optimizer: A fused SGD.
        touched: `id`s of the parameters that will have a gradient.
    """
    return any(
        group["momentum"] != 0 and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in touched
    )
