"""Splits a micro-batch's weight into a part that multiplies its loss before backward and a part for its gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers.devices import move
from ..capture.captures import MicroBatch
from ..ranks.weight_unit import AwaitedUnit, agree_on_unit, agreed_unit

_log = logging.getLogger(__name__)
_GENERATED = "GeneratedBackwardFor_"  # and a custom op's names: Functions that `torch.library.register_autograd` makes
_TORCHS = tuple(_GENERATED + namespace for namespace in ("_", "aten_", "cplib_", "prims_", "torch_"))  # ops of its own


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
        self._told: set[str] = set()  # names, as a Function may be defined anew in each forward

    def weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
        """Multiply a loss by its micro-batch's weight, in the unit of all ranks.

        Returns:
            The loss to run backward of, and the micro-batch with its loss's factor.
        """
        weighted, micro_batch = self._weigh(loss, micro_batch)
        self.inspect((loss,), micro_batch)
        return weighted, micro_batch

    def _weigh(self, loss: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, MicroBatch]:
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

    def inspect(self, roots: Sequence[Tensor], micro_batch: MicroBatch) -> None:
        """Warn of Functions, each once, that may add a gradient of their own to those of a weighted loss.

        A gradient that does not come from the loss lacks the part of the weight that is in the loss. The graph does not
        show which Functions add one, or which of them communicate and so need the weight in the loss.

        Args:
            roots: Tensors at which a backward begins.
            micro_batch: Its micro-batch, weighted.
        """
        if micro_batch.loss_weight is None:
            return
        # Every graph, as each may have other Functions. On a CPU a node takes 0.3 to 0.7 microseconds here, and 5 to 6
        # in backward, however small its tensors.
        names = {_name(kind) for kind in _kinds_of_nodes(roots) if _is_users(kind)} - self._told
        if not names:
            return
        self._told |= names
        _log.warning(
            "backward(weight): on several ranks a part of the weight multiplies the loss before backward, and the rest "
            "multiplies gradients afterwards. The graph of this loss has %s: if its backward adds a gradient of its "
            "own, as AddAuxiliaryLoss and L2Wrap do, that gets the rest only. Return the auxiliary loss instead and "
            "add it to the loss; or leave out weights that are all equal; or, if backward communicates with no other "
            "rank, call loss.backward() and acc.accumulate(weight). A Function that only passes gradients on is right "
            "as it is",
            ", ".join(sorted(names)),
        )


def _kinds_of_nodes(roots: Sequence[Tensor]) -> set[type]:
    """Collect the types of all nodes below `roots`; each Function has a type of its own."""
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, kinds = set(stack), set()
    while stack:
        node = stack.pop()
        kinds.add(type(node))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return kinds


def _is_users(kind: Any) -> bool:
    """Whether it is the node of a Function, or of a custom op, that neither torch nor this package defines."""
    function = getattr(kind, "_forward_cls", None)
    if function is None:
        return False
    if function.__name__.startswith(_GENERATED):
        return not function.__name__.startswith(_TORCHS)
    return function.__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])


def _name(kind: Any) -> str:
    """Return the name of a Function, or the namespace, name and overload of a custom op."""
    name: str = kind._forward_cls.__name__
    return name.removeprefix(_GENERATED)
