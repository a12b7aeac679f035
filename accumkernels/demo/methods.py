"""The three training loops that the demo compares. They differ only in how they compute a window's gradient."""

from __future__ import annotations

import abc
import copy

import torch
from torch import Tensor, nn

import accumkernels as ak

from .data import Batch, BatchWindow

ACCUMULATION_STEPS = 8
MAX_NORM = 1.0
# Only fp16 needs a loss scale. GradScaler starts at 2**16 by default and may skip steps until its scale has settled,
# and not the same ones for `loss / K` as for the plain loss. From 2**12 fp16 does not overflow here, so the three loops
# take the same steps.
INIT_SCALE = 2.0**12


class Method(abc.ABC):
    """A copy of the model with its optimizer; subclasses define how a window becomes one step.

    Args:
        model: Copied; the copy stays on its device.
        amp_dtype: The dtype of autocast; None disables it. float16 comes with a GradScaler.
        name: Instead of the class's.
    """

    name: str

    def __init__(self, model: nn.Module, amp_dtype: torch.dtype | None, name: str | None = None) -> None:
        self.name = name or type(self).name
        self.model = copy.deepcopy(model)
        self.device = next(self.model.parameters()).device
        self.amp_dtype = amp_dtype
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=INIT_SCALE, enabled=amp_dtype is torch.float16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch under autocast."""
        with torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.model(batch.inputs, batch.targets)

    @abc.abstractmethod
    def backward(self, window: BatchWindow) -> Tensor:
        """Run a window's forward and backward passes; returns its mean loss per byte (0-d tensor)."""

    def unscale(self) -> None:
        """Set `.grad` to the window's gradient without the loss scale."""
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        """Clip, step the optimizer and drop the gradients."""
        self.unscale()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, window: BatchWindow, learning_rate: float) -> Tensor:
        """Take one optimizer step; returns the same as `backward`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.backward(window)
        self.step()
        return loss


class BigBatch(Method):
    """The whole window in one forward and one backward pass, which accumulation imitates."""

    name = "big batch"

    def backward(self, window: BatchWindow) -> Tensor:
        """One pass."""
        loss = self.loss(window.big_batch)
        self.scaler.scale(loss).backward()
        return loss.detach()


class StockAccumulation(Method):
    """The usual recipe: `loss / K`, gradients added up in `.grad`.

    Every micro-batch counts the same, however few bytes it has, and a window with fewer than K micro-batches is still
    divided by K.
    """

    name = "stock accumulation"

    def backward(self, window: BatchWindow) -> Tensor:
        """As many passes as micro-batches."""
        total = torch.zeros((), device=self.device)
        for batch in window.micro_batches:
            loss = self.loss(batch)
            self.scaler.scale(loss / ACCUMULATION_STEPS).backward()
            total += loss.detach() * batch.tokens
        return total / sum(batch.tokens for batch in window.micro_batches)


class Fused(Method):
    """FusedAccumulator: the plain mean loss, weighted by the number of bytes that it averages."""

    name = "FusedAccumulator"

    def __init__(self, model: nn.Module, amp_dtype: torch.dtype | None, name: str | None = None) -> None:
        super().__init__(model, amp_dtype, name)
        # Only the optimizer changes weights here, so autocast may keep its 16-bit copies for a window.
        self.accumulator = ak.FusedAccumulator(self.model, scaler=self.scaler, cache_casts=True)

    def backward(self, window: BatchWindow) -> Tensor:
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
        self.accumulator.step(self.optimizer, max_norm=MAX_NORM)


METHODS: tuple[type[Method], ...] = (BigBatch, StockAccumulation, Fused)
