"""A diffusion model with accelerate and EMA, stock and swapped.

python examples/loops/diffusion.py      # or make example-loops/diffusion; needs accumkernels[accelerate]
"""

from __future__ import annotations

from collections.abc import Iterator

import accelerate
import torch
from compare import compare
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accumkernels.integrations.accelerate import Accelerator

UPDATES, STEPS, BATCH, LEVELS = 8, 4, 32, 100


class Denoiser(nn.Module):
    """Predicts the noise in points of a plane."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, points: Tensor, level: Tensor) -> Tensor:
        """Points `[n, 2]`, level in [0, 1) `[n, 1]`."""
        return self.net(torch.cat([points, level], dim=1))


def micro_batches() -> torch.utils.data.DataLoader:
    """Points of two rings, with the noise and its level, so that both loops see the same."""
    generator = torch.Generator().manual_seed(1)
    count = UPDATES * STEPS * BATCH
    angle = torch.rand(count, generator=generator) * 2 * torch.pi
    radius = 1 + torch.randint(2, (count,), generator=generator)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    noise = torch.randn(count, 2, generator=generator)
    level = torch.randint(LEVELS, (count, 1), generator=generator) / LEVELS
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, noise, level), BATCH)


def loop(accelerator: accelerate.Accelerator) -> Iterator[float]:
    """The loop of accelerate's documentation, which does not change."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, micro_batches())
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    total = 0.0
    for points, noise, level in loader:
        with accelerator.accumulate(model):
            noisy = (1 - level).sqrt() * points + level.sqrt() * noise
            loss = nn.functional.mse_loss(model(noisy, level), noise)
            accelerator.backward(loss)
            total += loss.item() / STEPS
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.update_parameters(accelerator.unwrap_model(model))
            yield total
            total = 0.0


def stock() -> Iterator[float]:
    """With accelerate's own."""
    return loop(accelerate.Accelerator(gradient_accumulation_steps=STEPS))


def swapped() -> Iterator[float]:
    """With ours, which steps once per window as well."""
    return loop(Accelerator(gradient_accumulation_steps=STEPS))


if __name__ == "__main__":
    raise SystemExit(compare(stock, swapped))
