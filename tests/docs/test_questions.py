"""docs/questions.md: what a block computes, where running is not enough."""

from __future__ import annotations

import copy

import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.doc_blocks import ROOT, run_page
from tests.support.models import mlp
from tests.support.models import relative_error as off

ROUNDING = 1e-12  # float64, relative to the movement
RHO, RATE = 0.05, 0.1


def test_sam(one_thread):
    """Two steps of unequal micro-batches are those of the big batch, in plain torch."""
    sam_step = run_page(ROOT / "docs" / "questions.md")["sam_step"]
    model = mlp(torch.float64)
    start, truth = copy.deepcopy(model), copy.deepcopy(model)
    windows = [
        [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in sizes] for sizes in ((4, 1, 3), (2, 5))
    ]
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=RATE)
    for window in windows:
        sam_step(model, acc, optimizer, window, rho=RHO)
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        first = torch.autograd.grad(mse_loss(truth(x), y), truth.parameters())
        norm = torch.cat([g.flatten() for g in first]).norm()
        climbed = copy.deepcopy(truth)
        for p, g in zip(climbed.parameters(), first, strict=True):
            p.data += RHO * g / norm
        second = torch.autograd.grad(mse_loss(climbed(x), y), climbed.parameters())
        for p, g in zip(truth.parameters(), second, strict=True):
            p.data -= RATE * g
    ways = [[p - s for p, s in zip(m.parameters(), start.parameters(), strict=True)] for m in (model, truth)]
    assert off(*ways) < ROUNDING
