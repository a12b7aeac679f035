"""Small models and data that several test modules train."""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn

import accumkernels as ak


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Three linear layers with odd widths: 148 parameters in 6 tensors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


class TwoHeads(nn.Module):
    """Only one of two heads is used in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, head):
        """Use the head of that name."""
        return getattr(self, head)(self.body(x))


class Lookahead(torch.optim.Optimizer):
    """Moves the weights of the optimizer inside, without torch's hooks, as timm's and the first one do."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state

    def step(self, closure=None):
        """A step of the optimizer inside, and half of it back."""
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self._optimizer.step(closure)
        for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            p.data.lerp_(old, 0.5)


def batchnorms() -> nn.Sequential:
    """Two BatchNorms, one of them used twice."""
    shared = nn.BatchNorm2d(8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), shared, nn.Sequential(nn.Conv2d(8, 8, 3), shared), nn.BatchNorm2d(8))


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


def grads_of(acc: ak.FusedAccumulator) -> list[Tensor]:
    """What the optimizer will see."""
    return [p.grad for p in acc.parameters()]


def elements(acc: ak.FusedAccumulator) -> dict[str, int]:
    """By way, how many elements were taken from the graph in the last backward, as its repr says."""
    found = repr(acc).partition("elements in the last backward: ")[2]
    counts = {way: count for count, way in re.findall(r"([\d,]+) (fused|taken in 16 bits)", found)}
    return {way: int(count.replace(",", "")) for way, count in counts.items()}


def fused_elements(acc: ak.FusedAccumulator) -> int:
    """How many of them never were a gradient."""
    return elements(acc).get("fused", 0)


class InPlace(torch.autograd.Function):
    """Doubles; makes its input's gradient in the memory of its output's, which no counter shows, as Liger's RMSNorm."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        grad.data.mul_(2)
        return grad
