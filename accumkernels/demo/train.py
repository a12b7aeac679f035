"""The three training loops that the demo and `compare` hold side by side; the demo's training, and its measures."""

from __future__ import annotations

import abc
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import accumkernels as ak

from ..devices import is_accelerator
from ..splitting.memory import memory_of
from .gpt import GPT, LINE, Batch, Corpus, Window
from .report import Run

# ---- The three methods, which differ only in how they compute a window's gradient


class Method(abc.ABC):
    """A model with its optimizer; subclasses define how a window becomes one step.

    Args:
        model: Trained in place.
        loss: Returns the mean loss of a batch, 0-d, under the autocast of the training.
        optimizer: Of the model's parameters.
        accumulation_steps: Micro-batches of a full window, which stock accumulation divides by.
        init_scale: Of the GradScaler; None for none.
        max_norm: To clip the gradient to; None: it is not clipped.
        cache_casts: Whether FusedAccumulator keeps autocast's copies: only the optimizer may change weights.
    """

    name: str

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        optimizer: Optimizer,
        accumulation_steps: int,
        *,
        init_scale: float | None = None,
        max_norm: float | None = None,
        cache_casts: bool = True,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.accumulation_steps = accumulation_steps
        self.max_norm = max_norm
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=init_scale or 1.0, enabled=init_scale is not None
        )
        self._open(cache_casts)

    def _open(self, cache_casts: bool) -> None:  # noqa: B027  stock loops need nothing
        """Build what the loop needs besides."""

    def close(self) -> None:  # noqa: B027
        """Take off what was built."""

    @abc.abstractmethod
    def backward(self, window: Window) -> Tensor:
        """Run a window's forward and backward passes; returns its mean loss per token (0-d tensor)."""

    def unscale(self) -> None:
        """Set `.grad` to the window's gradient without the loss scale."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        """Clip, step the optimizer and drop the gradients."""
        if self.max_norm is not None:
            self.unscale()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class BigBatch(Method):
    """The whole window in one forward and one backward pass, which accumulation imitates."""

    name = "big batch"

    def backward(self, window: Window) -> Tensor:
        """One pass."""
        loss = self.loss(window.big_batch)
        self.scaler.scale(loss).backward()
        return loss.detach()


class StockAccumulation(Method):
    """The usual recipe: `loss / K`, gradients added up in `.grad`.

    Every micro-batch counts the same, however few tokens it has, and a window with fewer than K micro-batches is still
    divided by K.
    """

    name = "stock accumulation"

    def backward(self, window: Window) -> Tensor:
        """As many passes as micro-batches."""
        total = torch.zeros((), device=self.device)
        for batch in window.micro_batches:
            loss = self.loss(batch)
            self.scaler.scale(loss / self.accumulation_steps).backward()
            total += loss.detach() * batch.tokens
        return total / sum(batch.tokens for batch in window.micro_batches)


class Fused(Method):
    """FusedAccumulator: the plain mean loss, weighted by the number of tokens that it averages."""

    name = "FusedAccumulator"

    def _open(self, cache_casts: bool) -> None:
        self.accumulator = ak.FusedAccumulator(
            self.model, scaler=self.scaler, cache_casts=cache_casts, process_group=False
        )

    def close(self) -> None:
        """Remove the accumulator."""
        self.accumulator.remove()

    def backward(self, window: Window) -> Tensor:
        """As many passes as micro-batches."""
        total = torch.zeros((), device=self.device)
        for batch in window.micro_batches:
            loss = self.loss(batch)
            self.accumulator.backward(loss, weight=batch.tokens)
            total += loss.detach() * batch.tokens
        return total / sum(batch.tokens for batch in window.micro_batches)

    def unscale(self) -> None:
        """`finalize` averages and unscales at once."""
        self.accumulator.finalize(self.optimizer)

    def step(self) -> None:
        """Average, clip, step and open the next window, in one call."""
        self.accumulator.step(self.optimizer, max_norm=self.max_norm)


METHODS: tuple[type[Method], ...] = (BigBatch, StockAccumulation, Fused)


# ---- How far a gradient is from another

Gradient = list[Tensor | None]  # by parameter, in float64 on the CPU


def gradient(model: nn.Module) -> Gradient:
    """Copy the `.grad` of all parameters."""
    return [None if p.grad is None else p.grad.to("cpu", torch.float64, copy=True) for p in model.parameters()]


def distance(found: Gradient, exact: Gradient) -> float:
    """The L2 distance of two gradients, relative to the length of `exact`; nan if that is 0."""
    squares = length = 0.0
    for ours, true in zip(found, exact, strict=True):
        if true is not None:
            length += float(true.square().sum())
        difference = ours if true is None else true if ours is None else ours - true
        if difference is not None:
            squares += float(difference.square().sum())
    return math.sqrt(squares / length) if length else math.nan


# ---- The demo's methods: each trains a copy of the model

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
