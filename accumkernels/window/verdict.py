"""A window's verdict (its divisor, and whether to step and to back off), and metrics for loggers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ..ops.schema import Judged


class Verdict:
    """Device scalars of one window, computed by one op call; nothing is read back.

    Args:
        ops: The backend's module.
        state: fp64 `[4]`, see `ops.schema.State`.
        divisor: fp64 0-d that replaces the sum of weights, or None.
        norm: The sums' norm, fp64 0-d, or None.
        max_norm: The norm to clip their average to, fp64 0-d, or None.
        overflow: fp64 of one element; if not 0, a sum is not finite although the state does not show it.

    Attributes:
        exact: fp64, by `ops.schema.Judged`.
        single: The same in fp32, each 0-d.
        skip: fp32; 1.0 if the step must not happen.
        found_inf: fp32; 1.0 if the loss scale must back off.
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
        self.single = single.unbind()  # indexing one by one takes as long as the op
        self.skip = self.single[Judged.SKIP]
        self.found_inf = self.single[Judged.FOUND_INF]

    def with_overflow(self, overflow: Tensor) -> Verdict:
        """Judge again with an overflow (fp64 of one element, 0 or 1) that showed later."""
        if self._overflow is not None:
            overflow = torch.maximum(overflow.reshape(()), self._overflow.reshape(()))
        return Verdict(self._ops, *self._given, overflow)

    @property
    def empty(self) -> Tensor:
        """bool; whether nothing was accumulated and nothing overflowed, so that the scale stays."""
        return self.single[Judged.EMPTY] != 0

    @property
    def divisor(self) -> Tensor:
        """fp64; the divisor of the sums."""
        return self.exact[Judged.DIVISOR]

    @property
    def coefficient(self) -> Tensor:
        """fp64; the factor that clips the average."""
        return self.exact[Judged.COEFFICIENT]

    @property
    def divide_by(self) -> Tensor:
        """fp64; divisor and coefficient in one."""
        return self.exact[Judged.DIVIDE_BY]


def _two_empty(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make fp64 and fp32 tensors that may be changed outside inference mode too."""
    if torch.is_inference_mode_enabled():  # the context takes four times as long as a tensor
        with torch.inference_mode(False):
            return _two_empty(numel, device)
    exact = torch.empty(numel, dtype=torch.float64, device=device)
    return exact, torch.empty(numel, dtype=torch.float32, device=device)


def is_known_zero(scalar: Tensor) -> bool:
    """Whether the host can see, without waiting, that a 0-d tensor is zero."""
    return scalar.is_cpu and scalar.tolist() == 0  # not item(): tolist() is no op


class Metrics:
    """A snapshot of the last window that ended, and counts of all windows; nothing is read from the device.

    A GPU updates its counts in place, so that a replayed CUDA graph counts too; counts on the CPU are numbers.

    Args:
        device: Where to keep the counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted = 0.0, 0.0  # windows, and skipped windows, whose verdicts the host has
        self._ended: Tensor | None = None  # the same for verdicts on the device: fp64 [2]
        self._micro_batches = 0  # of the window that ended last
        self._judged: Tensor | None = None
        self._norm: Tensor | None = None
        self._loss: Callable[[], Tensor | None] = lambda: None

    def end_window(self, micro_batches: int, judged: Tensor, loss: Callable[[], Tensor | None]) -> None:
        """Record a window that ends.

        Args:
            micro_batches: Number of its `accumulate` calls.
            judged: fp64, see `ops.schema.Judged`; nobody changes it any more.
            loss: See `WindowLoss.sums`; `read` calls it.
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
        """Record a window without micro-batches."""
        judged = torch.zeros(len(Judged), dtype=torch.float64, device=self._device)
        judged[: Judged.SKIP + 1] = 1
        self.end_window(0, judged, lambda: None)

    def see_norm(self, norm: Tensor) -> None:
        """Record the norm of the window that ended."""
        self._norm = norm

    def read(self) -> dict[str, float | Tensor]:
        """Return the snapshot, in tensors of its own."""
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
