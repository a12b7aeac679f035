"""Steps of a trainer's optimizer, with or without a closure, when other optimizers share its GradScaler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..window.optimizers import check_optimizer


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


def once(optimizer: Optimizer, result: Any) -> Callable[[], Any]:
    """A closure for an optimizer that needs one, whose backward has already run."""
    calls = iter([result])

    def closure() -> Any:
        try:
            return next(calls)
        except StopIteration:
            raise TypeError(
                f"{type(optimizer).__name__} evaluates its closure twice in one step, which FusedAccumulator cannot "
                "drive inside a trainer: gradients of the first evaluation are those of a whole window"
            ) from None

    return closure


@contextlib.contextmanager
def apart(scaler: torch.amp.GradScaler | None, optimizer: Optimizer) -> Iterator[None]:
    """Hide a GradScaler's state of other optimizers from this one's step and update, and restore it afterwards."""
    if scaler is None:
        yield
        return
    records = scaler._per_optimizer_states
    others = {key: records.pop(key) for key in list(records) if key != id(optimizer)}
    try:
        yield
    finally:
        scaler._per_optimizer_states.update(others)
