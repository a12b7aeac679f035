"""What the host knows of the window that is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .verdict import Verdict


@dataclass
class Window:
    """Counts and flags of one window; the sums themselves are in the store.

    Attributes:
        micro_batches: `accumulate` calls, dropped micro-batches too.
        kept: How many of the last micro-batches have their gradients in FSDP2, which has not reduced them yet.
        kept_weight: The weight of each of them.
        host_weight: Sum of the weights that were numbers.
        decided_on_device: Whether a weight or divisor was a tensor that only the device knows.
        averaged: Whether the sums are averages already: loaded from a window saved between `finalize` and `zero_`.
        broken: By an exception in backward, after some of its gradients were added.
        dropped: By `discard`: it ends as if it were empty, on all ranks where there are several.
        reducing: Whether its sums are being added up over ranks; still set afterwards when that failed.
        verdict: Of `finalize`; None while the window is open.
    """

    micro_batches: int = 0
    kept: int = 0
    kept_weight: float = 0.0
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
        """Count a micro-batch that was added, and with it those that were kept."""
        self.micro_batches += 1
        self.kept = 0
        if isinstance(weight, Tensor):
            self.decided_on_device = True
        else:
            self.host_weight += weight

    def check_kept(self, weight: float | Tensor) -> None:
        """Refuse a weight that does not go with those of kept micro-batches, whose gradients are one sum by now.

        Raises:
            RuntimeError: it is another, or only the device knows it.
        """
        if self.kept and (isinstance(weight, Tensor) or weight != self.kept_weight):
            raise RuntimeError(
                f"weight {weight} after {self.kept} micro-batches of weight {self.kept_weight} whose gradients FSDP2 "
                "keeps and sums as they are (set_requires_gradient_sync(False)): give numbers, all the same, or "
                "sum-reduced losses without weights and a divisor (docs/fsdp2.md)"
            )

    def keep(self, weight: float | Tensor) -> None:
        """Count a micro-batch whose gradients will come with those of a later one."""
        if isinstance(weight, Tensor):
            raise RuntimeError(
                "accumulate() found no gradient: FSDP2 keeps it (set_requires_gradient_sync(False)), and then a weight "
                "must be a number, not a tensor on the device"
            )
        self.check_kept(weight)
        self.micro_batches += 1
        self.kept += 1
        self.kept_weight = weight

    def with_kept(self, weight: float | Tensor, loss_scale: Tensor | None) -> tuple[float | Tensor, Tensor | None]:
        """Weight and loss scale of the gradients that came at last: the kept micro-batches' and this one's.

        They are added as one micro-batch, of the weight of all, whose gradient is the mean over them.
        """
        if not self.kept:
            return weight, loss_scale
        n = self.kept + 1
        scale = torch.ones((), dtype=torch.float32) if loss_scale is None else loss_scale
        return weight * n, scale * n

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; a window that is finalized is saved as averaged."""
        return {
            "micro_batches": self.micro_batches,
            "host_weight": self.host_weight,
            "decided_on_device": self.decided_on_device,
            "averaged": self.averaged or self.verdict is not None,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the window that `state_dict` described; this one is empty."""
        for name in self.state_dict():
            setattr(self, name, state[name])
