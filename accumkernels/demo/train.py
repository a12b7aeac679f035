"""Trains all methods, window by window in turn, so that a slowdown of the machine affects all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .data import Batch, Corpus
from .methods import ACCUMULATION_STEPS, METHODS, BigBatch, Method
from .report import Run

LEARNING_RATE = 1e-3  # at 2e-3 bf16 rounding alone makes two equal runs differ by 0.4 %
MICRO_BATCH_SIZES = (4, 2)
MAX_STEPS = 80
ENOUGH_STEPS = 30
# For forward and backward passes. 58 windows of 8 x 4 samples take 65 s on one core of a Xeon with AMX. Without AMX and
# AVX-512 BF16, matrix products are up to 50 times slower, and smaller windows keep the demo under three minutes.
SECONDS = 75.0


def learning_rate(step: int, steps: int) -> float:
    """The rate rises over the first tenth of the steps, then falls along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


class Size(NamedTuple):
    """How much to train: samples per micro-batch, and windows."""

    micro_batch_size: int
    steps: int


def _timed(device: torch.device, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of `call`, and the seconds it took."""
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - begin


def seconds_per_sample(model: nn.Module, batch: Batch, amp_dtype: torch.dtype | None) -> float:
    """Time of a forward and a backward pass, on a copy of `model`."""
    method = BigBatch(model, amp_dtype)

    def both() -> Tensor:
        loss = method.loss(batch)
        loss.backward()
        return loss

    times = [_timed(method.device, both)[1] for _ in range(4)]
    return min(times[1:]) / len(batch.inputs)  # the first warms up


def choose_size(seconds: float) -> Size:
    """The size that trains all methods in about `SECONDS`: `MAX_STEPS` large windows, else fewer, else smaller ones.

    Args:
        seconds: The result of `seconds_per_sample`.
    """
    for micro_batch_size in MICRO_BATCH_SIZES:
        per_window = len(METHODS) * ACCUMULATION_STEPS * micro_batch_size * seconds
        steps = int(SECONDS / per_window)
        if steps >= ENOUGH_STEPS:
            break
    return Size(micro_batch_size, max(ENOUGH_STEPS, min(MAX_STEPS, steps)))


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
        For each method, its losses, seconds per window, and validation loss.
    """
    runs = [Run(method.name) for method in methods]
    for step in range(steps):
        window = corpus.window(step, partial=step == steps - 1)
        rate = learning_rate(step, steps)
        _ = window.big_batch, window.micro_batches  # cached: create them here, so that no method pays for it
        for turn in range(len(methods)):
            index = (step + turn) % len(methods)  # no method always goes first
            loss, seconds = _timed(methods[index].device, partial(methods[index].train, window, rate))
            runs[index].losses.append(float(loss))
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
