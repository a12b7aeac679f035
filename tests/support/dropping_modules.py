"""Modules for Lightning that drop windows: their own hooks do, or Lightning's zero_grad does."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.nn.functional import mse_loss

from tests.support.models import batch, mlp

SIZE, STEPS = 3, 4


def momentum(params):
    """Moves parameters by what windows before have left, if there are gradients at all; zeros are gradients."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


class Module(pl.LightningModule):
    """Two windows to an epoch."""

    def __init__(self, optimizer):
        super().__init__()
        self.net, self.optimizer = mlp(), optimizer

    def training_step(self, data, index):
        return mse_loss(self.net(data[0]).float(), data[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(*batch(2 * STEPS * SIZE, seed=self.global_rank))
        return torch.utils.data.DataLoader(data, batch_size=SIZE)

    def of(self, index):
        """Whether the Trainer's current batch has this number."""
        return self.trainer.fit_loop.epoch_loop.batch_idx == index


class LeavesStepsOut(Module):
    """As in Lightning's documentation of `optimizer_step`, but for windows instead of optimizers."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        if index == STEPS - 1:
            closure()
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


class EndsEpochs(Module):
    """Inside a window."""

    def on_train_batch_start(self, data, index):
        return -1 if index == STEPS + 2 else None


class DropsByModel(Module):
    """As modules do that skip gradients they do not like."""

    def on_before_optimizer_step(self, optimizer):
        if self.of(STEPS - 1):
            self.zero_grad()


class DropsByOptimizer(Module):
    """The one that the hook gets."""

    def on_before_optimizer_step(self, optimizer):
        if self.of(STEPS - 1):
            optimizer.zero_grad()


class LeavesZeros(Module):
    """Which momentum and weight decay step with."""

    def on_before_optimizer_step(self, optimizer):
        if self.of(STEPS - 1):
            optimizer.zero_grad(set_to_none=False)


class ClearsByItself(LeavesStepsOut):
    """The form in Lightning's documentation."""

    def optimizer_zero_grad(self, epoch, index, optimizer):
        optimizer.zero_grad(set_to_none=True)


class NeverClears(LeavesStepsOut):
    """Which adds up for good."""

    def optimizer_zero_grad(self, epoch, index, optimizer):
        pass


MODULES = [ClearsByItself, LeavesStepsOut, EndsEpochs, DropsByModel, DropsByOptimizer, LeavesZeros]
