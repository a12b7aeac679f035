"""Decides which weight gradients are added to the flat buffers by the ops that compute them."""

from __future__ import annotations

import torch

_SMALLEST = 2**18  # elements; below, two Python calls cost more than the bytes that they save
_WIDE_RANGE = frozenset({torch.bfloat16, torch.float32})
_ALL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class FusionPolicy:
    """Decides which weights of one accumulator are fused.

    A GradScaler acts on overflows. A sum over tokens that overflows when autograd makes it in fp16, or from scaled
    gradients, may be finite in the buffer, so linear weights are then fused only on demand.

    A backward's additions cannot be undone. By default, weights are fused only if all gradients are added in backward
    anyway; if a micro-batch can be dropped as a whole, they never are.

    Args:
        scaled: Whether losses are scaled.
        wanted: FusedAccumulator's `fuse_weight_gradients`.
        overflow: FusedAccumulator's argument.
        adds_in_backward: Whether gradients are added while backward runs in any case.
        sums_fit_in_cache: Whether making and adding 16-bit gradients of linear weights is faster than fusing them.

    Attributes:
        fuses: Whether any weight may be fused.
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
