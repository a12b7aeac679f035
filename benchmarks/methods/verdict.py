"""The five trainings whose verdict is checked, and the loops that really train them with K micro-batches per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import accumkernels as ak
from accumkernels.demo.gpt import GPT

Batch = dict[str, Tensor]


class Case(NamedTuple):
    """A training: `optimizer` is made from a list of parameters, `batch` from a number of samples."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    optimizer: Callable[[Any], Optimizer]
    micro_batch: int
    target: int
    noise_scale: float | None = None


class Classifier(nn.Module):
    """Any model of logits, with its loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        return nn.functional.cross_entropy(self.layers(inputs), targets)


def _mlp(width: int) -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return Classifier(*layers, nn.Linear(width, 10))


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    return Classifier(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def _labelled(*shape: int) -> Callable[[int], Batch]:
    return lambda n: {"inputs": torch.randn(n, *shape), "targets": torch.randint(10, (n,))}


def _words(n: int) -> Batch:
    return {"inputs": torch.randint(4_000, (n, 32)), "targets": torch.randint(10, (n,))}


def _text(n: int) -> Batch:
    return {"inputs": torch.randint(256, (n, 32)), "targets": torch.randint(256, (n, 32))}


def _adam(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def _sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


CASES = {
    "MLP, 4 samples, AdamW": Case(lambda: _mlp(512), _labelled(512), _adam, 4, 64),
    "MLP, 64 samples, SGD": Case(lambda: _mlp(512), _labelled(512), _sgd, 64, 512),
    "convolutions, 16 samples, AdamW, noise scale 32": Case(
        _convolutions, _labelled(3, 32, 32), _adam, 16, 128, noise_scale=32.0
    ),
    "GPT, 2 samples, AdamW, noise scale 64": Case(GPT, _text, _adam, 2, 32, noise_scale=64.0),
    "bag of words, 32 samples, AdamW": Case(
        lambda: Classifier(nn.EmbeddingBag(4_000, 64), nn.Linear(64, 10)), _words, _adam, 32, 256
    ),
}


def loop(case: Case, steps: int) -> list[Callable[[], object]]:
    """A step of training with K micro-batches as a user writes it, in parts to be called in order.

    They are the micro-batches, each of new samples as in training (gradients of the same few words again and again
    leave most of Adam's state at zero, which takes a CPU longer), and the update; for K = 1 there is no accumulator.
    """
    torch.manual_seed(0)
    model = case.model()
    if steps == 1:
        optimizer = case.optimizer(model.parameters())

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return [lambda: model(**case.batch(case.micro_batch)).backward(), update]

    acc = ak.FusedAccumulator(model)
    windowed = case.optimizer(acc.parameters())

    return [lambda: acc.backward(model(**case.batch(case.micro_batch)))] * steps + [lambda: acc.step(windowed)]
