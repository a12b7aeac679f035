"""A micro-batch's gradients on their way into the flat buffers: checked for overflow first if required, then added."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..buffers.devices import move, worst
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..capture.gradients import Bucket, Captured, in_memory_order
from ..ranks.base import Ranks
from .loss_weighting import Weight
from .noise_scale import NoiseMeter

_NOTHING = Captured([], [])


class Sums:
    """Runs the kernels of micro-batches, on every device that has gradients.

    Args:
        store: The flat buffers and states.
        ranks: They drop a micro-batch together where its gradients are sharded.
        overflow: As FusedAccumulator's argument.
        noise: Asked for the sums that the noise scale needs.

    Attributes:
        partial: Whether an op has run of an `add` that did not end: one refuses its own gradients before it adds any.
    """

    def __init__(self, store: Store, ranks: Ranks, overflow: str | None, noise: NoiseMeter) -> None:
        self._store = store
        self._ranks = ranks
        self._overflow = overflow
        self._noise = noise
        self.partial = False

    def find_overflow(self, captured: Bucket, weight: float | Tensor, tag: int) -> dict[torch.device, Tensor]:
        """Check a micro-batch on every device before anything is added.

        Returns:
            Per device fp64 `[1]`, 1.0 where any gradient on any device, or the weight, is not finite; for DTensors, on
            any rank.
        """
        drops = {device: torch.zeros(1, dtype=torch.float64, device=device) for device in self._store.states}
        for buffer, taken in captured:
            weight_tensor = move(weight, buffer.device) if isinstance(weight, Tensor) else None
            check = functools.partial(buffer.ops.check_finite_, tag=tag, weight_tensor=weight_tensor)
            _run(check, (), buffer, taken, (buffer.rows(taken.segments), drops[buffer.device], buffer.flags))
        if len(drops) > 1 or self._ranks.judged_together:
            bad = self._ranks.maximum(worst(drops.values(), self._store.device))
            drops = {device: move(bad, device) for device in drops}
        return drops

    def add(
        self,
        bucket: Bucket,
        weight: Weight,
        loss_scale: Tensor | None,
        tag: int,
        *,
        drops: dict[torch.device, Tensor] | None = None,
        count: bool = True,
    ) -> None:
        """Add gradients, and mark their segments as touched.

        Args:
            bucket: Gradients, by flat buffer.
            weight: Of the micro-batch.
            loss_scale: fp32 0-d, or None.
            tag: What kernels store in the flags of parameters whose gradients are not finite.
            drops: Per device, fp64 `[1]` that drops the micro-batch where it is not 0.
            count: Whether the weight enters the window's; once per micro-batch.
        """
        plain = weight.plain
        grad_weight = weight.total if plain else weight.grad_weight
        first, measuring = self._store.buffers[0], self._noise.measuring
        self.partial = False
        for buffer, taken in bucket:
            if not taken.grads:
                continue
            squares = weighted = None
            if measuring:
                self._noise.see(buffer, taken.segments, tag)
                squares = self._noise.squares(buffer.device)
                weighted = squares if plain or squares is None else torch.zeros_like(squares)
            counts = count and plain and buffer is first
            self._accumulate(buffer, taken, grad_weight, loss_scale, tag, drops, weighted, counts)
            self.partial = True
            count = count and not counts
            if squares is not None and weighted is not None and weighted is not squares:
                self._add_squares(squares, weighted, weight)
        if count:  # nothing for the first buffer, or the gradients hold a part of the weight already
            self._accumulate(first, _NOTHING, weight.total, None, tag, drops, None, True)
        # Only now: an op that refused its arguments has changed nothing.
        for buffer, (segments, _) in bucket:
            buffer.touch(segments)
        self.partial = False

    def _accumulate(
        self,
        buffer: FlatBuffer,
        captured: Captured,
        weight: float | Tensor,
        loss_scale: Tensor | None,
        tag: int,
        drops: dict[torch.device, Tensor] | None,
        squares: Tensor | None,
        count: bool,
    ) -> None:
        device, segments = buffer.device, captured.segments
        if loss_scale is not None and loss_scale.device != device:
            loss_scale = move(loss_scale, device)
        factors = (weight, None) if isinstance(weight, float) else (1.0, move(weight, device))
        flags = None if self._overflow is None else buffer.flags
        drop = None if drops is None else drops[device]
        # In the order of the op's schema: names take their time, in each bucket.
        rest = buffer.rows(segments), buffer.first_touches(segments), buffer.layout, buffer.layout_host
        options = flags, tag, *factors, loss_scale, drop, squares, count, buffer.contiguous
        first = buffer.tensor, self._store.states[device]
        _run(buffer.ops.accumulate_, first, buffer, captured, (*rest, *options))

    def _add_squares(self, squares: Tensor, weighted: Tensor, weight: Weight) -> None:
        """Add `sum w_i |g_i|^2` where the gradients of a loss times `loss_weight` have that squared."""
        factor = weight.loss_weight
        if isinstance(factor, Tensor):
            factor = move(torch.where(factor == 0, 1.0, factor), squares.device)
        weighted[0] /= 1.0 if isinstance(factor, float) and factor == 0 else factor
        squares += weighted


def _run(
    op: Callable[..., None], first: tuple[Any, ...], buffer: FlatBuffer, captured: Captured, rest: tuple[Any, ...]
) -> None:
    """Run an op on gradients, which are its argument between `first` and `rest`.

    Nearly always they are in memory order as backward made them. The op sees that, and refuses others before it has
    done anything: a look at each of them here would take a third of its time.

    Raises:
        RuntimeError: names a parameter whose gradient is sparse or has the wrong size, which an op knows by number.
    """
    grads = captured.grads if buffer.contiguous else in_memory_order(buffer, captured)
    try:
        op(*first, grads, *rest)
    except RuntimeError:
        ordered = in_memory_order(buffer, captured)
        if not buffer.contiguous or all(map(is_, ordered, grads)):
            raise
        op(*first, ordered, *rest)
