"""The host's knowledge of the open window: its phase, counts and flags, and the losses of its micro-batches."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.flat import SquaredNorms
from ..buffers.parameters import move, whole
from ..capture.inbox import MicroBatch
from ..ranks.base import GlobalStats, backward_may_cross_ranks
from ..ranks.sender import Sent
from .loss_items import Items
from .loss_weighting import grad_weight, together
from .verdict import Verdict, WindowGrads, clip_coefficient

_FADING = 1 - 2.0**-16  # near enough to 1 to keep all weights of a window, and to tell apart their orders


class Phase(enum.Enum):
    """A window's phase. `accumulator.py` says which calls each phase allows.

    OPEN: it accepts micro-batches.
    AVERAGED: it was loaded from a state saved between `finalize` and `zero_`; its sums are averages.
    BROKEN: backward raised after some of its gradients had been added.
    ENDING: its sums are being reduced over ranks, divided or clipped; it stays here if that fails.
    FINALIZED: it was decided on, and its gradients were assigned.
    """

    OPEN = enum.auto()
    AVERAGED = enum.auto()
    BROKEN = enum.auto()
    ENDING = enum.auto()
    FINALIZED = enum.auto()

    def __init__(self, number: int) -> None:
        self.is_finalized = self.name == "FINALIZED"


@dataclass
class WindowLoss:
    """The losses of one window's micro-batches: losses on a GPU stay there unread, those on the CPU become numbers.

    Args:
        device: Where they are summed.
        resumed: The sums of micro-batches before a checkpoint; None if there were none.
    """

    device: torch.device = torch.device("cpu")
    resumed: Tensor | None = None
    _losses: list[float | Tensor] = field(default_factory=list, init=False)
    _weights: list[float | Tensor] = field(default_factory=list, init=False)
    _undecided: int = field(default=0, init=False)  # number of last ones whose kept gradients may still be dropped
    _drops: list[tuple[slice, Tensor]] = field(default_factory=list, init=False)  # of these weights, if not 0
    _of_all_ranks: Tensor | None = field(default=None, init=False)  # sums over all ranks

    def add(
        self, loss: Tensor | None, weight: float | Tensor, drop: Tensor | None = None, *, unsynced: bool = False
    ) -> None:
        """Add a micro-batch's loss.

        Args:
            loss: One element, as the user computed it, on any device; None and larger losses do not count, nor do
                DTensors that would have to be reduced first.
            weight: The micro-batch's weight; fp64 0-d if a tensor.
            drop: fp64 `[1]`, not 0 if this micro-batch and those kept before it are dropped; None if not.
            unsynced: Whether its gradients will come with a later micro-batch's, to be used or dropped with them.
        """
        if type(loss) is not Tensor:
            loss = whole(loss)
        if loss is not None and loss.numel() == 1:
            # Read its value now: loops like to change a loss in place later, and it may be a view of much more.
            if type(loss) is Tensor and loss.is_cpu:  # a number costs a fifth of a tensor
                value = loss.tolist()  # no op that a dispatch mode would see
                while isinstance(value, list):
                    (value,) = value
                self._losses.append(float(value))
            else:
                self._losses.append(loss.detach().reshape(()).to(self.device, torch.float64, copy=True))
            self._weights.append(weight)
            self._undecided += 1
        if unsynced:
            return
        if drop is not None:
            end = len(self._weights)
            self._drops.append((slice(end - self._undecided, end), drop))  # which may be written later
        self._undecided = 0

    def drop_unsynced(self) -> None:
        """Forget micro-batches whose kept gradients will not be used."""
        decided = len(self._losses) - self._undecided
        del self._losses[decided:], self._weights[decided:]
        self._undecided = 0

    def _scalar(self, weight: float | Tensor) -> Tensor:
        """Make fp64 0-d on the device; a number is filled in there, because a copy would wait."""
        return weight if isinstance(weight, Tensor) else torch.full((), weight, dtype=torch.float64, device=self.device)

    def _vector(self, values: Sequence[float | Tensor]) -> Tensor:
        """Make fp64 on the device; if all are numbers, in one copy."""
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack(list(map(self._scalar, values)))
        return move(torch.tensor(values, dtype=torch.float64, device="cpu"), self.device)

    def sums(self) -> Tensor | None:
        """Return fp64 `[2]`: `sum w_i l_i` and `sum w_i` over micro-batches with a loss; None if there are none.

        Until the window ends these are this rank's sums, afterwards those over all ranks.
        """
        if self._of_all_ranks is not None:
            return self._of_all_ranks
        if not self._losses:
            return self.resumed
        # A dropped micro-batch's loss is usually not finite, and 0 times that is NaN.
        w = self._vector(self._weights)
        for dropped, drop in self._drops:
            w[dropped] = torch.where(move(drop, self.device) != 0, 0.0, w[dropped])
        used = torch.stack([torch.where(w != 0, w * self._vector(self._losses), 0.0), w]).sum(1)
        return used if self.resumed is None else used + self.resumed

    def adopt(self, sums: Tensor) -> None:
        """Take over the sums over all ranks."""
        self._of_all_ranks = sums


class Unsynced(NamedTuple):
    """Micro-batches whose gradients come with a later one's: how many, and all of them together."""

    number: int
    together: MicroBatch


