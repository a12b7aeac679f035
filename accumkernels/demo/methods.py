"""The three training loops that the demo and `compare` hold side by side, and how far a gradient is from another.

They differ only in how they compute a window's gradient.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import accumkernels as ak

from .data import Window


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
