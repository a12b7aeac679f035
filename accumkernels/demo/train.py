"""Trains the methods, window by window in turn, so that a slowdown of the machine affects all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .data import Corpus
from .methods import BigBatch, Method, StockAccumulation
from .model import GPT
from .report import Run

LEARNING_RATE = 5e-4
MAX_STEPS = 100
ENOUGH_STEPS = 24
FEWEST_STEPS = 12
SEEDS = 3  # of initial weights, with which the big batch is trained: what differs between them is chance
# For training. With set-up and measurements the demo then takes a minute and a half.
SECONDS = 60.0


class Shape(NamedTuple):
    """Of a GPT."""

    width: int
    depth: int
    heads: int

    def build(self, context: int) -> GPT:
        """A model with random weights."""
        return GPT(width=self.width, depth=self.depth, heads=self.heads, context=context)

    @property
    def cost(self) -> int:
        """Proportional to the parameters of the layers."""
        return self.width * self.width * self.depth


SHAPES = (Shape(768, 6, 12), Shape(768, 5, 12), Shape(768, 4, 12))  # 43, 36 and 29 M parameters


def learning_rate(step: int, steps: int) -> float:
    """The rate rises over the first tenth of the steps, then falls along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def _timed(device: torch.device, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of `call`, and the seconds it took."""
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def seconds_per_window(model: nn.Module, corpus: Corpus, amp_dtype: torch.dtype | None) -> float:
    """Time of a window of all that is trained, measured on copies of `model`; stock's counts for accumkernels too."""
    window = corpus.window(0)

    def fastest(cls: type[Method]) -> float:
        method = cls(model, amp_dtype)
        return min(_timed(method.device, partial(method.train, window, 0.0))[1] for _ in range(5))

    return 2 * fastest(StockAccumulation) + SEEDS * fastest(BigBatch)


def choose_size(seconds: float) -> tuple[Shape, int]:
    """The largest model that `ENOUGH_STEPS` windows can be trained with in `SECONDS`, and how many can be.

    Args:
        seconds: Of a window of all that is trained, with the smallest of `SHAPES`.
    """
    for shape in SHAPES:
        steps = int(SECONDS / (seconds * shape.cost / SHAPES[-1].cost))
        if steps >= ENOUGH_STEPS:
            break
    return shape, max(FEWEST_STEPS, min(MAX_STEPS, steps))


def train(
    methods: Sequence[Method], corpus: Corpus, steps: int, on_step: Callable[[dict[str, float]], None]
) -> list[Run]:
    """Train every method on the same `steps` windows, the last one partial.

    Args:
        methods: All start from the same weights.
        corpus: The windows.
        steps: Number of windows.
        on_step: Called after each window with the methods' losses by name.

    Returns:
        For each method, its losses, seconds and tokens per window, and validation loss.
    """
    runs = [Run(method.name) for method in methods]
    for step in range(steps):
        window = corpus.window(step, partial=step == steps - 1)
        rate = learning_rate(step, steps)
        tokens = window.big_batch.tokens
        _ = window.micro_batches  # cached, as the big batch: create them here, so that no method pays for it
        for turn in range(len(methods)):
            index = (step + turn) % len(methods)  # no method always goes first
            loss, seconds = _timed(methods[index].device, partial(methods[index].train, window, rate))
            runs[index].losses.append(float(loss))
            runs[index].step_seconds.append(seconds)
            runs[index].tokens.append(tokens)
        on_step({run.name: run.losses[-1] for run in runs})
    for method, run in zip(methods, runs, strict=True):
        run.final_loss = validation_loss(method, corpus)
    return runs


@torch.no_grad()
def validation_loss(method: Method, corpus: Corpus) -> float:
    """Mean loss per byte of the held-out text."""
    total = tokens = 0.0
    for batch in corpus.validation_batches():
        total += float(method.loss(batch)) * batch.tokens
        tokens += batch.tokens
    return total / tokens
