"""The unit of weights that go into losses: one power of two for all ranks.

If backward crosses ranks, one rank's gradients are added up on another, so all ranks must weight losses before
backward, in the same unit. The unit is near the first weight that any rank has, so that a weighted loss is about as
large as the loss, and a power of two, so that it changes no bits. Ranks agree on it through the store that started
torch.distributed, not by a collective, because they may begin at different times, or have no micro-batch at all.

An accumulator that all ranks of the job have built together has a unit of its own. All others share one, since ranks
that have other accumulators, or none, may take part in their backwards.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

SHARED_KEY = "accumkernels/unit of weights"
_built: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # accumulators of all ranks, by the world


class AwaitedUnit(float):
    """A unit that this rank does not need for its loss, and that another may set while backward runs; nan as a number.

    Attributes:
        key: The unit's key in the store.
    """

    key: str

    @classmethod
    def of(cls, key: str) -> AwaitedUnit:
        """Make the unit with this key."""
        unit = cls(math.nan)
        unit.key = key
        return unit

    def get(self) -> float:
        """Return the unit; 1 while no rank has had a weight other than 0."""
        return agreed_unit(self.key) or 1.0


def backward_may_cross_ranks() -> bool:
    """Whether this process is one of several; nobody can see what a model does in its backward."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def next_key(size: int) -> str:
    """Return the key for the unit of an accumulator that `size` ranks are building; all of them call this in one order.

    The constructors communicate, so those of all ranks of the job come in the same order on each of them.
    """
    world = torch.distributed.group.WORLD
    if size < torch.distributed.get_world_size():
        return SHARED_KEY
    _built[world] = number = _built.get(world, 0) + 1
    return f"{SHARED_KEY}/{number}"


def agree_on_unit(weight: float | Tensor, key: str) -> float:
    """Return the unit with this key, set by the first rank that asks.

    Args:
        weight: This rank's first weight that is not 0; a weight that only the device knows proposes 1.
        key: The unit's key in the store.
    """
    exponent = 0 if isinstance(weight, Tensor) else math.frexp(weight)[1] - 1
    agreed = _store().compare_set(key, "", str(exponent))
    return math.ldexp(1.0, int(agreed))


def agreed_unit(key: str) -> float | None:
    """Return the unit with this key; None while no rank has had a weight other than 0."""
    return math.ldexp(1.0, int(_store().get(key))) if _store().check([key]) else None


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()
