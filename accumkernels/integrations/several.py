"""Backwards whose gradients may belong to several optimizers, each with windows of its own."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..batch_statistics import check_independent
from ..errors import expect, logger
from ..ranks.base import is_distributed
from ..window.coupled import CoupledLoss
from ..window.optimizers import owned
from .window import TrainerWindow

_log = logger(__name__)


def driven(optimizers: Sequence[Optimizer], stepped: Sequence[Sequence[Tensor]] | None = None) -> list[Optimizer]:
    """The optimizers that can have windows of their own; others are left to the trainer.

    Optimizers without parameters are left to the trainer. So are optimizers that share some, since a gradient that
    several optimizers step belongs to no single window.

    Args:
        optimizers: The trainer's.
        stepped: The model's parameters that each of them steps; None: those that it holds, which may be masters.

    Raises:
        ValueError: Optimizers share parameters, and torch.distributed runs several ranks. Accumulators keep
            DistributedDataParallel silent, so nothing would reduce the gradients that are left to the trainer.
    """
    params = [owned((o,)) for o in optimizers] if stepped is None else stepped
    owners = Counter(id(p) for mine in params for p in mine)
    shared = [o for o, mine in zip(optimizers, params, strict=True) if any(owners[id(p)] > 1 for p in mine)]
    if shared:
        names = ", ".join(type(o).__name__ for o in shared)
        if is_distributed():
            raise ValueError(f"{names} step the same parameters, which is not accumulated over ranks: keep them apart")
        _log.warning("%s step the same parameters: their gradients are left to the trainer", names)
    return [o for o, mine in zip(optimizers, params, strict=True) if mine and not any(o is other for other in shared)]


def backward_of_all(
    windows: Sequence[TrainerWindow],
    loss: Tensor,
    weight: float | Tensor | None,
    caller: Any,
    **kwargs: Any,
) -> list[TrainerWindow]:
    """Run a backward whose gradients may belong to several optimizers; it counts for the ones it reaches.

    Args:
        windows: All windows; `begin` was called on the open ones.
        loss: The trainer's.
        weight: The micro-batch's weight.
        caller: See `MisuseDetector.inspect_loss`.
        **kwargs: Of `Tensor.backward`.

    Returns:
        The windows that the backward reached.
    """

    def run(is_open: list[TrainerWindow]) -> Tensor:
        run_for_all(is_open, loss, weight, lambda loss: windows[0].scaled(loss).backward(**kwargs), caller=caller)
        return loss

    return _count(windows, run)


def backward_coupled_of_all(
    windows: Sequence[TrainerWindow],
    chunks: Iterable[Any],
    encode: Callable[[Any], Any],
    loss_fn: Callable[..., Tensor],
    weight: float | Tensor | None,
    *,
    divided_by: float = 1.0,
) -> tuple[Tensor, list[TrainerWindow]]:
    """`FusedAccumulator.backward_coupled` for one window, and `backward_of_all` for several.

    Args:
        windows: All windows; `begin` was called on the open ones.
        chunks: See `FusedAccumulator.backward_coupled`, as `encode` and `loss_fn`.
        encode: Called twice with each chunk.
        loss_fn: Returns the plain loss.
        weight: The micro-batch's weight.
        divided_by: What the loss is divided by here, as the trainer divides its losses.

    Returns:
        The plain loss, detached, and the windows that count it.

    Raises:
        TypeError, ValueError: As `FusedAccumulator.backward_coupled`.
        RuntimeError: As `FusedAccumulator.backward_coupled`.
    """
    expect(loss_fn, Callable, "loss_fn", "callable")
    plain: list[Tensor] = []

    @functools.wraps(loss_fn, updated=())  # its signature says how it takes the encodings
    def divided(*args: Any, **kwargs: Any) -> Tensor:
        loss = loss_fn(*args, **kwargs)
        if not isinstance(loss, Tensor):
            return loss  # an error in what called this
        plain.append(loss.detach())
        return loss / divided_by

    if len(windows) == 1:
        windows[0].backward_coupled(chunks, encode, divided, weight)
        return plain[0], list(windows)
    for window in windows:
        for module in window.modules:
            check_independent(module)
    coupled = CoupledLoss(chunks, encode, divided)
    devices = dict.fromkeys(device for window in windows for device in window.engine.drawing(coupled.chunks))

    def run(is_open: list[TrainerWindow]) -> Tensor:
        def backward(loss: Tensor) -> None:
            run_for_all(is_open, loss, weight, lambda loss: windows[0].scaled(loss).backward())

        def backward_part(tensors: Sequence[Tensor], grads: Sequence[Tensor], _: bool) -> None:
            if is_open and (micro_batch := is_open[0].notes.running) is not None:
                is_open[0].engine.runner.inspect_part(tensors, micro_batch)
            _run(is_open, functools.partial(torch.autograd.backward, tensors, grads), tensors[0], shared=True)

        return coupled.run(devices, backward, backward_part)

    reached = _count(windows, run)
    return plain[0], reached


def run_for_all(
    windows: Sequence[TrainerWindow],
    loss: Tensor,
    weight: float | Tensor | None,
    backward: Callable[[Tensor], Any],
    *,
    caller: Any = None,
    alone: bool = False,
    leaves: bool = False,
) -> None:
    """Run a backward whose gradients several windows may count; each of them then waits for `take`.

    Args:
        windows: Those that are open.
        loss: The trainer's, scaled or not.
        weight: The micro-batch's weight.
        backward: Called with the loss to run backward of.
        caller: See `MisuseDetector.inspect_loss`.
        alone: Whether there is one window, and no other parameters that an optimizer steps.
        leaves: Whether its gradients stay in `.grad` until `take`.
    """
    for window in windows:
        window.note_loss(loss, caller)
    if windows:
        loss, weighed = windows[0].weigh(loss, weight, last=alone and windows[0].sends)
    for window in windows:
        its = window.engine.micro_batch(1.0)
        window.notes.running = weighed._replace(tag=its.tag, squares=its.squares, divided_by=window.made_up_for)
    _run(windows, functools.partial(backward, loss), loss, shared=not alone, leaves=leaves)


def _run(windows: Sequence[TrainerWindow], backward: Callable[[], Any], root: Tensor, **how: bool) -> None:
    """Run a backward of the micro-batch that is under way in all windows, whose captures may add gradients early."""
    for window in windows:
        assert window.notes.running is not None
        run = functools.partial(window.engine.runner.run, window.engine.window)
        backward = functools.partial(run, backward, (root,), window.notes.running, **how)
    backward()


def _count(windows: Sequence[TrainerWindow], run: Callable[[list[TrainerWindow]], Tensor]) -> list[TrainerWindow]:
    """Run a micro-batch, and count it in the windows that it reaches.

    What it leaves in one that has ended is dropped, and to step that one is an error. Loops may clear it before: so do
    those of discriminators, in which several windows of the generator's losses may have left gradients.

    Args:
        windows: All of them.
        run: Runs its backward, for the windows that are open, and returns its plain loss.
    """
    ended = [window for window in windows if window.finalized]
    is_open = [window for window in windows if not window.finalized]
    kept = [(p, p.grad) for window in ended for p in window.accumulator.parameters() if p.grad is not None]
    for p, _ in kept:
        p.grad = None
    try:
        loss = run(is_open)
        reached = [window for window in is_open if window.reached]
        for window in ended:
            window.notes.overrun |= window.reached
            for entry in window.engine.store.named:
                entry.param.grad = None
        take_all(reached, loss)
    except BaseException:
        for window in is_open:
            window.engine.discard()
        for window in ended:
            window.engine.store.drop_grads()
        raise
    finally:
        for p, grad in kept:
            p.grad = grad
    return reached


def take_all(windows: Sequence[TrainerWindow], loss: Tensor | None) -> None:
    """Count a micro-batch in each of its windows, also after one has dropped it by an error, which comes out then.

    What a window did not take, its next micro-batch would: after an error, all drop it.
    """
    try:
        with contextlib.ExitStack() as takes:
            for window in reversed(windows):
                takes.callback(window.take, loss)
    except BaseException:
        for window in windows:
            window.engine.discard()
        raise
