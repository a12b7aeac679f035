"""What follows from a window's optimizers alone: who owns what, and who can take sums as they are."""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_

import torch
from torch.optim import Optimizer

from ..buffers.store import Store
from .optimizers import check_ownership, owned


class StepPlan:
    """Made once for optimizers, their param groups and the parameters touched; later windows only see that it fits.

    Args:
        store: Flat buffers and masters.
        optimizers: All optimizers that step the window; none for an update by hand.
        ignored: `id`s of parameters that need no optimizer.

    Attributes:
        foreign_params: Tensors of the optimizers that are not accumulated here.

    Raises:
        RuntimeError: names the first parameter that was accumulated and that none of them, or more than one, owns.
    """

    def __init__(self, store: Store, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> None:
        self._named = tuple(optimizers)
        self._ignored = ignored
        self._owned = owned(optimizers)
        self._touched = store.touched_bytes()
        if optimizers:  # else, whoever asked for that updates parameters by hand
            touched = {id(s.param) for _, s in store.touched()}
            named = ((e.name, store.target(e.param)) for e in store.named if id(e.param) in touched)
            check_ownership(optimizers, named, ignored)
        self.foreign_params = [p for p in self._owned if store.place(p) is None]
        self._narrow = {
            id(o) for o in optimizers if any(p.dtype != torch.float32 for p in owned((o,)) if store.place(p))
        }
        self._foreign_params_of = {id(o): [p for p in owned((o,)) if store.place(p) is None] for o in optimizers}

    def fits(self, store: Store, optimizers: Sequence[Optimizer], ignored: Set[int] = frozenset()) -> bool:
        """Whether the same optimizers own the same tensors, and the same segments hold sums."""
        found = owned(optimizers)
        return (
            len(optimizers) == len(self._named)
            and all(map(is_, optimizers, self._named))
            and len(found) == len(self._owned)
            and all(map(is_, found, self._owned))
            and store.touched_bytes() == self._touched
            and ignored == self._ignored
        )

    def all_sums(self, optimizer: Optimizer) -> bool:
        """Whether every gradient that the optimizer will find is an fp32 sum of this window."""
        foreign_params = self._foreign_params_of[id(optimizer)]
        return id(optimizer) not in self._narrow and all(p.grad is None for p in foreign_params)
