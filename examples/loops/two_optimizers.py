"""Muon for matrices and AdamW for the rest, each clipped by its own norm, stock and swapped.

Muon orthogonalizes in bf16, so the last bit of a gradient may turn over a rounding of 1 part in 256 in its update.

python examples/loops/two_optimizers.py     # or make example-loops/two_optimizers
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compare import compare
from torch import Tensor, nn

import accumkernels as ak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS, STEPS, BATCH, WIDTH = 10, 4, 8, 32


def make() -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
    """Return a model, the matrices of its body, and everything else."""
    body = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    model = nn.Sequential(*body, nn.Linear(WIDTH, 1)).to(DEVICE)
    matrices = [p for p in model[:-1].parameters() if p.dim() == 2]
    return model, matrices, [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]


def loader() -> Iterator[tuple[Tensor, Tensor]]:
    """The task is the product of two inputs."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        inputs = torch.randn(STEPS, BATCH, WIDTH, generator=generator).to(DEVICE)
        yield from ((x, x[:, :1] * x[:, 1:2]) for x in inputs)


def stock() -> Iterator[float]:
    """The usual loop."""
    model, matrices, rest = make()
    muon, adamw = torch.optim.Muon(matrices, lr=2e-4), torch.optim.AdamW(rest, lr=1e-3)
    total = 0.0
    for index, (x, y) in enumerate(loader(), 1):
        loss = nn.functional.mse_loss(model(x), y)
        (loss / STEPS).backward()
        total += loss.item() / STEPS
        if index % STEPS == 0:
            torch.nn.utils.clip_grad_norm_(matrices, 1.0)
            torch.nn.utils.clip_grad_norm_(rest, 0.5)
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()
            yield total
            total = 0.0


def swapped() -> Iterator[float]:
    """One step for both; with a GradScaler they are also skipped together."""
    model, matrices, rest = make()
    acc = ak.FusedAccumulator(model)
    muon, adamw = torch.optim.Muon(matrices, lr=2e-4), torch.optim.AdamW(rest, lr=1e-3)
    for window in acc.windows(loader(), STEPS):
        total = 0.0
        for x, y in window:
            loss = nn.functional.mse_loss(model(x), y)
            acc.backward(loss)
            total += loss.item() / STEPS
        acc.step(muon, adamw, max_norm=[(matrices, 1.0), (rest, 0.5)])
        yield total


if __name__ == "__main__":
    raise SystemExit(compare(stock, swapped))
