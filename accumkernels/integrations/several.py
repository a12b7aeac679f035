"""Backwards whose gradients may belong to several optimizers, each with windows of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..window.optimizers import owned
from .window import TrainerWindow

_log = logging.getLogger(__name__)


def driven(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that can have windows of their own; others are left to the trainer.

    Optimizers without parameters are left to the trainer. So are optimizers that share some, since a gradient that
    several optimizers step belongs to no single window.

    Raises:
        ValueError: Optimizers share parameters, and torch.distributed runs several ranks. Accumulators keep
            DistributedDataParallel silent, so nothing would reduce the gradients that are left to the trainer.
    """
    owners: dict[int, int] = {}
    for p in owned(optimizers):
        owners[id(p)] = owners.get(id(p), 0) + 1
    shared = [o for o in optimizers if any(owners[id(p)] > 1 for p in owned((o,)))]
    if shared:
        names = ", ".join(type(o).__name__ for o in shared)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ValueError(f"{names} step the same parameters, which is not accumulated over ranks: keep them apart")
        _log.warning("%s step the same parameters: their gradients are left to the trainer", names)
    return [o for o in optimizers if owned((o,)) and not any(o is other for other in shared)]


def backward_of_all(
    windows: Sequence[TrainerWindow],
    loss: Tensor,
    weight: float | Tensor,
    scaler: torch.amp.GradScaler | None,
    **kwargs: Any,
) -> list[TrainerWindow]:
    """Run a backward whose gradients may belong to several optimizers; it counts for the ones it reaches.

    Args:
        windows: All windows; `begin` was called on the open ones.
        loss: The trainer's.
        weight: The micro-batch's weight.
        scaler: The trainer's.
        **kwargs: Of `Tensor.backward`.

    Returns:
        The windows that the backward reached.

    Raises:
        RuntimeError: The loss reaches parameters of a window that has ended and was not stepped.
    """
    ended = [window for window in windows if window.finalized]
    kept = [(p, p.grad) for window in ended for p in window.accumulator.parameters() if p.grad is not None]
    for p, _ in kept:
        p.grad = None
    is_open = [window for window in windows if not window.finalized]
    if is_open:
        plain, loss = loss, weigh_for_all(is_open, loss, weight)
    (loss if scaler is None else scaler.scale(loss)).backward(**kwargs)
    reached = [window for window in windows if window.reached]
    if any(window in ended for window in reached):
        for window in reached:
            window.parts.store.drop_grads()
        raise RuntimeError(
            "this loss reaches parameters of an optimizer whose window has ended: step that optimizer before, or keep "
            "its parameters out of this loss (requires_grad_(False), detach(), Lightning's toggle_optimizer)"
        )
    for p, grad in kept:
        p.grad = grad
    for window in reached:
        window.take(plain)
    return reached


def weigh_for_all(windows: Sequence[TrainerWindow], loss: Tensor, weight: float | Tensor) -> Tensor:
    """The loss to run backward of, if several windows may count it."""
    loss, weighed = windows[0].weigh(loss, weight)
    for window in windows:
        window.under_way = weighed._replace(tag=window.parts.runner.micro_batch(weighed.weight).tag)
    return loss
