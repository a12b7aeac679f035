"""What is done to the sums of a window while it ends: look for an overflow, measure them, divide them."""

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
    """A look at the sums of one window; ranks say when (`ranks.base.Look`).

    Args:
        store: What has the sums.
        window: The sums are its.
        norm: Makes the norm of the sums of all ranks as they are, fp64 0-d.
        check: Looks for an overflow that nobody has looked for; see `Store.check_sums`.
        checks: Whether an overflow matters.
        measures: Whether sums that are reduced are measured, before they are divided.
        divides: Whether they are divided at once.
        unchecked: Whether something was added to them without a look.
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
        """From here on, a failure loses the sums."""
        self.window.begin_reducing()
        self._seen = {d: torch.zeros(1, dtype=torch.float64, device=d) for d in self.store.states}

    def agree(self, stats: GlobalStats) -> None:
        """Take over what all ranks know of the window."""
        self.window.agree(stats)
        self.store.agreed(stats.state, stats.touched)
        if self._seen and self.divides:
            divisor = Verdict(self.store.ops, stats.state, stats.divisor).divisor
            self._divisors = {d: move(divisor, d) for d in self.store.states}

    def see(self, buffer: FlatBuffer, parts: list[Tensor]) -> None:
        """These parts of sums are reduced."""
        seen = self._seen[buffer.device]
        if self.measures:
            buffer.ops.norm_(seen, parts)
        if self.divides:
            found_inf = None if self.measures else seen
            buffer.ops.scaled_copy_(parts, parts, divisor=self._divisors[buffer.device], found_inf=found_inf)

    def squared_norm(self) -> Tensor:
        """Of all that was seen, fp64 0-d.

        Where nothing was measured, the pass that divides tells what matters of it: inf where a quotient is not finite,
        else 0.
        """
        device = self.store.device
        parts = (move(seen, device) for seen in self._seen.values())
        total = sum(parts, torch.zeros(1, dtype=torch.float64, device=device))[0]
        return total if self.measures else torch.where(total > 0, torch.inf, 0.0).double()
