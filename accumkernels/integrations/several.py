"""Backwards whose gradients may be those of several optimizers, each with windows of its own."""

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

    Those are optimizers without parameters, and those that share some: a gradient that several step has no one window.

    Raises:
        ValueError: optimizers share parameters, and torch.distributed runs several ranks: accumulators keep
            DistributedDataParallel silent, and nobody would reduce what is left to the trainer.
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
    """A backward whose gradients may be those of several optimizers; it counts for those that it reaches.

    Args:
        windows: Those that are open have had `begin`.
        loss: The trainer's.
        weight: What it counts.
        scaler: The trainer's.
        **kwargs: Of `Tensor.backward`.

    Returns:
        The windows that it reached.

    Raises:
        RuntimeError: it reaches parameters of a window that has ended and was not stepped.
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
    """The loss to run a backward of that several windows may count."""
    loss, weighed = windows[0].weigh(loss, weight)
    for window in windows:
        window.under_way = weighed._replace(tag=window.parts.runner.micro_batch(weighed.weight).tag)
    return loss
