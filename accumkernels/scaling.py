"""The handshake with `torch.amp.GradScaler`.

The accumulator has already unscaled and checked when the window ends, so it enters its verdict where `scaler.unscale_`
would: the optimizer's stage becomes UNSCALED and `found_inf_per_device` holds the verdict. `scaler.step` then neither
unscales again nor misses an overflow, and `scaler.update` moves the scale as in a stock loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .parameters import NamedParameter


class _Verdict(dict[torch.device, Tensor]):
    """A `found_inf_per_device` that answers `scaler.step` and `scaler.update` separately.

    They differ when a window is stepped although a micro-batch overflowed (the scale backs off), or skipped although
    nothing overflowed (there was nothing to average). Every answer is a clone: `update` adds in place into the first
    found_inf it is given.
    """

    def __init__(self, record: dict[str, Any], device: torch.device, skip: Tensor, found_inf: Tensor) -> None:
        super().__init__({device: skip})
        self._record = record
        self._skip = skip
        self._found_inf = found_inf

    def values(self) -> list[Tensor]:  # type: ignore[override]
        stepped = self._record["stage"] is OptState.STEPPED
        return [(self._found_inf if stepped else self._skip).clone()]


class LossScaler:
    """What FusedAccumulator needs of a GradScaler; without an enabled one, every method does nothing."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    def check_device(self, named: Sequence[NamedParameter]) -> None:
        """Refuse a scaler whose scale lives on another kind of device than the parameters.

        Raises:
            ValueError: names the first such parameter.
        """
        if self.scaler is None:
            return
        device = torch.device(self.scaler._device).type
        for entry in named:
            if entry.param.device.type != device:
                raise ValueError(
                    f"scaler is for {device!r}, but {entry.name!r} is on {entry.param.device}: "
                    f"use torch.amp.GradScaler({entry.param.device.type!r})"
                )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def loss_scale(self) -> Tensor | None:
        """The scale that gradients carry now, fp32 on the scaler's device; None when they carry none.

        Raises:
            RuntimeError: the scaler has not scaled any loss yet.
        """
        if self.scaler is None:
            return None
        if self.scaler._scale is None:
            raise RuntimeError(
                "accumulate() with a GradScaler that has never scaled a loss: call acc.backward(loss), or "
                "scaler.scale(loss).backward() before acc.accumulate()"
            )
        return self.scaler._scale

    def check_not_unscaled(self) -> None:
        """Refuse gradients that `scaler.unscale_` has already divided by the scale.

        Raises:
            RuntimeError: `scaler.unscale_(optimizer)` was called since the last `scaler.update()`.
        """
        if self.scaler is None:
            return
        for record in self.scaler._per_optimizer_states.values():
            if record["stage"] is OptState.UNSCALED and not isinstance(record["found_inf_per_device"], _Verdict):
                raise RuntimeError(
                    "scaler.unscale_(optimizer) was called inside a window: delete that line, FusedAccumulator "
                    "unscales in accumulate(). Drop the window with acc.zero_() and call scaler.update() to go on"
                )

    def record(self, optimizer: torch.optim.Optimizer, skip: Tensor, found_inf: Tensor) -> None:
        """Tell the scaler that `optimizer`'s gradients are unscaled and checked.

        Args:
            optimizer: The optimizer that `scaler.step` will be called with.
            skip: fp32 0-d, exactly 1.0 when the step must not happen.
            found_inf: fp32 0-d, exactly 1.0 when the scale must back off.

        Raises:
            RuntimeError: the optimizer was stepped since the last `scaler.update()`.
        """
        if self.scaler is None:
            return
        scale = self.scaler._scale
        if scale is None:  # an empty window before any loss was scaled: step() and update() need the scale to exist
            self.scaler.scale(torch.zeros((), device=skip.device))
            scale = self.scaler._scale
            assert scale is not None
        record = self.scaler._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise RuntimeError("finalize() after scaler.step(optimizer): call scaler.update() first")
        skip, found_inf = (t.to(scale.device, non_blocking=True) for t in (skip, found_inf))
        record["stage"] = OptState.UNSCALED
        record["found_inf_per_device"] = _Verdict(record, scale.device, skip, found_inf)

    def update(self, keep: Tensor | None) -> None:
        """`scaler.update()`, except that where `keep` (0-d bool) holds, scale and growth tracker stay; no sync."""
        if self.scaler is None:
            return
        scale, tracker = self.scaler._scale, self.scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        if keep is None:
            self.scaler.update()
            return
        old_scale, old_tracker = scale.clone(), tracker.clone()
        self.scaler.update()
        keep = keep.to(scale.device, non_blocking=True)
        scale.copy_(torch.where(keep, old_scale, scale))
        tracker.copy_(torch.where(keep, old_tracker, tracker))
