"""The weight of a micro-batch: what it counts, and which part of it went into the loss before backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.store import Store
from ..ranks.weight_unit import agree_on_unit, agreed_unit


class Weight(NamedTuple):
    """A micro-batch's weight; each part a number, or an fp64 0-d tensor on the first device.

    Attributes:
        total: What the micro-batch counts in the window's sum of weights.
        loss_weight: What its loss was multiplied by before backward.
        unit: The unit of `loss_weight`, which is `total / unit` but for rounding; None where `loss_weight` is 0, and no
            rank had another weight when it was put there.
    """

    total: float | Tensor
    loss_weight: float | Tensor = 1.0
    unit: float | None = 1.0

    @property
    def plain(self) -> bool:
        """Whether the loss was left as it is."""
        return isinstance(self.loss_weight, float) and self.loss_weight == 1

    @property
    def grad_weight(self) -> float | Tensor:
        """What its gradients, unscaled, are still to be multiplied by; some may be those of other ranks' losses."""
        unit = (agreed_unit() or 1.0) if self.unit is None else self.unit
        if isinstance(self.loss_weight, float):
            return self.total / self.loss_weight if self.loss_weight else unit
        return torch.where(self.loss_weight == 0, unit, self.total / self.loss_weight)

    def plus(self, other: Weight) -> Weight:
        """The weight of both together, where their gradients were added up."""
        unit = other.unit if self.unit is None else self.unit
        return Weight(self.total + other.total, self.loss_weight + other.loss_weight, unit)


class Told(NamedTuple):
    """What another accumulator's backward, of a loss with a weight in it, has left in `.grad`.

    Attributes:
        weight: The other's.
        grads: By id of the parameter, the gradient and its version.
    """

    weight: Weight
    grads: dict[int, tuple[Tensor, int]]

    @classmethod
    def of(cls, store: Store, weight: Weight) -> Told | None:
        """After the backward; None where it has left nothing."""
        grads = {id(e.param): (e.param.grad, e.param.grad._version) for e in store.named if e.param.grad is not None}
        return cls(weight, grads) if grads else None

    def goes_on(self, store: Store, weight: Weight) -> bool:
        """Whether a further backward, of a loss with this weight in it, adds to the same sum."""
        ours, theirs = self.weight.loss_weight, weight.loss_weight
        alike = isinstance(ours, float) and isinstance(theirs, float) and ours == theirs
        return (alike or self.weight is weight) and self._left(store) == "all"

    def weight_of(self, store: Store) -> Weight | None:
        """The other's weight, where its gradients are there as they were; None where all of them were dropped.

        Raises:
            RuntimeError: something was added to them, or beside them.
        """
        left = self._left(store)
        if left == "some":
            raise RuntimeError(
                "acc.backward of another accumulator has left gradients here of a loss with a weight in it, and others "
                "were added to them: call acc.accumulate() after each of the backwards, or drop the first with "
                "optimizer.zero_grad()"
            )
        return self.weight if left == "all" else None

    def _left(self, store: Store) -> str:
        """What of the gradients is there as it was, and nothing else: "all", "none" or "some"."""
        now = {id(e.param): e.param.grad for e in store.named if e.param.grad is not None}
        if not any(now.get(key) is grad for key, (grad, _) in self.grads.items()):
            return "none"
        same = all(now.get(key) is grad and grad._version == version for key, (grad, version) in self.grads.items())
        return "all" if same and len(now) == len(self.grads) else "some"


class LossWeighting:
    """Puts weights into losses, for where backward may cross ranks; elsewhere they wait for the accumulate pass."""

    def __init__(self) -> None:
        self._unit: float | None = None  # of weights in losses, once all ranks know it

    def weigh(self, loss: Tensor, weight: float | Tensor) -> tuple[Tensor, Weight]:
        """Multiply a loss by its weight, in the job's unit.

        Args:
            loss: The plain loss.
            weight: A checked number, or fp64 0-d on the first device.

        Returns:
            The loss to run backward of, and the weight.
        """
        if self._unit is None and not isinstance(weight, Tensor) and weight == 0:
            return loss * 0.0, Weight(0.0, 0.0, agreed_unit())  # says nothing of how large weights are
        if self._unit is None:
            self._unit = agree_on_unit(weight)
        factor = weight / self._unit
        if not isinstance(factor, Tensor) and factor == 1:
            return loss, Weight(weight)
        # As the loss's dtype rounds it: what is lost there, the grad_weight makes up for.
        if isinstance(factor, Tensor):
            rounded = factor.to(loss.dtype)
            return loss * move(rounded, loss.device), Weight(weight, rounded.double(), self._unit)
        number = torch.tensor(factor, dtype=loss.dtype, device="cpu").item()
        return loss * number, Weight(weight, number, self._unit)
