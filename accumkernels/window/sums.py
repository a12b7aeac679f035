"""Adds a micro-batch's gradients to the flat buffers, after a check for overflow if required."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import Tensor

from ..buffers.devices import move, worst
from ..buffers.store import Store
from ..capture.captures import Bucket, Captured, MicroBatch, Place
from ..ranks.base import Ranks
from ..ranks.weight_unit import AwaitedUnit
from .grad_scaler import LossScaler
from .loss_weighting import grad_weight
from .noise_scale import NoiseMeter

_NOTHING = Captured([], [])


class Sums:
    """Runs micro-batches' kernels on every device that has gradients; the sink of backwards that send nothing.

    Args:
        store: The flat buffers and states.
        ranks: Drop a micro-batch together if its gradients are sharded.
        scaler: Has the scale that gradients carry.
        overflow: FusedAccumulator's argument.
        noise: Collects the sums that the noise scale needs.

    Attributes:
        partial: Whether an `add` that failed has run an op; an op refuses its own gradients before it adds any.
        awaited: See `Sink`.
    """

    awaited: Set[Place] | None = frozenset()

    def __init__(self, store: Store, ranks: Ranks, scaler: LossScaler, overflow: str | None, noise: NoiseMeter) -> None:
        self._store = store
        self._ranks = ranks
        self._scaler = scaler
        self._checks = overflow is not None
        self._noise = noise
        self.partial = False

    # ---- as a sink

    def multiplier(self, micro_batch: MicroBatch) -> float | Tensor | None:
        """See `Sink`."""
        if self._noise.on or isinstance(micro_batch.unit, AwaitedUnit):
            return None  # only backward knows what is left of the weight
        weight = micro_batch.weight if micro_batch.loss_weight is None else grad_weight(micro_batch)
        if self._scaler.scales:
            weight = _over(weight, self._scaler.loss_scale())
        if isinstance(weight, float) and (weight == 0 or not math.isfinite(weight)):
            return None  # BLAS would not look for an overflow in operands that it multiplies by zero
        return weight

    def check_writable(self, place: Place) -> None:
        """See `Sink`: nothing is being sent."""

    def leaf_ran(self, place: Place, pending: bool) -> bool:
        """See `Sink`: nobody waits."""
        return False

    def add(
        self,
        bucket: Bucket,
        micro_batch: MicroBatch,
        *,
        count: bool = False,
        drops: dict[torch.device, Tensor] | None = None,
    ) -> None:
        """Add gradients, and mark their segments as touched.

        Args:
            bucket: Gradients, by flat buffer; may be empty.
            micro_batch: The micro-batch of the gradients.
            count: Whether to add its weight to the window's; once per micro-batch.
            drops: Per device, fp64 `[1]` that drops the micro-batch if it is not 0.
        """
        plain = micro_batch.loss_weight is None
        weight = micro_batch.weight if plain else grad_weight(micro_batch)
        scales = bucket and self._scaler.scales
        loss_scale = self._scaler.loss_scale(lazily=self._ranks.judged_together) if scales else None
        first = self._store.buffers[0]
        self.partial = False
        for buffer, (segments, grads) in bucket:
            squares = weighted = None
            if self._noise.measuring:
                self._noise.see(buffer, segments, micro_batch.tag)
                squares = self._noise.squares(buffer.device)
                weighted = squares if plain or squares is None else torch.zeros_like(squares)
            counts = count and plain and buffer is first
            count = count and not counts
            device = buffer.device
            flags, drop = buffer.flags if self._checks else None, None if drops is None else drops[device]
            weights = (weight, None) if isinstance(weight, float) else (1.0, move(weight, device))
            scale = loss_scale if loss_scale is None or loss_scale.device == device else move(loss_scale, device)
            options = flags, micro_batch.tag, *weights, scale, drop, weighted, counts
            buffer.accumulate(self._store.states[device], segments, grads, *options)
            self.partial = True
            if squares is not None and weighted is not None and weighted is not squares:
                self._add_squares(squares, weighted, micro_batch)
        if count:  # the first buffer got nothing, or its gradients already hold a part of the weight
            weight, device = micro_batch.weight, first.device
            flags, drop = first.flags if self._checks else None, None if drops is None else drops[device]
            weights = (weight, None) if isinstance(weight, float) else (1.0, move(weight, device))
            options = flags, micro_batch.tag, *weights, None, drop, None, True
            first.accumulate(self._store.states[device], [], [], *options)
        self.partial = False

    def _add_squares(self, squares: Tensor, weighted: Tensor, micro_batch: MicroBatch) -> None:
        """Add `sum w_i |g_i|^2`, given the squared norm of gradients of a loss times `loss_weight`."""
        factor = micro_batch.loss_weight
        if isinstance(factor, Tensor):
            factor = move(torch.where(factor == 0, 1.0, factor), squares.device)
        weighted[0] /= 1.0 if isinstance(factor, float) and factor == 0 else factor  # type: ignore[arg-type]
        squares += weighted

    # ---- the check before anything is added

    def find_overflow(self, bucket: Bucket, micro_batch: MicroBatch) -> dict[torch.device, Tensor]:
        """Check a micro-batch on every device before anything is added.

        Returns:
            Per device, fp64 `[1]`: 1.0 if the weight or any gradient on any device (for DTensors, on any rank) is not
            finite.
        """
        weight, tag = micro_batch.weight, micro_batch.tag
        drops = {device: torch.zeros(1, dtype=torch.float64, device=device) for device in self._store.states}
        found = dict(bucket)
        for buffer in self._store.buffers:  # also those without gradients: their device checks the weight
            segments, grads = found.get(buffer, _NOTHING)
            weight_tensor = move(weight, buffer.device) if isinstance(weight, Tensor) else None
            buffer.check_finite(segments, grads, drops[buffer.device], tag=tag, weight_tensor=weight_tensor)
        if len(drops) > 1 or self._ranks.judged_together:
            bad = self._ranks.maximum(worst(drops.values(), self._store.device))
            drops = {device: move(bad, device) for device in drops}
        return drops

    def overflow_error(self, micro_batch: MicroBatch, number: int) -> FloatingPointError:
        """Make the error for a micro-batch that is not finite, the one after `number` others."""
        last, names = self._store.flagged()
        if last == micro_batch.tag:
            what = f"gradients of {', '.join(names)}"
        else:
            what = "the weight, or gradients on another rank" if self._ranks.judged_together else "the weight"
        return FloatingPointError(f"micro-batch {number} of the window dropped: not finite: {what}")


def _over(weight: float | Tensor, loss_scale: Tensor | None) -> float | Tensor:
    """Compute `weight / loss_scale`, as a number if that needs no wait for a device."""
    scale = 1.0 if loss_scale is None else loss_scale.reshape(()).double()
    if isinstance(scale, Tensor) and scale.device.type == "cpu":
        scale = float(scale.tolist())  # type: ignore[arg-type]  # a number; no op that a dispatch mode would see
    if isinstance(scale, float) and scale == 0.0:  # asking a tensor on a device would wait for it
        return math.nan
    return weight / scale
