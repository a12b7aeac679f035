"""What becomes of a window: what to divide by, whether to step, whether the scale backs off."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.schema import State


class Verdict(NamedTuple):
    """Device scalars (0-d), computed without reading any of them back.

    Attributes:
        divisor: fp64; what the sums are divided by. 1 where the window is skipped, since fused optimizers compute with
            it all the same (0 / 0 would write NaN).
        skip: fp32; 1.0 where the step must not happen.
        found_inf: fp32; 1.0 where the loss scale must back off.
        empty: bool; nothing was accumulated, and nothing overflowed: the scale stays as it is.
    """

    divisor: Tensor
    skip: Tensor
    found_inf: Tensor
    empty: Tensor

    def with_overflow(self, overflow: Tensor) -> Verdict:
        """Add an overflow (one element, 0 or 1) that the sums showed later; in an empty window it is none."""
        more = torch.where(self.empty, 0.0, overflow.reshape(()).float())
        return self._replace(skip=self.skip.maximum(more), found_inf=self.found_inf.maximum(more))


def judge(state: Tensor, divisor: Tensor | None) -> Verdict:
    """Judge a window.

    Args:
        state: fp64 `[4]`, see `State`.
        divisor: fp64 0-d that replaces the sum of weights; not positive and finite counts as overflow.
    """
    weight = state[State.WEIGHT]
    poisoned = state[State.POISONED] > 0
    found_inf = state[State.FOUND_INF] > 0
    no_weight = weight == 0
    nothing_to_do = no_weight if divisor is None else torch.zeros_like(no_weight)
    divisor = weight if divisor is None else divisor
    single = divisor.float()  # what gradients are divided in: 1e-50 would be 0 there
    bad = ~((single > 0) & torch.isfinite(single)) & ~nothing_to_do
    poisoned, found_inf = poisoned | bad, found_inf | bad
    skip = poisoned | no_weight
    return Verdict(
        divisor=torch.where(skip, 1.0, divisor),
        skip=skip.float(),
        found_inf=found_inf.float(),
        empty=no_weight & ~found_inf,
    )
