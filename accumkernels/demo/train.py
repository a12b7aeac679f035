"""Training of all methods, window by window in turn, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .data import Corpus, Window
from .methods import Method
from .report import Run

LEARNING_RATE = 2e-3  # at 3e-3 the rounding of bf16 alone drives two equal runs 1 % apart
MAX_STEPS = 80
MIN_STEPS = 30
# Of training alone. 80 windows take 60 s on one quiet Zen 5 core with AVX-512 BF16. Without it bf16 matrix products are
# up to 50 times slower, and fewer windows keep the demo under three minutes.
SECONDS = 80.0


def learning_rate(step: int, steps: int) -> float:
    """Rise over the first tenth of the steps, then fall along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def _timed_step(method: Method, window: Window, rate: float) -> tuple[float, float]:
    """Take one step; the answer is its loss and the seconds it took."""
    begin = time.perf_counter()
    loss = method.train(window, rate)
    if method.device.type == "cuda":
        torch.cuda.synchronize(method.device)
    return float(loss), time.perf_counter() - begin


def choose_steps(methods: Sequence[type[Method]], model: nn.Module, corpus: Corpus, amp_dtype: torch.dtype) -> int:
    """As many steps, from `MIN_STEPS` to `MAX_STEPS`, as train in about `SECONDS`; measured on copies of the model."""
    copies = [cls(model, amp_dtype) for cls in methods]
    rounds = [sum(_timed_step(method, corpus.window(0), 0.0)[1] for method in copies) for _ in range(3)]
    return max(MIN_STEPS, min(MAX_STEPS, int(SECONDS / min(rounds[1:]))))  # the first round warms up


def train(
    methods: Sequence[Method], corpus: Corpus, steps: int, on_step: Callable[[dict[str, float]], None]
) -> list[Run]:
    """Train every method on the same `steps` windows, the last one partial.

    Args:
        methods: They start from the same weights.
        corpus: The windows.
        steps: Number of windows.
        on_step: Called after each window with the methods' losses by name.

    Returns:
        Per method its losses, seconds per window, and validation loss.
    """
    runs = [Run(method.name) for method in methods]
    for step in range(steps):
        window = corpus.window(step, partial=step == steps - 1)
        rate = learning_rate(step, steps)
        _ = window.big_batch, window.micro_batches  # cached: made here, so that no method pays for it
        for turn in range(len(methods)):
            index = (step + turn) % len(methods)  # nobody always goes first
            loss, seconds = _timed_step(methods[index], window, rate)
            runs[index].losses.append(loss)
            runs[index].step_seconds.append(seconds)
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
