"""What a logger wants to know of the last finished window, kept where it is until somebody reads it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.schema import Judged


class Metrics:
    """A snapshot of the window that ended last, and counts of all windows; nothing is read from the device.

    Counts are kept in place on a GPU, so that a replayed CUDA graph counts too; those of the CPU are numbers.

    Args:
        device: Where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted = 0.0, 0.0  # windows, and those of them that were skipped, where the host has the verdicts
        self._ended: Tensor | None = None  # the same where it has not: fp64 [2]
        self._micro_batches = 0  # of the window that ended last
        self._judged: Tensor | None = None
        self._norm: Tensor | None = None
        self._loss: Callable[[], Tensor | None] = lambda: None

    def end_window(self, micro_batches: int, judged: Tensor, loss: Callable[[], Tensor | None]) -> None:
        """Take in a window that ends.

        Args:
            micro_batches: `accumulate` calls in it.
            judged: fp64, see `ops.schema.Judged`; not changed any more.
            loss: See `WindowLoss.later`; asked by `read`.
        """
        if judged.is_cpu:  # a number costs a tenth of a tensor
            numbers = judged.tolist()
            self._counted = self._counted[0] + numbers[Judged.ENDED], self._counted[1] + numbers[Judged.SKIP]
        else:
            self._count_on_device(judged)
        self._micro_batches, self._judged, self._norm, self._loss = micro_batches, judged, None, loss

    def _count_on_device(self, judged: Tensor) -> None:
        if self._ended is None:
            with torch.inference_mode(False):
                self._ended = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._ended += judged[Judged.ENDED : Judged.SKIP + 1]

    def end_empty_window(self) -> None:
        """Take in a window without micro-batches."""
        judged = torch.zeros(len(Judged), dtype=torch.float64, device=self._device)
        judged[: Judged.SKIP + 1] = 1
        self.end_window(0, judged, lambda: None)

    def see_norm(self, norm: Tensor) -> None:
        """Take in the norm of the window that ended."""
        self._norm = norm

    def read(self) -> dict[str, float | Tensor]:
        """The snapshot, in tensors of its own."""
        counted = torch.tensor(self._counted, dtype=torch.float64, device="cpu")
        ended = counted if self._ended is None else self._ended.clone()
        window: dict[str, float | Tensor] = {"windows": ended[0], "windows_skipped": ended[1]}
        if self._judged is not None:
            judged = self._judged.clone()
            window["micro_batches"] = self._micro_batches
            window["micro_batches_used"], window["weight"] = judged[Judged.USED], judged[Judged.WEIGHT]
            window["found_inf"], window["step_skipped"] = judged[Judged.FOUND_INF].float(), judged[Judged.SKIP].float()
        loss = self._loss()
        if loss is not None:
            window["loss"] = loss[0] / loss[1]
        if self._norm is not None:
            window["grad_norm"] = self._norm.clone()
        return window
