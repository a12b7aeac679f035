"""Splits a micro-batch's weight into a part that multiplies its loss before backward and a part for its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers.devices import move
from ..capture.captures import MicroBatch
from ..ranks.weight_unit import AwaitedUnit, agree_on_unit, agreed_unit


def grad_weight(micro_batch: MicroBatch) -> float | Tensor:
    """Compute the factor for a micro-batch's unscaled gradients, which may include other ranks' losses."""
    weight, loss_weight = micro_batch.weight, micro_batch.loss_weight
    if loss_weight is None:
        return weight
    unit = micro_batch.unit.get() if isinstance(micro_batch.unit, AwaitedUnit) else micro_batch.unit or 1.0
    if isinstance(loss_weight, float):
        return weight / loss_weight if loss_weight else unit
    return torch.where(loss_weight == 0, unit, weight / loss_weight)


def together(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    """Return the second micro-batch with the weights of both, whose gradients were added up."""
    parts = [1.0 if part.loss_weight is None else part.loss_weight for part in (first, second)]
    return second._replace(
        weight=first.weight + second.weight,
        loss_weight=parts[0] + parts[1],
        unit=second.unit if isinstance(first.unit, AwaitedUnit) else first.unit,
    )


class LossWeighting:
    """Puts weights into losses whose backward may cross ranks; other weights wait for the accumulate pass.

    Args:
        key: Of the unit that all ranks count weights in.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._unit: float | None = None  # once all ranks know it

    def weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """Multiply a loss by its micro-batch's weight, in the unit of all ranks.

        Returns:
            The loss to run backward of, and the micro-batch with its loss's factor.
        """
        weight = micro_batch.weight
        if self._unit is None and not isinstance(weight, Tensor) and weight == 0:
            # A weight of 0 does not tell how large weights are.
            unit = agreed_unit(self._key) or AwaitedUnit.of(self._key)
            return loss * 0.0, micro_batch._replace(loss_weight=0.0, unit=unit)
        if self._unit is None:
            self._unit = agree_on_unit(weight, self._key)
        factor = weight / self._unit
        if not isinstance(factor, Tensor) and factor == 1:
            return loss, micro_batch
        # The loss's dtype rounds the factor; `grad_weight` makes up for the difference.
        if isinstance(factor, Tensor):
            rounded = factor.to(loss.dtype)
            loss, factor = loss * move(rounded, loss.device), rounded.double()
        else:
            factor = torch.tensor(factor, dtype=loss.dtype, device="cpu").item()
            if factor == 1:
                return loss, micro_batch
            loss = loss * factor
        return loss, micro_batch._replace(loss_weight=factor, unit=self._unit)
