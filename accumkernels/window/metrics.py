"""What a logger wants to know of the last finished window, kept where it is until somebody reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.schema import State


class Metrics:
    """A snapshot of the window that ended last, and counts of all windows; nothing is read from the device.

    Counts are kept in place on the device, so that a replayed CUDA graph counts too.

    Args:
        device: Where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: Tensor | None = None  # windows, and those of them that were skipped: fp64 [2]
        self._window: dict[str, float | Tensor] = {}

    def end_window(self, micro_batches: int, state: Tensor, skip: Tensor, found_inf: Tensor) -> None:
        """Take in a window that ends.

        Args:
            micro_batches: `accumulate` calls in it.
            state: The accumulator's state, fp64 `[4]`.
            skip: 0-d, 1.0 where the step does not happen.
            found_inf: 0-d, 1.0 where a gradient was not finite.
        """
        if self._ended is None:
            with torch.inference_mode(False):
                self._ended = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._ended[0] += 1
        self._ended[1] += skip
        state = state.clone()  # the next window starts it anew
        self._window = {
            "micro_batches": micro_batches,
            "micro_batches_used": state[State.USED],
            "weight": state[State.WEIGHT],
            "found_inf": found_inf,
            "step_skipped": skip,
        }

    def end_empty_window(self) -> None:
        """Take in a window without micro-batches."""
        zero = torch.zeros((), device=self._device)
        self.end_window(0, zero.double().expand(len(State)), zero + 1, zero)

    def see_norm(self, norm: Tensor) -> None:
        """Take in the norm of the window that ended."""
        self._window["grad_norm"] = norm

    def read(self) -> dict[str, float | Tensor]:
        """The snapshot, in tensors of its own."""
        ended = torch.zeros(2, dtype=torch.float64) if self._ended is None else self._ended.clone()
        window = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self._window.items()}
        return {**window, "windows": ended[0], "windows_skipped": ended[1]}
