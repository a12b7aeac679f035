"""The part of a micro-batch's weight that goes into its loss before backward, and the part that is left."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers.devices import move
from ..capture.captures import MicroBatch
from ..ranks.weight_unit import agree_on_unit, agreed_unit


def grad_weight(micro_batch: MicroBatch) -> float | Tensor:
    """What gradients of a micro-batch, unscaled, are to be multiplied by; some may be of other ranks' losses."""
    weight, loss_weight = micro_batch.weight, micro_batch.loss_weight
    if loss_weight is None:
        return weight
    unit = (agreed_unit() or 1.0) if micro_batch.unit is None else micro_batch.unit
    if isinstance(loss_weight, float):
        return weight / loss_weight if loss_weight else unit
    return torch.where(loss_weight == 0, unit, weight / loss_weight)


def together(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    """The second micro-batch with the weights of both, where their gradients were added up."""
    parts = [1.0 if part.loss_weight is None else part.loss_weight for part in (first, second)]
    return second._replace(
        weight=first.weight + second.weight,
        loss_weight=parts[0] + parts[1],
        unit=second.unit if first.unit is None else first.unit,
    )


class LossWeighting:
    """Puts weights into losses, for where backward may cross ranks; elsewhere they wait for the accumulate pass."""

    def __init__(self) -> None:
        self._unit: float | None = None  # of weights in losses, once all ranks know it

    def weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """Multiply a loss by its micro-batch's weight, in the job's unit.

        Returns:
            The loss to run backward of, and the micro-batch, which knows what its loss was multiplied by.
        """
        weight = micro_batch.weight
        if self._unit is None and not isinstance(weight, Tensor) and weight == 0:
            # Says nothing of how large weights are.
            return loss * 0.0, micro_batch._replace(loss_weight=0.0, unit=agreed_unit())
        if self._unit is None:
            self._unit = agree_on_unit(weight)
        factor = weight / self._unit
        if not isinstance(factor, Tensor) and factor == 1:
            return loss, micro_batch
        # As the loss's dtype rounds it: what is lost there, `grad_weight` makes up for.
        if isinstance(factor, Tensor):
            rounded = factor.to(loss.dtype)
            loss, factor = loss * move(rounded, loss.device), rounded.double()
        else:
            factor = torch.tensor(factor, dtype=loss.dtype, device="cpu").item()
            if factor == 1:
                return loss, micro_batch
            loss = loss * factor
        return loss, micro_batch._replace(loss_weight=factor, unit=self._unit)