class Outcome(NamedTuple):
    """What a window ended with.

    Attributes:
        verdict: Whether to step, and how.
        grads: The gradients that it assigns.
        idle: For each segment, 1 if its parameter is frozen and gives it back when this window is over; may be empty.
    """

    verdict: Verdict
    grads: WindowGrads
    idle: bytes


@dataclass
class Observed:
    """What was observed of one window beside the accumulator's own calls; see `misuse.MisuseDetector`.

    Attributes:
        drops: How many windows with micro-batches were dropped before it, since one ended that came after no drop.
        after_drop: Whether the last one was.
        divisors: What each of the losses was divided by that acc.backward got; None where that is not known.
        items: What each of the losses averages that came without a weight; None where that is not known.
        stepped: Ids of the optimizers that were stepped.
        leftovers: Whether gradients of another loss were there before its first backward.
    """

    drops: int = 0
    after_drop: bool = False
    divisors: list[float | None] = field(default_factory=list, init=False)
    items: list[Items | None] = field(default_factory=list, init=False)
    stepped: set[int] = field(default_factory=set, init=False)
    leftovers: bool = field(default=False, init=False)

    def note_leftovers(self, there: bool) -> None:
        """Note whether gradients were there before the first backward."""
        self.leftovers = there


@dataclass
class Window:
    """Counts, flags and losses of one window; the store holds the sums themselves.

    Attributes:
        number: How many windows ended before.
        loss: The losses of its micro-batches.
        phase: See `Phase`.
        micro_batches: Number of `accumulate` calls, including dropped micro-batches.
        unsynced: The last micro-batches, whose gradients are in FSDP2, which has not reduced them yet; None if there
            are none.
        host_weight: Sum of the weights; None if only the device knows one of them, or the divisor.
        weighed_after: Whether a user's own loop left a weight other than 1 to the accumulate pass.
        squares: The squared norms of its micro-batches; None if they are not measured.
        weights: A number that tells apart the sequences of its micro-batches' weights.
        counted_by_backward: Whether the accumulator ran the backward of the last micro-batch.
        found_nothing: Number of `accumulate` calls that found no gradient and counted nothing.
        resumed: Whether it was loaded with micro-batches of the run that saved it.
        loaded: 2 if it was loaded with micro-batches of all ranks; 1 if it was loaded otherwise, as by a rank that had
            not begun it when others had; 0 if it was not loaded.
        dropped: Whether `discard` dropped it: it ends as if it were empty, on all ranks if there are several.
        notes: What a trainer has done with it, as its adapter notes there.
        observed: What was observed of it.
        waited: Seconds for which its end, and reads of its sums, have waited for gradients to be added on the host.
        sent: What was sent of it to other ranks.
        outcome: What it ended with, once it is finalized.
        exposed: Whether optimizers have got `.grad`s.
        clipped: Whether a norm was computed since it was finalized, or none is to be.
    """

    number: int = 0
    loss: WindowLoss = field(default_factory=WindowLoss)
    phase: Phase = Phase.OPEN
    micro_batches: int = 0
    unsynced: Unsynced | None = None
    host_weight: float | None = 0.0
    weighed_after: bool = False
    squares: SquaredNorms | None = None
    weights: float | Tensor = 0.0
    counted_by_backward: bool = False
    found_nothing: int = 0
    resumed: bool = False
    loaded: int = 0
    dropped: bool = False
    notes: Any = None
    observed: Observed = field(default_factory=Observed)
    waited: float = field(default=0.0, init=False)
    sent: Sent = field(default_factory=Sent, init=False)
    outcome: Outcome | None = field(default=None, init=False)
    exposed: bool = field(default=False, init=False)
    clipped: bool = field(default=False, init=False)

    @property
    def may_be_empty(self) -> bool:
        """Whether the weights may sum to zero though nothing overflowed."""
        return self.dropped or not self.host_weight

    @functools.cached_property
    def crosses_ranks(self) -> bool:
        """Whether backward may; asked once, since asking torch.distributed is slow."""
        return backward_may_cross_ranks()

    def count(self, weight: float | Tensor, counted_by_backward: bool) -> None:
        """Count a micro-batch that was added, and the unsynced ones with it."""
        self.micro_batches += 1
        self.counted_by_backward = counted_by_backward
        if self.unsynced:
            self.drop_unsynced()
        if not isinstance(weight, float):
            self.host_weight = None
        elif self.host_weight is not None:
            self.host_weight += weight

    def count_nothing(self) -> None:
        """Count an `accumulate` call that found no gradient."""
        self.found_nothing += 1

    def measure(self) -> None:
        """Measure its micro-batches, of which there was none yet."""
        self.squares = SquaredNorms()

    def note_wait(self, seconds: float) -> None:
        """Note a wait for gradients to be added on the host."""
        self.waited += seconds

    def weigh_late(self) -> None:
        """Note that a user's own loop left a weight other than 1 to the accumulate pass."""
        self.weighed_after = True

    def note_order(self, weight: float | Tensor) -> None:
        """Note the weight of a micro-batch that was added.

        A sharded gradient is a mean over ranks whose weights this rank does not know, and the square of it is divided
        by this rank's. So ranks must have the same weights, one by one, which equal sums do not show.
        """
        self.weights = self.weights * _FADING + weight

    def break_(self) -> None:
        """Break the window: its sums may hold only part of a micro-batch, so it can only be dropped."""
        self.phase = Phase.BROKEN

    def discard(self, window: bool, together: bool) -> None:
        """Drop all of it, because the user asked for that, or because it is broken and ranks end it together."""
        if window or (self.phase is Phase.BROKEN and together):
            self.dropped = True
            if self.phase is Phase.BROKEN:
                self.phase = Phase.OPEN

    def observe_next(self, ended: bool) -> Observed:
        """What is known of the window after this one, which has `ended` or was dropped."""
        dropped = not ended and self.phase is Phase.OPEN and self.micro_batches > 0 and not self.dropped
        before = 0 if ended and not self.observed.after_drop else self.observed.drops
        return Observed(before + dropped, dropped)

    def miss_end(self) -> None:
        """Note that the loop has gone on to the next window without ending this one, as other ranks have."""
        self.number += 1

    # ---- the end of a window

    def divide_on_device(self) -> None:
        """Note a divisor that only the device knows."""
        self.host_weight = None

    def begin_ending(self) -> None:
        """Start changing the sums, over ranks or by dividing them: if that fails, they are lost."""
        self.phase = Phase.ENDING

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the sums, which are lost if that fails, in the phase that the window is in."""
        phase = self.phase
        self.begin_ending()
        yield
        self.phase = phase

    def adopt(self, stats: GlobalStats) -> None:
        """Take over all ranks' statistics; if the host did not look, only the device knows them."""
        if stats.dropped is None or stats.weight is None:
            self.host_weight = None
            return
        self.dropped = stats.dropped
        if self.host_weight is not None:
            self.host_weight = stats.weight

    def finalize(self, outcome: Outcome, exposes: bool) -> None:
        """End the window, and let optimizers have its `.grad`s if it `exposes` them: all, or its sums are lost."""
        self.phase = Phase.ENDING
        self.outcome = outcome
        if exposes:
            outcome.grads.assign_grads()
            self.exposed = True
        self.phase = Phase.FINALIZED

    def take_over(self) -> None:
        """Take over what the loop has made of the assigned gradients, for the norm that is about to be computed."""
        self.clipped = True
        if self.exposed:
            assert self.outcome is not None
            self.outcome.grads.take_over()

    def note_clipping(self) -> None:
        """Note that other ranks know that no norm will be computed."""
        self.clipped = True

    def clip(self, norm: Tensor, max_norm: float | Tensor) -> None:
        """Scale the assigned gradients, whose norm is `norm`, to a norm of at most `max_norm`."""
        assert self.outcome is not None
        self.outcome.grads.multiply(clip_coefficient(norm, max_norm))

    # ---- micro-batches whose gradients FSDP2 keeps

    def check_unsynced(self, micro_batch: MicroBatch) -> None:
        """Refuse a weight that does not match that of unsynced micro-batches, whose gradients are one sum by now.

        Raises:
            RuntimeError: parts of the sum would need different factors, or only the device knows.
        """
        loss_weight = micro_batch.loss_weight
        if self.unsynced is None or isinstance(loss_weight, Tensor) or loss_weight == 0:
            return
        given, before = grad_weight(micro_batch), grad_weight(self.unsynced.together)
        if isinstance(before, Tensor) and not isinstance(given, Tensor):
            return  # both weights went into the losses
        # A 16-bit loss loses less than 1 part in 128 of its weight.
        if isinstance(given, Tensor) or isinstance(before, Tensor) or abs(given / before - 1) > 1 / 128:
            raise RuntimeError(
                f"accumulate(weight={given}) after {self.unsynced.number} micro-batches that were multiplied by "
                f"{before}, whose gradients FSDP2 keeps and sums as they are (set_requires_gradient_sync(False)): call "
                "acc.backward(loss, weight), which puts weights into losses; if that was another accumulator's, whose "
                "loss reaches these parameters, build one over the parameters of both (docs/fsdp2.md) (AK28)"
            )

    def add_unsynced(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch whose gradients will come with a later one's."""
        if isinstance(micro_batch.weight, Tensor) and not isinstance(micro_batch.loss_weight, Tensor):
            raise RuntimeError(
                "accumulate() found no gradient: FSDP2 keeps it (set_requires_gradient_sync(False)), and then a weight "
                "on the device goes into the loss: call acc.backward(loss, weight)"
            )
        self.check_unsynced(micro_batch)
        self.micro_batches += 1
        together = self.with_unsynced(micro_batch)._replace(loss=None)  # a loss keeps its graph alive
        self.unsynced = Unsynced(1 + (0 if self.unsynced is None else self.unsynced.number), together)

    def with_unsynced(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch whose gradients also hold those of the unsynced ones."""
        return micro_batch if self.unsynced is None else together(self.unsynced.together, micro_batch)

    def drop_unsynced(self) -> None:
        """Forget the unsynced micro-batches: their gradients came, or will not be used."""
        self.unsynced = None
        self.loss.drop_unsynced()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; a finalized window is saved as averaged."""
        return {
            "number": self.number,
            "micro_batches": self.micro_batches,
            "host_weight": self.host_weight or 0.0,
            "decided_on_device": self.host_weight is None,
            "averaged": self.phase in (Phase.AVERAGED, Phase.FINALIZED),
            "dropped": self.dropped,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], of_all_ranks: bool, **fields: Any) -> Window:
        """Make the window that `state_dict` has saved, alone or of all ranks, with other fields of the class."""
        resumed = state["micro_batches"] > 0
        return cls(
            number=state["number"],
            phase=Phase.AVERAGED if state["averaged"] else Phase.OPEN,
            micro_batches=state["micro_batches"],
            host_weight=None if state["decided_on_device"] else state["host_weight"],
            resumed=resumed,
            loaded=1 + (resumed and of_all_ranks),
            dropped=state["dropped"],
            **fields,
        )
