"""A loop over windows for tests to do things right or wrong in."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

K = 4


class Loop:
    """What such loops share: a model, an accumulator, an optimizer, a scaler and data of equal micro-batches."""

    def __init__(self, *, scaled=False, known=True, build=None, lr=0.01, fused=False, **options):
        self.model = mlp(options.pop("dtype", torch.float32))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        self.acc = ak.FusedAccumulator(self.model, scaler=self.scaler if known else None, **options)
        params = self.acc.parameters() if build is None else build(self.model)
        self.optimizer = torch.optim.AdamW(params, lr=lr, fused=fused)

    def windows(self, count=3):
        """Windows of K micro-batches: lists of inputs and targets."""
        dtype = next(self.model.parameters()).dtype
        return [[batch(2, dtype, seed=10 * w + i) for i in range(K)] for w in range(count)]

    def loss(self, x, y):
        """The mean loss."""
        return mse_loss(self.model(x), y)

    def accumulate(self, window=None):
        """A window as it should be, by default the first."""
        for x, y in window or self.windows(1)[0]:
            self.acc.backward(self.loss(x, y))

    def accumulate_scaled(self, window):
        """The same in the long form."""
        for x, y in window:
            self.scaler.scale(self.loss(x, y)).backward()
            self.acc.accumulate()
