"""What becomes of a window: what to divide by, whether to step or to back off; and what loggers want to know of it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ..ops.schema import Judged


class Verdict:
    """Device scalars of one window, by one call of an op; nothing is read back.

    Args:
        ops: The backend's module.
        state: fp64 `[4]`, see `ops.schema.State`.
        divisor: fp64 0-d that replaces the sum of weights, or None.
        norm: fp64 0-d, of the sums, or None.
        max_norm: fp64 0-d that their average is to be clipped to, or None.
        overflow: fp64 of one element; where not 0, a sum is not finite, which the state does not show.

    Attributes:
        exact: fp64, by `ops.schema.Judged`.
        single: The same in fp32, each 0-d.
        skip: fp32; 1.0 where the step must not happen.
        found_inf: fp32; 1.0 where the loss scale must back off.
    """

    def __init__(
        self,
        ops: ModuleType,
        state: Tensor,
        divisor: Tensor | None,
        norm: Tensor | None = None,
        max_norm: Tensor | None = None,
        overflow: Tensor | None = None,
    ) -> None:
        self._ops = ops
        self._given = (state, divisor, norm, max_norm)
        self._overflow = overflow
        self.exact, single = _two_empty(len(Judged), state.device)
        ops.judge_(self.exact, single, state, divisor=divisor, norm=norm, max_norm=max_norm, overflow=overflow)
        self.single = single.unbind()  # one by one they take as long as the op
        self.skip = self.single[Judged.SKIP]
        self.found_inf = self.single[Judged.FOUND_INF]

    def with_overflow(self, overflow: Tensor) -> Verdict:
        """Judge again, with an overflow (fp64 of one element, 0 or 1) that showed later."""
        if self._overflow is not None:
            overflow = torch.maximum(overflow.reshape(()), self._overflow.reshape(()))
        return Verdict(self._ops, *self._given, overflow)

    @property
    def empty(self) -> Tensor:
        """bool; nothing was accumulated, and nothing overflowed: the scale stays as it is."""
        return self.single[Judged.EMPTY] != 0

    @property
    def divisor(self) -> Tensor:
        """fp64; what the sums are divided by."""
        return self.exact[Judged.DIVISOR]

    @property
    def coefficient(self) -> Tensor:
        """fp64; what clips the average."""
        return self.exact[Judged.COEFFICIENT]

    @property
    def divide_by(self) -> Tensor:
        """fp64; divisor and coefficient in one."""
        return self.exact[Judged.DIVIDE_BY]


def _two_empty(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp64 and fp32 tensors that may be changed outside inference mode too."""
    if torch.is_inference_mode_enabled():  # the context takes four times as long as a tensor
        with torch.inference_mode(False):
            return _two_empty(numel, device)
    exact = torch.empty(numel, dtype=torch.float64, device=device)
    return exact, torch.empty(numel, dtype=torch.float32, device=device)


def is_known_zero(scalar: Tensor) -> bool:
    """Whether the host can see, without waiting, that a 0-d tensor is zero."""
    return scalar.is_cpu and scalar.tolist() == 0  # not item(): tolist() is no op


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
            loss: See `WindowLoss.sums`; asked by `read`.
        """
        if judged.is_cpu:  # a number costs a tenth of a tensor
            numbers = judged.tolist()
            self._counted = self._counted[0] + numbers[Judged.ENDED], self._counted[1] + numbers[Judged.SKIP]
        else:
            if self._ended is None:
                with torch.inference_mode(False):
                    self._ended = torch.zeros(2, dtype=torch.float64, device=self._device)
            self._ended += judged[Judged.ENDED : Judged.SKIP + 1]
        self._micro_batches, self._judged, self._norm, self._loss = micro_batches, judged, None, loss

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
