"""What every way to add gradients is set up as."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from ..harness.measure import Call


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A method set up on a case.

    Attributes:
        whole: Adds all gradients.
        accumulators: Where to, in the gradients' order.
        one: Adds gradient `i`; for methods that take each gradient as soon as backward has written it.
        launches: Kernels per call, where torch's dispatcher on the CPU does not see them.
    """

    whole: Call
    accumulators: Sequence[Tensor]
    one: Callable[[int], object] | None = None
    launches: int | None = None
