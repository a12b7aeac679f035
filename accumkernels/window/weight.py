"""The weight of a micro-batch: what it counts, and which part of it went into the loss before backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers.devices import move
from ..ranks.unit import agree_on_unit, backward_may_cross_ranks


class Weight(NamedTuple):
    """A micro-batch's weight; each part a number, or an fp64 0-d tensor on the first device.

    Attributes:
        total: What the micro-batch counts in the window's sum of weights.
        in_loss: What its loss was multiplied by before backward.
    """

    total: float | Tensor
    in_loss: float | Tensor = 1.0

    @property
    def multiplier(self) -> float | Tensor:
        """What its gradients, unscaled, are still to be multiplied by; anything where the loss was multiplied by 0."""
        if isinstance(self.in_loss, Tensor):
            return torch.where(self.in_loss == 0, 1.0, self.total / self.in_loss)
        if self.in_loss == 0:
            return 1.0
        return self.total / self.in_loss

    def plus(self, other: Weight) -> Weight:
        """The weight of both together, where their gradients were added up."""
        return Weight(self.total + other.total, self.in_loss + other.in_loss)


class Weigher:
    """Puts weights into losses, where backward may cross ranks; elsewhere they wait for the accumulate pass."""

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
        if not backward_may_cross_ranks():
            return loss, Weight(weight)
        if isinstance(weight, Tensor):
            # As the loss's dtype rounds it: what is lost there, the multiplier makes up for.
            factor = (weight / self._agreed(weight)).to(loss.dtype)
            return loss * move(factor, loss.device), Weight(weight, factor.double())
        if weight == 0:
            return loss * 0.0, Weight(0.0, 0.0)
        number = weight / self._agreed(weight)
        if number == 1:
            return loss, Weight(weight)
        number = torch.tensor(number, dtype=loss.dtype, device="cpu").item()
        return loss * number, Weight(weight, number)

    def _agreed(self, weight: float | Tensor) -> float:
        if self._unit is None:
            self._unit = agree_on_unit(weight)
        return self._unit
