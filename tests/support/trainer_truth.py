"""What trainers on ranks are held to: one process on all the data, stock torch, summed in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp, relative_error
from tests.support.trainer_data import LR, STEPS, item, items, parameters
from tests.support.trainers import SCALE

# Of the way that the parameters go, which is a hundredth of them: fp32 parameters are rounded twice; measured 2e-6, and
# 1e-7 of the parameters. In 16 bit a parameter of the second window that is one fp32 unit off may round to the next
# 16-bit value, on its way through autocast; measured 2e-5.
ROUNDING = {"fp32": 5e-6, "bf16": 1e-3, "fp16": 2e-4}
# FSDP2 casts all parameters and gradients in 16 bit, not only those of matrix products.
SHARDED_ROUNDING = {"fp32": ROUNDING["fp32"], "bf16": 0.02, "fp16": 2e-3}


def window_gradient(model, numbers, precision):
    """The weighted mean gradient of micro-batches, each computed as a stock loop does, in float64; and their norm."""
    sums, weight = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()], 0
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for i in numbers:
        x, y = item(i)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        # Divided and scaled as trainers do, which decides what underflows in fp16.
        scale = SCALE / STEPS if precision == "fp16" else 1 / STEPS
        (mse_loss(out.float(), y) * scale).backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            if p.grad is not None:
                total += p.grad.double() / scale * len(x)
            p.grad = None
        weight += len(x)
    return [total / weight for total in sums]


def truth(
    size, precision="fp32", clip=None, uneven=True, skipped=(), momentum=0.0, windows=None, rates=(LR, LR),
    change=None, make=mlp,
):  # fmt: skip
    """Parameters by name, and the norms of the windows, those of `items` unless given.

    `change` makes of a window's averaged gradient what is stepped, and `make` the model.
    """
    model = make()
    norms = []
    moving = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for window, numbers in enumerate(items(size, uneven=uneven) if windows is None else windows):
        grads = window_gradient(model, numbers, precision)
        norm = torch.cat([g.flatten() for g in grads]).norm().item()
        norms.append(norm)
        for p, average, grad in zip(model.parameters(), moving, grads, strict=True):
            grad = grad if change is None else change(grad)
            if window not in skipped:
                average.mul_(momentum).add_(grad * min(1.0, (clip or float("inf")) / norm))
                p.data -= ((rates[window] if window < len(rates) else LR) * average).float()
    return parameters(model), norms


def assert_close(found, expected, rounding, make=mlp):
    """Of the way from `mlp()`, over all parameters; found by name, in any order."""
    start = parameters(make())
    assert set(found) == set(expected)
    way = [[values[name].detach() - start[name].detach() for name in start] for values in (found, expected)]
    assert relative_error(*way) < rounding
