"""The parts that the trainers' examples share: samples of unequal length, a small GPT, training with the big batch.

Ten micro-batches of four samples make three windows of four, four and two micro-batches. Each of several ranks has
five, which are two windows, on two ranks of eight and two: were there more on some ranks than on others, accelerate and
transformers would repeat samples to make up for it.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from accumkernels.demo.gpt import GPT, IGNORE, TRAINING_FILES, Batch, read_samples

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # `torchrun` sets it
MICRO_BATCH_SIZE, STEPS, MICRO_BATCHES = 4, 4, max(10, 5 * RANKS)
CPU = torch.device("cpu")


class LanguageModel(nn.Module):
    """A smaller version of the demo's GPT that returns the mean loss over its labels in a dict, as trainers expect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(width=32, depth=2, heads=2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Both arguments are int64 `[samples, length]`."""
        return {"loss": self.gpt(inputs, labels)}


def samples() -> list[bytes]:
    """Return paragraphs of Python's standard library, some short and some long."""
    every = read_samples(TRAINING_FILES)
    return random.Random(0).sample(every, MICRO_BATCH_SIZE * MICRO_BATCHES)


def collate(pieces: list[bytes]) -> dict[str, Any]:
    """Pad samples to a batch; the labels of the padding are -100."""
    batch = Batch.collate(pieces, CPU)
    return {"inputs": batch.inputs, "labels": batch.targets}


def tokens(batch: dict[str, Any]) -> Tensor:
    """Count the labels that the mean loss of a batch is taken over."""
    return (batch["labels"] != IGNORE).sum()


def make_loader(rank: int = 0, ranks: int = 1) -> torch.utils.data.DataLoader:
    """Return the micro-batches of a rank, always in the same order."""
    every = samples()
    sampler = DistributedSampler(every, ranks, rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return torch.utils.data.DataLoader(every, MICRO_BATCH_SIZE, sampler=sampler, collate_fn=collate)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD: its parameters move by the gradients, so they differ where the gradients do."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_with_big_batches() -> nn.Module:
    """Train with every window as one batch, the result that accumulation must reproduce."""
    model, every = LanguageModel(), samples()
    optimizer = make_optimizer(model)
    window = MICRO_BATCH_SIZE * STEPS * RANKS
    for start in range(0, len(every), window):
        model(**collate(every[start : start + window]))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def flat(model: nn.Module) -> Tensor:
    """Concatenate all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def report(trainer: str, stock: nn.Module, fused: nn.Module) -> None:
    """Print how far both models ended from the one that the big batches trained, relative to how far that one moved."""
    if RANK != 0:
        return
    truth, start = flat(train_with_big_batches()), flat(LanguageModel())
    ends = [*range(STEPS * RANKS, MICRO_BATCHES, STEPS * RANKS), MICRO_BATCHES]
    windows = ", ".join(str(end - begin) for begin, end in zip([0, *ends], ends, strict=False))
    print(f"after windows of {windows} micro-batches on {RANKS} ranks, from the big batch:")
    for name, model in ((trainer, stock), (f"{trainer} with FusedAccumulator", fused)):
        distance = (flat(model) - truth).norm() / (truth - start).norm()
        print(f"  {name:<44} {distance:.1e} of the way it went")
