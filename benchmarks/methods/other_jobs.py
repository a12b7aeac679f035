"""Jobs that are often named as ways to accumulate, and are different jobs: no ratio to ours is given.

* Lossy: adding 16-bit gradients in 16 bit moves 6 bytes per element instead of 10, and loses what is below half a unit
  in the last place of the sum.
* Fused into the product: see weight_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..harness.case import Case
from ..harness.measure import Call
from . import weight_gradients
from .weight_gradients import FUSED_PRODUCT, PRODUCT

LOSSY = "lossy: 16-bit .grad, torch._foreach_add_"
__all__ = ["FUSED_PRODUCT", "JOBS", "LOSSY", "PRODUCT", "lossy"]


def lossy(case: Case, tokens: int) -> Call:
    """The sum has the gradients' dtype."""
    sums = [torch.zeros_like(g) for g in case.grads]
    return lambda: torch._foreach_add_(sums, case.grads)


def _product(name: str) -> Callable[[Case, int], Call]:
    return lambda case, tokens: weight_gradients.WAYS[name](case, tokens).whole


JOBS: dict[str, Callable[[Case, int], Call]] = {
    LOSSY: lossy,
    **{name: _product(name) for name in weight_gradients.WAYS},
}
