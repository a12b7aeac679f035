"""The unit of weights that go into losses: one power of two for all ranks of the job.

If backward crosses ranks, one rank's gradients are added up on another, so all ranks must weight losses before
backward, in the same unit. The unit is near the first weight that any rank has, so that a weighted loss is about as
large as the loss, and a power of two, so that it changes no bits. Ranks agree on it through the store that started
torch.distributed, not by a collective, because they may begin at different times, or have no micro-batch at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_KEY = "accumkernels/unit of weights"


def backward_may_cross_ranks() -> bool:
    """Whether this process is one of several; nobody can see what a model does in its backward."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def agree_on_unit(weight: float | Tensor) -> float:
    """Return the unit of the job, set by the first rank that asks.

    Args:
        weight: This rank's first weight that is not 0; a weight that only the device knows proposes 1.
    """
    exponent = 0 if isinstance(weight, Tensor) else math.frexp(weight)[1] - 1
    agreed = _store().compare_set(_KEY, "", str(exponent))
    return math.ldexp(1.0, int(agreed))


def agreed_unit() -> float | None:
    """Return the unit of the job; None while no rank has had a weight other than 0."""
    return math.ldexp(1.0, int(_store().get(_KEY))) if _store().check([_KEY]) else None


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()
