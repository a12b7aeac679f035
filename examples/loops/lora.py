"""LoRA on a frozen base, stock and swapped: frozen parameters take no memory in the accumulator.

python examples/loops/lora.py       # or make example-loops/lora
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compare import compare
from torch import Tensor, nn

import accumkernels as ak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS, STEPS, BATCH, WIDTH, RANK = 10, 4, 8, 128, 4


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.base(x) + x @ self.down.T @ self.up.T


def make() -> nn.Module:
    """Return three layers with LoRA."""
    layers = [layer for _ in range(3) for layer in (LoRA(nn.Linear(WIDTH, WIDTH)), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def loader() -> Iterator[tuple[Tensor, Tensor]]:
    """The task is to reverse the input."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        inputs = torch.randn(STEPS, BATCH, WIDTH, generator=generator).to(DEVICE)
        yield from ((x, x.flip(-1).tanh()) for x in inputs)


def stock() -> Iterator[float]:
    """The usual loop."""
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    total = 0.0
    for index, (x, y) in enumerate(loader(), 1):
        loss = nn.functional.mse_loss(model(x), y)
        (loss / STEPS).backward()
        total += loss.item() / STEPS
        if index % STEPS == 0:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield total
            total = 0.0


def swapped() -> Iterator[float]:
    """The model as a whole is accumulated: layers that are unfrozen later are then known already."""
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for window in acc.windows(loader(), STEPS):
        total = 0.0
        for x, y in window:
            loss = nn.functional.mse_loss(model(x), y)
            acc.backward(loss)
            total += loss.item() / STEPS
        acc.step(optimizer, max_norm=1.0)
        yield total


if __name__ == "__main__":
    raise SystemExit(compare(stock, swapped))
