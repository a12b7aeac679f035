"""What a loop without the library sums up, in plain torch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def stock_sums(
    params: Iterable[nn.Parameter], losses: Iterable[Tensor], weights: Iterable[float] = (), scale: float = 1.0
) -> list[Tensor | None]:
    """Sum weighted gradients in fp32 or wider, each product and each sum rounded; None where no gradient came.

    Args:
        params: Their `.grad`s are None, before and after.
        losses: May be made one by one.
        weights: One for each loss, or none at all: 1.
        scale: Of the losses, which is divided out.
    """
    params, weights = list(params), list(weights)
    sums: list[Tensor | None] = [None] * len(params)
    for step, loss in enumerate(losses):
        (loss if scale == 1 else loss * scale).backward()
        factor = (weights[step] if weights else 1.0) / scale
        for i, param in enumerate(params):
            if param.grad is not None:
                part = (param.grad if param.grad.itemsize >= 4 else param.grad.float()) * factor
                before = sums[i]
                sums[i] = part if before is None else before + part
                param.grad = None
    return sums
