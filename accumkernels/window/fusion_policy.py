"""Whether a micro-batch's weight gradients may be added to the buffers by the ops that compute them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..capture.fused.weights import FusionGrant
from .noise_scale import NoiseMeter
from .scaling import LossScaler

_SMALLEST = 2**18  # elements; below, two calls of Python cost more than the bytes that they save
_WIDE_RANGE = frozenset({torch.bfloat16, torch.float32})
_ALL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class FusionPolicy:
    """Decides for one accumulator.

    A GradScaler decides by what overflows. A sum over tokens that overflows where autograd makes it in fp16, or of
    gradients that are scaled, may be finite in the buffer: therefore linear weights are then fused only on demand.

    What a backward has added cannot be taken back. By default weights are fused only where that is so of all
    gradients, and where a micro-batch can be dropped as a whole they never are.

    Args:
        scaler: The accumulator's.
        noise: While it measures, micro-batches need gradients of their own.
        wanted: FusedAccumulator's `fuse_weight_gradients`.
        overflow: As FusedAccumulator's argument.
        adds_in_backward: Whether gradients are added while backward runs in any case.
        sums_fit_in_cache: Whether 16-bit gradients of linear weights are made and added faster than they are fused.

    Attributes:
        smallest: Weights of fewer elements are not fused; None: none is.
        linear: The dtypes of linear weights, as they are multiplied, that are fused.
    """

    def __init__(
        self,
        scaler: LossScaler,
        noise: NoiseMeter,
        wanted: str | bool,
        overflow: str | None,
        adds_in_backward: bool,
        sums_fit_in_cache: bool,
    ) -> None:
        on_demand = wanted is True
        self.min_numel: int | None = None
        if wanted is not False and overflow in (None, "window") and (on_demand or adds_in_backward):
            self.min_numel = 0 if on_demand else _SMALLEST
        self._scaler = scaler
        self._noise = noise
        scaled = scaler.scaler is not None
        by_default = _WIDE_RANGE - {torch.bfloat16} if sums_fit_in_cache else _WIDE_RANGE
        self.linear = _ALL if on_demand else frozenset() if scaled else by_default
        self._embedding = _ALL if on_demand or not scaled else _ALL - {torch.float16}

    def permission(self, weight: float | Tensor, tag: int) -> FusionGrant | None:
        """For the backward of a micro-batch; None where it needs gradients of its own.

        Args:
            weight: What its unscaled gradients are to be multiplied by; a number, or fp64 0-d.
            tag: Its serial number.
        """
        if self._noise.on:
            return None
        grad_weight = _over(weight, self._scaler.loss_scale())
        if isinstance(grad_weight, float) and (grad_weight == 0 or not math.isfinite(grad_weight)):
            return None  # BLAS would not look for an overflow in what it multiplies by zero
        return FusionGrant(grad_weight, tag, self.linear, self._embedding)


def _over(weight: float | Tensor, loss_scale: Tensor | None) -> float | Tensor:
    """`weight / loss_scale`, as a number where no device has to be waited for."""
    scale = 1.0 if loss_scale is None else loss_scale.reshape(()).double()
    if isinstance(scale, Tensor) and scale.device.type == "cpu":
        scale = scale.item()
    if scale == 0.0 and isinstance(scale, float):
        return math.nan
    return weight / scale
