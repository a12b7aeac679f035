"""A micro-batch's gradients on their way into the flat buffers: checked for overflow first if required, then added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers.devices import move, worst
from ..buffers.store import Store
from ..capture.gradients import Captured
from ..ranks.alone import Alone
from .noise_scale import NoiseMeter


class Sums:
    """Runs the kernels of micro-batches, on every device that has gradients.

    Args:
        store: The flat buffers and states.
        ranks: They drop a micro-batch together where its gradients are sharded.
        overflow: As FusedAccumulator's argument.
        noise: Asked for the sums that the noise scale needs.
    """

    def __init__(self, store: Store, ranks: Alone, overflow: str | None, noise: NoiseMeter) -> None:
        self._store = store
        self._ranks = ranks
        self._overflow = overflow
        self._noise = noise

    def find_overflow(
        self, captured: Sequence[Captured], weight: float | Tensor, tag: int
    ) -> dict[torch.device, Tensor]:
        """Check a micro-batch on every device before anything is added.

        Returns:
            Per device fp64 `[1]`, 1.0 where any gradient on any device, or the weight, is not finite; for DTensors, on
            any rank.
        """
        drops = {device: torch.zeros(1, dtype=torch.float64, device=device) for device in self._store.states}
        for buffer, (segments, grads) in zip(self._store.buffers, captured, strict=True):
            buffer.ops.check_finite_(
                grads,
                segments,
                drops[buffer.device],
                buffer.flags,
                tag=tag,
                weight_tensor=move(weight, buffer.device) if isinstance(weight, Tensor) else None,
            )
        if len(drops) > 1 or self._ranks.sharded:
            bad = self._ranks.maximum(worst(drops.values(), self._store.device))
            drops = {device: move(bad, device) for device in drops}
        return drops

    def add(
        self,
        captured: Sequence[Captured],
        weight: float | Tensor,
        loss_scale: Tensor | None,
        tag: int,
        *,
        drops: dict[torch.device, Tensor] | None = None,
        count: bool = True,
    ) -> None:
        """Add gradients, and mark their segments as touched.

        Args:
            captured: For each flat buffer of the store.
            weight: Of the micro-batch; fp64 0-d where a tensor.
            loss_scale: fp32 0-d, or None.
            tag: What kernels store in the flags of parameters whose gradients are not finite.
            drops: Per device, fp64 `[1]` that drops the micro-batch where it is not 0.
            count: Whether the weight enters the window's; once per micro-batch.
        """
        number, tensor = (0.0, weight) if isinstance(weight, Tensor) else (weight, None)
        first = self._store.buffers[0]
        for buffer, (segments, grads) in zip(self._store.buffers, captured, strict=True):
            counts = count and buffer is first
            if not grads and not counts:
                continue
            device = buffer.device
            try:
                buffer.ops.accumulate_(
                    buffer.tensor,
                    self._store.states[device],
                    grads,
                    segments,
                    buffer.first_touches(segments),
                    buffer.layout,
                    buffer.layout_host,
                    flags=None if self._overflow is None else buffer.flags,
                    tag=tag,
                    weight=number,
                    weight_tensor=None if tensor is None else move(tensor, device),
                    loss_scale=None if loss_scale is None else move(loss_scale, device),
                    drop=None if drops is None else drops[device],
                    sq_norm=self._noise.squares(device),
                    count=counts,
                )
            except RuntimeError:  # an op knows segments by number: where the size is wrong, name the parameter
                for index, grad in zip(segments, grads, strict=True):
                    buffer.segments[index].check_numel(grad)
                raise
        # Only now: an op that refused its arguments has changed nothing.
        for buffer, (segments, _) in zip(self._store.buffers, captured, strict=True):
            buffer.touch(segments)
