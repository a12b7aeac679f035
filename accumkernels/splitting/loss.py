"""Calls what users give for the loss of a part of their batch, and for its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import wrong_type


class LossAndWeight:
    """The loss and the weight of a part of the batch.

    Args:
        loss_fn: Returns the mean loss of a part of the batch, or that and its weight.
        weight: Returns the weight of a part; None: its number of samples.
        check: Returns a weight as a number, or as a tensor that is read here; raises if it is neither.
        all_run: Whether a part of weight 0 runs too, since other ranks wait for it.

    Raises:
        TypeError: One is not callable.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        weight: Callable[[Any], Any] | None,
        check: Callable[[Any], float | Tensor],
        all_run: bool,
    ) -> None:
        if not callable(loss_fn):
            raise wrong_type("loss_fn", "a function of a part of the batch", loss_fn)
        if weight is not None and not callable(weight):
            raise wrong_type("weight", "a function of a part of the batch, or None", weight)
        self._loss_fn = loss_fn
        self._weight = weight
        self._check = check
        self._all_run = all_run

    def __call__(self, part: Any, samples: int) -> tuple[Tensor, float] | None:
        """Run the forward of a part with so many samples that count.

        Returns:
            Its loss and its weight; None if it weighs nothing, so that its NaN spoils nothing.
        """
        number = float(samples)
        if self._weight is not None and samples:
            number = self._number(self._weight(part))
            if number == 0 and not self._all_run:
                return None
        loss = self._loss_fn(part)
        if isinstance(loss, tuple):
            if self._weight is not None:
                raise ValueError("backward_batch(): loss_fn returned a weight, and weight= was given: leave one out")
            if len(loss) != 2:
                raise ValueError(f"loss_fn must return a loss, or a loss and its weight, got {len(loss)} values")
            loss, given = loss
            number = self._number(given) if samples else 0.0
        if not isinstance(loss, Tensor):
            raise wrong_type("what loss_fn returns", "a tensor, or a tensor and a weight", loss)
        if loss.numel() != 1:
            raise ValueError(f"loss_fn must return a loss of one element, got a tensor of shape {tuple(loss.shape)}")
        return None if number == 0 and not self._all_run else (loss, number)

    def _number(self, weight: Any) -> float:
        checked = self._check(weight)
        return float(self._check(checked.item()) if isinstance(checked, Tensor) else checked)


@contextmanager
def adding_nothing(loss: Tensor) -> Iterator[None]:
    """Make every gradient of a backward inside zero, where NaN times a weight of 0 would be NaN."""
    handles, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            handles.append(node.register_prehook(_zeros))
            nodes += [following for following, _ in node.next_functions]
    try:
        yield
    finally:
        for handle in handles:  # parameters keep their nodes
            handle.remove()


def _zeros(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
