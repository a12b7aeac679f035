"""What becomes of a window: what to divide by, whether to step, whether the scale backs off."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..buffers.devices import empty
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
        self.exact = empty(len(Judged), torch.float64, state.device)
        single = empty(len(Judged), torch.float32, state.device)
        ops.judge_(self.exact, single, state, divisor=divisor, norm=norm, max_norm=max_norm, overflow=overflow)
        self._single = single.unbind()  # one by one they take as long as the op

    def with_overflow(self, overflow: Tensor) -> Verdict:
        """Judge again, with an overflow (fp64 of one element, 0 or 1) that showed later."""
        if self._overflow is not None:
            overflow = torch.maximum(overflow.reshape(()), self._overflow.reshape(()))
        return Verdict(self._ops, *self._given, overflow)

    def clipped(self, norm: Tensor, max_norm: Tensor) -> Verdict:
        """Judge again, with the norm of the sums and what their average is to be clipped to."""
        state, divisor, _, _ = self._given
        return Verdict(self._ops, state, divisor, norm, max_norm, self._overflow)

    def single(self, index: Judged) -> Tensor:
        """One of the scalars, fp32 0-d."""
        return self._single[index]

    @property
    def skip(self) -> Tensor:
        """fp32; 1.0 where the step must not happen."""
        return self._single[Judged.SKIP]

    @property
    def found_inf(self) -> Tensor:
        """fp32; 1.0 where the loss scale must back off."""
        return self._single[Judged.FOUND_INF]

    @property
    def empty(self) -> Tensor:
        """bool; nothing was accumulated, and nothing overflowed: the scale stays as it is."""
        return self._single[Judged.EMPTY] != 0

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

    @property
    def norm(self) -> Tensor:
        """fp64; of the average, before clipping."""
        return self.exact[Judged.NORM]
