"""What the host knows of the window that is open."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .verdict import Verdict


@dataclass
class Window:
    """Counts and flags of one window; the sums themselves are in the store.

    Attributes:
        micro_batches: `accumulate` calls, dropped micro-batches too.
        host_weight: Sum of the weights that were numbers.
        decided_on_device: Whether a weight or divisor was a tensor that only the device knows.
        averaged: Whether the sums are averages already: loaded from a window saved between `finalize` and `zero_`.
        broken: By an exception in backward, after some of its gradients were added.
        dropped: By `discard`: it ends as if it were empty, on all ranks where there are several.
        reducing: Whether its sums are being added up over ranks; still set afterwards when that failed.
        verdict: Of `finalize`; None while the window is open.
    """

    micro_batches: int = 0
    host_weight: float = 0.0
    decided_on_device: bool = False
    averaged: bool = False
    broken: bool = False
    dropped: bool = False
    reducing: bool = False
    verdict: Verdict | None = None

    @property
    def may_be_empty(self) -> bool:
        """Whether the weights may sum to zero though nothing overflowed."""
        return self.decided_on_device or self.dropped or self.host_weight == 0

    def count(self, weight: float | Tensor) -> None:
        """Count a micro-batch."""
        self.micro_batches += 1
        if isinstance(weight, Tensor):
            self.decided_on_device = True
        else:
            self.host_weight += weight

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; a window that is finalized is saved as averaged."""
        return {
            "micro_batches": self.micro_batches,
            "host_weight": self.host_weight,
            "decided_on_device": self.decided_on_device,
            "averaged": self.averaged or self.verdict is not None,
            "dropped": self.dropped,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Window:
        """The window that `state_dict` described."""
        return cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})
