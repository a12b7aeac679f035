"""Image classification with weight-decay groups, warm-up counted in updates, EMA and a resume, stock and swapped.

python examples/loops/image.py      # or make example-loops/image
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from compare import compare
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accumkernels as ak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Stateful = nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler
WINDOWS, STEPS, BATCH, CLASSES, WARM_UP, RESUME_AT = 10, 4, 8, 4, 4, 5


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, AveragedModel]:
    """Return a small convolutional network, AdamW with groups, warm-up in updates, and an average of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, CLASSES),
    ).to(DEVICE)  # fmt: skip
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / WARM_UP))
    return model, optimizer, scheduler, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def windows(first: int = 0) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Noise with a bright quarter, whose place is the class, from window `first` on."""
    for number in range(first, WINDOWS):
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(CLASSES, (STEPS, BATCH), generator=generator)
        images = torch.randn(STEPS, BATCH, 3, 16, 16, generator=generator)
        for image, label in zip(images.flatten(0, 1), labels.flatten().tolist(), strict=True):
            row, column = 8 * (label // 2), 8 * (label % 2)
            image[:, row : row + 8, column : column + 8] += 1.0
        yield [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(images, labels, strict=True)]


def save(*objects: Stateful) -> list[dict]:
    """What a checkpoint on disk would hold."""
    return copy.deepcopy([each.state_dict() for each in objects])


def load(states: list[dict], *objects: Stateful) -> None:
    """Go on from there."""
    for state, each in zip(states, objects, strict=True):
        each.load_state_dict(state)


def stock() -> Iterator[float]:
    """The usual loop; after some updates everything is built anew and loaded."""
    model, optimizer, scheduler, average = make()
    for number, window in enumerate(windows()):
        if number == RESUME_AT:
            states = save(model, optimizer, scheduler, average)
            model, optimizer, scheduler, average = make()
            load(states, model, optimizer, scheduler, average)
        total = 0.0
        for x, y in window:
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / len(window)).backward()
            total += loss.item() / len(window)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        yield total
    yield check(average)


def swapped() -> Iterator[float]:
    """Between windows, the accumulator has no state that a run needs to resume; inside one, see docs/checkpoints.md."""
    model, optimizer, scheduler, average = make()
    acc = ak.FusedAccumulator(model)
    for number, window in enumerate(windows()):
        if number == RESUME_AT:
            states = save(model, optimizer, scheduler, average)
            model, optimizer, scheduler, average = make()
            acc = ak.FusedAccumulator(model)
            load(states, model, optimizer, scheduler, average)
        total = 0.0
        for x, y in window:
            loss = nn.functional.cross_entropy(model(x), y)
            acc.backward(loss)
            total += loss.item() / len(window)
        acc.step(optimizer, max_norm=1.0)
        scheduler.step()
        average.update_parameters(model)
        yield total
    yield check(average)


def check(average: nn.Module) -> float:
    """The loss of the averaged weights on images that nobody trained on."""
    ((x, y), *_) = next(windows(WINDOWS - 1))
    with torch.no_grad():
        return nn.functional.cross_entropy(average(x.flip(-1)), y ^ 1).item()


if __name__ == "__main__":
    raise SystemExit(compare(stock, swapped))
