"""The unit of weights that go into losses: one power of two for all ranks of the job.

Where backward crosses ranks, gradients of one rank's loss are added up on another, so losses must be weighted before
backward, and by all ranks in the same unit. The unit is near the first weight that any rank has, so that a weighted
loss is about as large as the loss, and a power of two, so that it changes no bits. It is agreed through the store that
started torch.distributed, not by a collective: ranks may begin at different times, or have no micro-batch at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_KEY = "accumkernels/unit of weights"


def backward_may_cross_ranks() -> bool:
    """Whether this process is one of several: what a model does in its backward cannot be seen."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def agree_on_unit(weight: float | Tensor) -> float:
    """The unit of the job: that of the first rank that asks.

    Args:
        weight: This rank's first weight that is not 0; one that only the device knows proposes 1.
    """
    exponent = 0 if isinstance(weight, Tensor) else math.frexp(weight)[1] - 1
    agreed = _store().compare_set(_KEY, "", str(exponent))
    return math.ldexp(1.0, int(agreed))


def agreed_unit() -> float | None:
    """The unit of the job; None while no rank has had a weight other than 0."""
    return math.ldexp(1.0, int(_store().get(_KEY))) if _store().check([_KEY]) else None


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()
