"""What becomes of a loss before its backward: weights in it, where ranks need them, and losses of two accumulators.

A loss that one accumulator runs may reach the parameters of another, as a generator's reaches the discriminator. What
it leaves there is not of the other's loss, whose next backward would add to it. Over several ranks a weight multiplies
the loss before backward, and its accumulator multiplies the gradients by what is left of it: there, the other cannot
even count these gradients as its own, since it cannot know that they are already weighted.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ..buffers.parameters import move
from ..buffers.store import Store
from ..capture.inbox import MicroBatch
from ..errors import logger
from ..hooks import graph_nodes
from ..ranks.base import PendingUnit, propose_unit, read_unit

_grad_of = operator.attrgetter("param.grad")


@dataclass
class _Left:
    """Gradients of a loss whose backward another accumulator has run.

    Attributes:
        by: The first parameter of that accumulator.
        grads: They and their versions, by id of the parameter; a loop may drop them meanwhile.
        taken: Whether captures hold some of them.
        weighted: Whether the loss had a weight in it.
    """

    by: str
    grads: dict[int, tuple[TensorWeakRef, int]] = field(default_factory=dict)
    taken: bool = False
    weighted: bool = False


class SharedLoss:
    """Notices, for one accumulator, gradients of a loss whose backward another has run.

    Args:
        store: Holds the parameters.
        uncounted: Whether captures hold gradients that are in no `.grad` and that nobody counted.

    Attributes:
        alive: Of all accumulators, held weakly; with a single one nothing is compared.
        found: What another accumulator has left here; None if none has left anything.
    """

    alive: ClassVar[list[weakref.ref[SharedLoss]]] = []

    def __init__(self, store: Store, uncounted: Callable[[], bool]) -> None:
        self._store = store
        self._uncounted = uncounted
        self.found: _Left | None = None
        self._once: set[str] = set()  # what was said, and is not again
        SharedLoss.alive.append(weakref.ref(self, SharedLoss.alive.remove))

    def remove(self) -> None:
        """Notice nothing any more."""
        SharedLoss.alive[:] = [ref for ref in SharedLoss.alive if ref() is not self]
        self.forget()

    def forget(self) -> None:
        """Forget gradients that were dropped or counted."""
        self.found = None

    def run(self, backward: Callable[[], None], micro_batch: MicroBatch) -> None:
        """Run a backward of this accumulator, and note what it leaves at every other."""
        others = [(other, other.left()) for ref in tuple(SharedLoss.alive) if (other := ref()) not in (None, self)]
        try:
            backward()
        finally:
            for other, before in others:
                other.compare(before, self._store.named[0].name, micro_batch.loss_weight is not None)

    def left(self) -> tuple[dict[int, tuple[Tensor, int]], bool]:
        """Return `.grad` and its version by id of the parameter, and whether captures hold any gradients."""
        named = self._store.named
        found = zip(named, map(_grad_of, named), strict=True)
        return {id(e.param): (grad, grad._version) for e, grad in found if grad is not None}, self._uncounted()

    def compare(self, before: tuple[dict[int, tuple[Tensor, int]], bool], run_by: str, weighted: bool) -> None:
        """Note what a backward that the accumulator of `run_by` ran has left here; its loss may be weighted."""
        grads, uncounted = self.left()
        left = {}
        for key, (grad, version) in grads.items():
            had, had_version = before[0].get(key, (None, -1))
            if had is not grad or had_version != version:
                left[key] = TensorWeakRef(grad), version
        taken = uncounted and not before[1]
        if left or taken:
            found = self.found = self.found or _Left(run_by)
            found.by, found.taken = run_by, found.taken or taken
            found.grads.update(left)
        if self.found is not None:
            self.found.weighted = self.found.weighted or weighted

    def check(self, adds: bool) -> None:
        """Refuse gradients of another accumulator's loss before they are counted here.

        Args:
            adds: Whether a backward of this accumulator is about to add to them. Counted by themselves, they are meant,
                unless they are weighted.

        Raises:
            RuntimeError: names a parameter of each accumulator; of a loss without a weight, once.
        """
        found = self.found
        if found is None:
            return
        ours = next((e.name for e in self._store.named if _is_left(found, e.param)), None)
        if ours is None and found.taken:
            ours = self._store.named[0].name
        if ours is None:  # the gradients were dropped, like a discriminator's in the generator's turn
            self.forget()
            return
        if found.weighted:
            raise RuntimeError(
                f"the gradient of {ours!r} is of a loss that acc.backward() of another accumulator, that of "
                f"{found.by!r}, has multiplied by its weight: over several ranks two accumulators cannot share a "
                "weighted loss. Build one accumulator over the parameters of both, and call acc.step(a, b) with both "
                "optimizers. Gradients that are not meant to be used go by optimizer.zero_grad() or acc.discard()"
                " (AK29)"
            )
        if adds and "shared loss" not in self._once:
            self._once.add("shared loss")
            raise RuntimeError(
                f"backward(): {ours!r} has a gradient of another loss, which acc.backward() of another accumulator, "
                f"that of {found.by!r}, has left here, as a generator's loss does in a discriminator; this backward "
                "would add to it. Keep these parameters out of that loss, module.requires_grad_(False), or drop what "
                "it has left by acc.discard() before this backward. If both losses are meant, pass their sum to one "
                "accumulator over the parameters of both. This is said once"
            )


def _is_left(found: _Left, param: Tensor) -> bool:
    """Whether a parameter's `.grad` is what another accumulator's backward has left: of a plain loss, unchanged."""
    ref, version = found.grads.get(id(param), (None, 0))
    grad = param.grad
    return ref is not None and grad is not None and ref() is grad and (found.weighted or grad._version == version)


# ---- Splits a micro-batch's weight into a part that multiplies its loss before backward and a part for its gradients

_log = logger(__name__)
_GENERATED = "GeneratedBackwardFor_"  # and a custom op's names: Functions that `torch.library.register_autograd` makes
_TORCHS = tuple(_GENERATED + namespace for namespace in ("_", "aten_", "cplib_", "prims_", "torch_"))  # ops of its own


def grad_weight(micro_batch: MicroBatch) -> float | Tensor:
    """Compute the factor for a micro-batch's unscaled gradients, which may include other ranks' losses."""
    weight, loss_weight = micro_batch.weight, micro_batch.loss_weight
    if loss_weight is None:
        return weight
    unit = micro_batch.unit.get() if isinstance(micro_batch.unit, PendingUnit) else micro_batch.unit or 1.0
    if isinstance(loss_weight, float):
        return weight / loss_weight if loss_weight else unit
    return torch.where(loss_weight == 0, unit, weight / loss_weight)


def together(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    """Return the second micro-batch with the weights of both, whose gradients were added up."""
    parts = [1.0 if part.loss_weight is None else part.loss_weight for part in (first, second)]
    return second._replace(
        weight=first.weight + second.weight,
        loss_weight=parts[0] + parts[1],
        unit=second.unit if isinstance(first.unit, PendingUnit) else first.unit,
    )


class LossWeighting:
    """Puts weights into losses whose backward may cross ranks; other weights wait for the accumulate pass.

    Args:
        key: Of the unit that all ranks count weights in.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._unit: float | None = None  # once all ranks know it
        self._once: set[str] = set()  # names that it warned of, as a Function may be defined anew in each forward

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
            unit = read_unit(self._key) or PendingUnit.of(self._key)
            return loss * 0.0, micro_batch._replace(loss_weight=0.0, unit=unit)
        if self._unit is None:
            self._unit = propose_unit(weight, self._key)
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
        kinds = set(map(type, graph_nodes(root.grad_fn for root in roots)))  # each Function has a type of its own
        names = {_name(kind) for kind in kinds if _is_users(kind)} - self._once
        if not names:
            return
        self._once.update(names)
        _log.warning(
            "backward(weight): on several ranks a part of the weight multiplies the loss before backward, and the rest "
            "multiplies gradients afterwards. The graph of this loss has %s: if its backward adds a gradient of its "
            "own, as AddAuxiliaryLoss and L2Wrap do, that gets the rest only. Return the auxiliary loss instead and "
            "add it to the loss; or leave out weights that are all equal; or, if backward communicates with no other "
            "rank, call loss.backward() and acc.accumulate(weight). A Function that only passes gradients on is right "
            "as it is (AK40)",
            ", ".join(sorted(names)),
        )


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
