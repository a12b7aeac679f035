"""Small models and data that several test modules train."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Three linear layers with odd widths: 148 parameters in 6 tensors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(n: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs `[n, 5]` and targets `[n, 3]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator, dtype=dtype), torch.randn(n, 3, generator=generator, dtype=dtype)


def big_batch_grads(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients of the mean loss over the whole batch, in fp64."""
    twin = copy.deepcopy(model).double()
    nn.functional.mse_loss(twin(x.double()), y.double()).backward()
    return [p.grad for p in twin.parameters()]


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """L2 norm of the difference over the L2 norm of the truth, over all tensors together, in fp64."""
    a = torch.cat([t.detach().double().flatten() for t in actual])
    e = torch.cat([t.detach().double().flatten() for t in expected])
    return ((a - e).norm() / e.norm()).item()
