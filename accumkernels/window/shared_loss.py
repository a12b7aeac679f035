"""Refuses, over several ranks, a weighted loss whose gradients reach the parameters of two accumulators.

Over several ranks a weight multiplies the loss before backward, and its accumulator multiplies the gradients by what is
left of it. A second accumulator that finds gradients of the same backward cannot know that they are already weighted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from ..buffers.store import Store
from ..capture.captures import MicroBatch

_all: weakref.WeakSet[SharedLoss] = weakref.WeakSet()  # one for each accumulator


class SharedLoss:
    """Notices, for one accumulator, gradients of a loss that another has weighted.

    Args:
        store: Holds the parameters.
        uncounted: Whether captures hold gradients that are in no `.grad` and that nobody counted.

    Attributes:
        found: The first parameter of the accumulator that left such gradients here; empty if none did.
    """

    def __init__(self, store: Store, uncounted: Callable[[], bool]) -> None:
        self._store = store
        self._uncounted = uncounted
        self.found = ""
        self._grads: dict[int, Tensor] = {}  # gradients of the other's backward, by id of the parameter
        self._taken = False  # whether captures hold some of them
        _all.add(self)

    def run(self, backward: Callable[[], None], micro_batch: MicroBatch) -> None:
        """Run a backward; if its loss has a weight in it, note what it leaves at every other accumulator."""
        if micro_batch.loss_weight is None:
            backward()
            return
        others = [(other, other.left()) for other in _all if other is not self]
        try:
            backward()
        finally:
            for other, before in others:
                other.compare(before, self._store.named[0].name)

    def left(self) -> tuple[dict[int, tuple[Tensor, int]], bool]:
        """Return `.grad` and its version by id of the parameter, and whether captures hold any gradients."""
        found = ((id(entry.param), entry.param.grad) for entry in self._store.named)
        return {key: (grad, grad._version) for key, grad in found if grad is not None}, self._uncounted()

    def compare(self, before: tuple[dict[int, tuple[Tensor, int]], bool], weighted_by: str) -> None:
        """Note what a weighted loss's backward, run by the accumulator of `weighted_by`, has left here."""
        grads, uncounted = self.left()
        for key, (grad, version) in grads.items():
            had, had_version = before[0].get(key, (None, -1))
            if had is not grad or had_version != version:
                self._grads[key], self.found = grad, weighted_by
        if uncounted and not before[1]:
            self._taken, self.found = True, weighted_by

    def check(self) -> None:
        """Refuse gradients of another accumulator's weighted loss before they are counted here.

        Raises:
            RuntimeError: names a parameter of each accumulator.
        """
        ours = next((e.name for e in self._store.named if self._grads.get(id(e.param), self) is e.param.grad), None)
        if ours is None and self._taken:
            ours = self._store.named[0].name
        if ours is None:  # the gradients were dropped, like a discriminator's in the generator's turn
            self.forget()
            return
        raise RuntimeError(
            f"the gradient of {ours!r} is of a loss that acc.backward() of another accumulator, that of "
            f"{self.found!r}, has multiplied by its weight: over several ranks two accumulators cannot share a "
            "weighted loss. Build one accumulator over the parameters of both, and call acc.step(a, b) with both "
            "optimizers. Gradients that are not meant to be used go by optimizer.zero_grad() or acc.discard()"
        )

    def forget(self) -> None:
        """Forget gradients that were dropped."""
        self.found, self._taken = "", False
        self._grads.clear()
