"""Which weight gradients are added to the flat buffers by the ops that compute them."""

from __future__ import annotations

import torch

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
        scaled: Whether losses are scaled.
        wanted: FusedAccumulator's `fuse_weight_gradients`.
        overflow: As FusedAccumulator's argument.
        adds_in_backward: Whether gradients are added while backward runs in any case.
        sums_fit_in_cache: Whether 16-bit gradients of linear weights are made and added faster than they are fused.

    Attributes:
        fuses: Whether any weight may be.
        min_numel: Weights of fewer elements are not fused.
        linear: The dtypes of linear weights, as they are multiplied, that are fused.
        embedding: The dtypes of embeddings that are fused.
    """

    def __init__(
        self, scaled: bool, wanted: str | bool, overflow: str | None, adds_in_backward: bool, sums_fit_in_cache: bool
    ) -> None:
        on_demand = wanted is True
        self.fuses = wanted is not False and overflow in (None, "window") and (on_demand or adds_in_backward)
        self.min_numel = 0 if on_demand else _SMALLEST
        by_default = _WIDE_RANGE - {torch.bfloat16} if sums_fit_in_cache else _WIDE_RANGE
        self.linear = _ALL if on_demand else frozenset() if scaled else by_default
        self.embedding = _ALL if on_demand or not scaled else _ALL - {torch.float16}
