"""The demo's three ways to train, their training in turn, and what is measured besides."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..devices import is_accelerator
from ..splitting.memory import memory_of
from .data import LINE, Batch, Corpus, Window
from .methods import BigBatch, Method, StockAccumulation, distance, gradient
from .model import GPT
from .report import Run

# ---- The demo's three methods: each trains a copy of the model

ACCUMULATION_STEPS = 8
MAX_NORM = 1.0
# Only fp16 needs a loss scale. GradScaler starts at 2**16 by default and may skip steps until its scale has settled,
# and not the same ones for `loss / K` as for the plain loss. From 2**12 fp16 does not overflow here, so the three loops
# take the same steps.
INIT_SCALE = 2.0**12


def copied(cls: type[Method], model: nn.Module, amp_dtype: torch.dtype | None) -> Method:
    """A method that trains a copy of `model` on its device, with AdamW.

    Args:
        cls: How.
        model: Copied.
        amp_dtype: Of autocast; None disables it. float16 comes with a GradScaler.
    """
    model = copy.deepcopy(model)
    device = next(model.parameters()).device

    def loss(batch: Batch) -> Tensor:
        with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
            return model(batch.inputs, batch.targets)

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    init_scale = INIT_SCALE if amp_dtype is torch.float16 else None
    return cls(model, loss, optimizer, ACCUMULATION_STEPS, init_scale=init_scale, max_norm=MAX_NORM)


def train_window(method: Method, window: Window, learning_rate: float) -> Tensor:
    """Take one optimizer step; returns the same as `Method.backward`."""
    for group in method.optimizer.param_groups:
        group["lr"] = learning_rate
    loss = method.backward(window)
    method.step()
    return loss


# ---- Trains the methods, window by window in turn, so that a slowdown of the machine affects all of them

LEARNING_RATE = 5e-4
MAX_STEPS = 100
ENOUGH_STEPS = 24
FEWEST_STEPS = 12
SEEDS = 3  # of initial weights, with which the big batch is trained: what differs between them is chance
# For training; set-up and measurements take half as long again.
SECONDS = 60.0


class Shape(NamedTuple):
    """Of a GPT."""

    width: int
    depth: int
    heads: int

    def build(self) -> GPT:
        """A model with random weights."""
        return GPT(width=self.width, depth=self.depth, heads=self.heads, context=LINE)

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
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    return result, time.perf_counter() - begin


def seconds_per_window(model: nn.Module, corpus: Corpus, amp_dtype: torch.dtype | None) -> float:
    """Time of a window of all that is trained, measured on copies of `model`; stock's counts for accumkernels too."""
    window = corpus.window(0)

    def fastest(cls: type[Method]) -> float:
        method = copied(cls, model, amp_dtype)
        return min(_timed(method.device, partial(train_window, method, window, 0.0))[1] for _ in range(5))

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
        for turn in range(len(methods)):
            index = (step + turn) % len(methods)  # no method always goes first
            loss, seconds = _timed(methods[index].device, partial(train_window, methods[index], window, rate))
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


# ---- Measures what training itself does not show: gradient errors and peak memory


def gradient_errors(
    methods: Sequence[type[Method]], model: nn.Module, window: Window, amp_dtypes: Sequence[torch.dtype | None]
) -> list[list[float]]:
    """Distance of each method's gradient of `window` to the exact gradient, relative to the latter's length (L2).

    The exact gradient is that of the big batch's mean loss in float64 without autocast, at the weights of `model`. A
    method works as in training: its gradient is the window's fp32 `.grad` after unscaling, before clipping.

    Returns:
        For each method, one number per dtype in `amp_dtypes`.
    """
    exact_model = copy.deepcopy(model).double()
    exact_model(window.big_batch.inputs, window.big_batch.targets).backward()
    exact = gradient(exact_model)

    def error(cls: type[Method], amp_dtype: torch.dtype | None) -> float:
        method = copied(cls, model, amp_dtype)
        method.backward(window)
        method.unscale()
        return distance(gradient(method.model), exact)

    return [[error(cls, amp_dtype) for amp_dtype in amp_dtypes] for cls in methods]


def peak_bytes(cls: type[Method], model: nn.Module, window: Window, amp_dtype: torch.dtype | None) -> int:
    """Peak bytes of tensors while `cls` trains a copy of `model` for two windows, without the batches themselves.

    Weights, gradients, accumulators, optimizer state and activations are included. On CUDA the allocator counts; on the
    CPU we add up the storages that are alive after each op.
    """
    memory = memory_of(next(model.parameters()).device, sys.maxsize)
    with memory.measured():
        method = copied(cls, model, amp_dtype)
        for _ in range(2):  # the optimizer's state exists from the second on
            train_window(method, window, learning_rate=0.0)
    assert memory.taken is not None
    return memory.taken
