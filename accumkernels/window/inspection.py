"""The checks, norms and divisions of a window's sums while it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..buffers.devices import move
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..ranks.base import GlobalStats
from .state import Window
from .verdict import Verdict


@dataclass
class Inspection:
    """Inspects the sums of one window; ranks decide when (`ranks.base.Look`).

    Args:
        store: Holds the sums.
        window: The window of the sums.
        norm: Computes the norm of the undivided sums of all ranks, fp64 0-d.
        check: Looks for overflows in unchecked sums; see `Store.check_sums`.
        checks: Whether an overflow matters.
        measures: Whether to measure reduced sums before they are divided.
        divides: Whether to divide them at once.
        unchecked: Whether anything was added to the sums without a check.
    """

    store: Store
    window: Window
    norm: Callable[[], Tensor]
    check: Callable[[Tensor | None], Tensor]
    checks: bool
    measures: bool
    divides: bool
    unchecked: bool
    _seen: dict[torch.device, Tensor] = field(default_factory=dict, init=False)
    _divisors: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    def begin_reducing(self) -> None:
        """Note that from here on, a failure loses the sums."""
        self.window.begin_reducing()
        self._seen = {d: torch.zeros(1, dtype=torch.float64, device=d) for d in self.store.states}

    def agree(self, stats: GlobalStats) -> None:
        """Take over all ranks' statistics of the window."""
        self.window.agree(stats)
        self.store.agreed(stats.state, stats.touched)
        if self._seen and self.divides:
            divisor = Verdict(self.store.ops, stats.state, stats.divisor).divisor
            self._divisors = {d: move(divisor, d) for d in self.store.states}

    def see(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
        """Inspect these parts of sums, which are reduced."""
        seen = self._seen[buffer.device]
        if self.measures:
            buffer.ops.norm_(seen, parts)
        if self.divides:
            found_inf = None if self.measures else seen
            buffer.ops.scaled_copy_(parts, parts, divisor=self._divisors[buffer.device], found_inf=found_inf)

    def squared_norm(self) -> Tensor:
        """Return the squared norm of everything seen, fp64 0-d.

        If nothing was measured, the dividing pass gives what matters: inf where a quotient is not finite, else 0.
        """
        device = self.store.device
        parts = (move(seen, device) for seen in self._seen.values())
        total = sum(parts, torch.zeros(1, dtype=torch.float64, device=device))[0]
        return total if self.measures else torch.where(total > 0, torch.inf, 0.0).double()
