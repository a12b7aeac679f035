"""Two jobs that are often named as ways to accumulate, and are different jobs: no ratio to ours is given.

* Lossy: adding 16-bit gradients in 16 bit moves 6 bytes per element instead of 10, and loses what is below half a unit
  in the last place of the sum.
* Fused into the product: a weight gradient's matrix product that adds its fp32 result into the accumulator (`addmm`
  with `out_dtype`) never writes a 16-bit gradient at all. Such a layer has to be written for it; biases, norms and
  embeddings still accumulate otherwise. It is shown beside the plain product to 16 bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..harness.case import Case
from ..harness.measure import Call
from ..harness.shapes import Shapes
from .compute import matrices

LOSSY = "lossy: 16-bit .grad, torch._foreach_add_"
PRODUCT, FUSED_PRODUCT = "weight-gradient products to 16 bit", "addmm(out_dtype=float32) into the accumulator"


def lossy(case: Case, tokens: int) -> Call:
    """The sum has the gradients' dtype."""
    sums = [torch.zeros_like(g) for g in case.grads]
    return lambda: torch._foreach_add_(sums, case.grads)


def _operands(case: Case, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    shapes: Shapes = [tuple(g.shape) for g in case.grads]
    found = []
    for (rows, columns), count in matrices(shapes).items():
        outputs = torch.randn(tokens, rows, device=case.device).to(case.dtype)
        inputs = torch.randn(tokens, columns, device=case.device).to(case.dtype)
        for _ in range(count):
            found.append((torch.zeros(rows, columns, device=case.device), outputs.t(), inputs))
    return found


def products(case: Case, tokens: int) -> Call:
    """What a backward pass does anyway."""
    operands = _operands(case, tokens)

    def whole() -> None:
        for _, left, right in operands:
            torch.mm(left, right)

    return whole


def fused_products(case: Case, tokens: int) -> Call:
    """The same products with beta=1.

    Raises:
        RuntimeError: this torch has no such product on this device.
    """
    operands = _operands(case, tokens)

    def whole() -> None:
        for accumulator, left, right in operands:
            torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)

    whole()
    return whole


JOBS: dict[str, Callable[[Case, int], Call]] = {LOSSY: lossy, PRODUCT: products, FUSED_PRODUCT: fused_products}
