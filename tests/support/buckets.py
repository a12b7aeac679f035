"""Models, failures and loops whose gradients are added while backward runs, in buckets of several sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from tests.support.models import batch

BUCKETS = [1, 300, 2**25]  # after every gradient, after a few, never before accumulate()


class Tied(nn.Module):
    """One weight used twice, and a head that is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.out = nn.Linear(5, 3)
        self.unused = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.second(torch.tanh(self.first(x))))


class Checkpointed(nn.Module):
    """A model whose middle is recomputed in backward, used twice, so that reentrant backward fires hooks twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.out = nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.out(x)


class Boom(torch.autograd.Function):
    """Identity whose backward runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("planted")


def train(make, release, bucket_bytes=1, windows=4, scaled=False, form="step", backend="auto", **kwargs):
    """Parameters after a few windows of unequal micro-batches, and the scaler's state."""
    torch.manual_seed(0)
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if scaled else None
    options = {"release": release, "bucket_bytes": bucket_bytes, "scaler": scaler, "backend": backend, **kwargs}
    acc = ak.FusedAccumulator(model, **options)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
    for window in range(windows):
        for step, size in enumerate((3, 1, 4)):
            x, y = batch(size, seed=10 * window + step)
            factor = float("inf") if scaled and (window, step) == (1, 1) else 1.0
            loss = mse_loss(model(x), y) * factor
            if form == "step":
                acc.backward(loss, weight=size)
            else:
                (loss if scaler is None else scaler.scale(loss)).backward()
                acc.accumulate()
        assert (acc.micro_batches, acc.weight.item()) == (3, 8 if form == "step" else 3)
        acc.step(optimizer, max_norm=1.0)
    return [p.detach().clone() for p in model.parameters()], None if scaler is None else scaler.state_dict()


def hooks(model):
    """How many parameters tell somebody of their gradients, without the hooks that leave in the first backward."""
    found = [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return sum(not hook.__qualname__.startswith(("_watch", "_inspect_once")) for hook in found)
