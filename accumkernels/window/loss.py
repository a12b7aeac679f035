"""The loss of a window: the mean over its micro-batches, weighted as their gradients are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..buffers.devices import move


class WindowLoss:
    """Keeps the losses of a window's micro-batches: on a GPU where they are, unread; those of the CPU as numbers.

    Args:
        device: Where they are summed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: Tensor | None = None  # sums of a window that was saved
        self.open_window()

    def open_window(self) -> None:
        """Forget the losses of the window that ended."""
        self._loaded = None
        self._losses: list[float | Tensor] = []
        self._weights: list[float | Tensor] = []
        self._undecided = 0  # of the last ones, whose gradients are kept and may still be dropped

    def add(
        self, loss: Tensor | None, weight: float | Tensor, drop: Tensor | None = None, *, unsynced: bool = False
    ) -> None:
        """Take in a micro-batch.

        Args:
            loss: One element, as the user computed it, on any device; None or larger ones do not count.
            weight: Of the micro-batch; fp64 0-d where a tensor.
            drop: fp64 `[1]`, not 0 where the micro-batch is dropped, with those kept before it; None where it is not.
            unsynced: Whether its gradients will come with those of a later micro-batch, and be used or dropped with
                them.
        """
        if loss is not None and loss.numel() == 1:
            self._losses.append(self._value_now(loss))
            self._weights.append(weight)
            self._undecided += 1
        if unsynced:
            return
        if drop is not None:
            decided = len(self._weights) - self._undecided
            dropped = drop.reshape(()) != 0
            self._weights[decided:] = [torch.where(dropped, 0.0, self._scalar(w)) for w in self._weights[decided:]]
        self._undecided = 0

    def _value_now(self, loss: Tensor) -> float | Tensor:
        """Its value now: loops like to change a loss in place afterwards, and it may be a view of much more."""
        if type(loss) is Tensor and loss.is_cpu:  # a number costs a fifth of a tensor
            value = loss.tolist()
            while isinstance(value, list):
                (value,) = value
            return float(value)
        return loss.detach().reshape(()).to(self._device, torch.float64, copy=True)

    def drop_unsynced(self) -> None:
        """Forget micro-batches whose gradients were kept and will not be used."""
        decided = len(self._losses) - self._undecided
        del self._losses[decided:], self._weights[decided:]
        self._undecided = 0

    def _scalar(self, weight: float | Tensor) -> Tensor:
        """fp64 0-d on the device; a number is filled in there, since a copy of it would wait."""
        return (
            weight if isinstance(weight, Tensor) else torch.full((), weight, dtype=torch.float64, device=self._device)
        )

    def _vector(self, values: Sequence[float | Tensor]) -> Tensor:
        """fp64 on the device; numbers alone go there in one copy."""
        if any(isinstance(value, Tensor) for value in values):
            return torch.stack(list(map(self._scalar, values)))
        return move(torch.tensor(values, dtype=torch.float64, device="cpu"), self._device)

    def sums(self) -> Tensor | None:
        """fp64 `[2]`: `sum w_i l_i` and `sum w_i` over the micro-batches with a loss; None where there are none."""
        return self.later()()

    def later(self) -> Callable[[], Tensor | None]:
        """Makes `sums` of this window when somebody asks, also after the window."""
        return functools.partial(self._sum, self._losses, self._weights, self._loaded)

    def _sum(
        self, losses: Sequence[float | Tensor], weights: Sequence[float | Tensor], loaded: Tensor | None
    ) -> Tensor | None:
        if not losses:
            return loaded
        # The loss of a dropped micro-batch is usually not finite, and 0 times that is NaN.
        w = self._vector(weights)
        used = torch.stack([torch.where(w != 0, w * self._vector(losses), 0.0), w]).sum(1)
        return used if loaded is None else used + loaded

    def resume(self, sums: Sequence[float]) -> None:
        """Go on from a checkpoint: the two numbers of `sums`, zeros where there were none."""
        self.open_window()
        if any(sums):
            self._loaded = torch.tensor(sums, dtype=torch.float64, device=self._device)
