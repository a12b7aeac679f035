"""What the host knows of the window that is open."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ranks.base import GlobalStats
from .loss_weighting import Weight
from .verdict import Verdict


class Phase(enum.Enum):
    """Where a window is in its life. `accumulator.py` says which calls each phase allows.

    OPEN: it takes micro-batches.
    AVERAGED: it was loaded from a state saved between `finalize` and `zero_`; its sums are averages.
    BROKEN: an exception in backward came after some of its gradients had been added.
    REDUCING: its sums are being reduced over ranks; it stays here when that fails.
    FINALIZED: it was judged, and its gradients were handed out.
    """

    OPEN = enum.auto()
    AVERAGED = enum.auto()
    BROKEN = enum.auto()
    REDUCING = enum.auto()
    FINALIZED = enum.auto()


@dataclass
class Window:
    """Counts and flags of one window; the sums themselves are in the store. Only this room writes it.

    Attributes:
        number: How many windows ended before.
        phase: See `Phase`.
        micro_batches: `accumulate` calls, dropped micro-batches too.
        unsynced: How many of the last micro-batches have their gradients in FSDP2, which has not reduced them yet.
        unsynced_weight: Of all of them together; None where there are none.
        host_weight: Sum of the weights that were numbers.
        weighed_after: Whether a weight other than 1 was left to the accumulate pass by a loop of the user's own.
        decided_on_device: Whether a weight or divisor was a tensor that only the device knows.
        dropped: By `discard`: it ends as if it were empty, on all ranks where there are several.
        found_nothing: `accumulate` calls that found no gradient, and counted nothing.
        handed_out: Whether optimizers have got `.grad`s.
        verdict: Set when the phase becomes FINALIZED.
    """

    number: int = 0
    phase: Phase = Phase.OPEN
    micro_batches: int = 0
    unsynced: int = 0
    unsynced_weight: Weight | None = None
    host_weight: float = 0.0
    weighed_after: bool = False
    decided_on_device: bool = False
    dropped: bool = False
    found_nothing: int = 0
    handed_out: bool = False
    verdict: Verdict | None = None

    @property
    def may_be_empty(self) -> bool:
        """Whether the weights may sum to zero though nothing overflowed."""
        return self.decided_on_device or self.dropped or self.host_weight == 0

    @property
    def known_empty(self) -> bool:
        """Whether the host knows already that the step will be skipped for want of weight."""
        return self.dropped or (not self.decided_on_device and self.host_weight == 0)

    def count(self, weight: float | Tensor) -> None:
        """Count a micro-batch that was added, and with it the unsynced ones."""
        self.micro_batches += 1
        if self.unsynced:
            self.drop_unsynced()
        if isinstance(weight, float):
            self.host_weight += weight
        else:
            self.decided_on_device = True

    def discard(self, window: bool, together: bool) -> None:
        """Drop it as a whole: because that was asked for, or because it is broken and ranks end it together."""
        if window or (self.phase is Phase.BROKEN and together):
            self.dropped = True
            if self.phase is Phase.BROKEN:
                self.phase = Phase.OPEN

    def agreed(self, agreement: GlobalStats) -> None:
        """Take over what all ranks know together; where the host did not look, only the device knows."""
        if agreement.dropped is None or agreement.weight is None:
            self.decided_on_device = True
        else:
            self.dropped, self.host_weight = agreement.dropped, agreement.weight

    def finalize(self, verdict: Verdict) -> None:
        """It was judged."""
        self.phase, self.verdict = Phase.FINALIZED, verdict

    # ---- micro-batches whose gradients FSDP2 keeps

    def check_unsynced(self, weight: Weight) -> None:
        """Refuse a weight that does not go with those of kept micro-batches, whose gradients are one sum by now.

        Raises:
            RuntimeError: gradients of the sum would have to be multiplied differently, or only the device knows.
        """
        if self.unsynced_weight is None or isinstance(weight.loss_weight, Tensor) or weight.loss_weight == 0:
            return
        given, before = weight.grad_weight, self.unsynced_weight.grad_weight
        if isinstance(before, Tensor) and not isinstance(given, Tensor):
            return  # both went into their losses
        # What a 16-bit loss loses of its weight is less than 1 part in 128.
        if isinstance(given, Tensor) or isinstance(before, Tensor) or abs(given / before - 1) > 1 / 128:
            raise RuntimeError(
                f"accumulate(weight={given}) after {self.unsynced} micro-batches that were multiplied by {before}, "
                f"whose gradients FSDP2 keeps and sums as they are (set_requires_gradient_sync(False)): call "
                "acc.backward(loss, weight), which puts weights into losses (docs/fsdp2.md)"
            )

    def add_unsynced(self, weight: Weight) -> None:
        """Count a micro-batch whose gradients will come with those of a later one."""
        if isinstance(weight.total, Tensor) and not isinstance(weight.loss_weight, Tensor):
            raise RuntimeError(
                "accumulate() found no gradient: FSDP2 keeps it (set_requires_gradient_sync(False)), and then a weight "
                "on the device goes into the loss: call acc.backward(loss, weight)"
            )
        self.check_unsynced(weight)
        self.micro_batches += 1
        self.unsynced += 1
        self.unsynced_weight = weight if self.unsynced_weight is None else self.unsynced_weight.plus(weight)

    def with_unsynced(self, weight: Weight) -> Weight:
        """The weight of gradients that hold those of kept micro-batches as well as this one's."""
        return weight if self.unsynced_weight is None else self.unsynced_weight.plus(weight)

    def drop_unsynced(self) -> None:
        """The gradients that were kept came, or will not be used."""
        self.unsynced, self.unsynced_weight = 0, None

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; a window that is finalized is saved as averaged."""
        return {
            "number": self.number,
            "micro_batches": self.micro_batches,
            "host_weight": self.host_weight,
            "decided_on_device": self.decided_on_device,
            "averaged": self.phase in (Phase.AVERAGED, Phase.FINALIZED),
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the window that `state_dict` described; this one is empty."""
        self.phase = Phase.AVERAGED if state["averaged"] else Phase.OPEN
        for name in ("number", "micro_batches", "host_weight", "decided_on_device", "dropped"):
            setattr(self, name, state[name])
