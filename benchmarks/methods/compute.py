"""What the rest of a training step costs: its matrix products and the optimizer.

A window's gradient work is put in relation to a step of nothing but the three products per matrix and micro-batch
(forward, and two backward) and one fused AdamW. Attention, activations and losses would come on top, so shares are
upper bounds; `benchmarks.training` measures a whole model.
"""

from __future__ import annotations

import collections
import math
import statistics

import torch

from ..harness.measure import Timer
from ..harness.shapes import Shapes

TOKENS = {"cuda": 8192, "cpu": 256}  # of a micro-batch
_OPTIMIZED = 2**24  # elements that AdamW is timed on


def matrices(shapes: Shapes) -> dict[tuple[int, int], int]:
    """How often each (rows, columns) occurs; a convolution's weight is a matrix too, vectors are left out."""
    return collections.Counter((shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1)


def products_seconds(shapes: Shapes, dtype: torch.dtype, tokens: int, timer: Timer, repetitions: int = 3) -> float:
    """All matrix products of a micro-batch's forward and backward pass."""
    total = 0.0
    for (rows, columns), count in matrices(shapes).items():
        weight = torch.randn(rows, columns, device=timer.device).to(dtype)
        inputs = torch.randn(tokens, columns, device=timer.device).to(dtype)
        outputs = torch.randn(tokens, rows, device=timer.device).to(dtype)

        def products(x: torch.Tensor = inputs, w: torch.Tensor = weight, y: torch.Tensor = outputs) -> None:
            torch.mm(x, w.t())
            torch.mm(y, w)
            torch.mm(y.t(), x)

        products()
        total += count * statistics.median(timer(products) for _ in range(repetitions))
    return total


def optimizer_seconds(elements: int, timer: Timer, repetitions: int = 3) -> float:
    """A fused AdamW step over fp32 parameters, from the time of one that is large enough to tell."""
    timed = min(elements, _OPTIMIZED)
    param = torch.nn.Parameter(torch.ones(timed, device=timer.device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    return statistics.median(timer(optimizer.step) for _ in range(repetitions)) * elements / timed


def step_seconds(shapes: Shapes, dtype: torch.dtype, tokens: int, timer: Timer) -> tuple[float, float]:
    """Seconds per micro-batch, and per window; 0 per micro-batch where there is no matrix.

    On the CPU the products are bf16's in any case: fp16's are emulated, some 50 times slower.
    """
    products = products_seconds(shapes, torch.bfloat16 if timer.device.type == "cpu" else dtype, tokens, timer)
    return products, optimizer_seconds(sum(math.prod(shape) for shape in shapes), timer)
