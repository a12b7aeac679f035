"""A micro-batch and a window's end pass through few frames of the package in accelerate's loop, too."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tools.journey import Journey

pytest.importorskip("accelerate")

from accumkernels import hooks  # noqa: E402
from accumkernels.integrations.accelerate import Accelerator  # noqa: E402
from accumkernels.window.loss_weighting import SharedLoss  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread", "fresh_state")]

# Counted by Python 3.11, with graphs looked at from the smallest parameters on.
INSIDE, AT_ITS_END = 57, 140


def test_journey_through_accelerate_is_short(monkeypatch, request):
    """A settled window of two micro-batches, clipped."""
    torch.manual_seed(0)
    monkeypatch.setattr(hooks, "_followers", [])  # accumulators that another test left would see this one's steps,
    monkeypatch.setattr(SharedLoss, "alive", [])  # and what its backwards leave at their parameters
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(4, 16)

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(6):
        micro_batch()
    gc.collect()
    gc.disable()  # what other tests have left is finalized in frames of its own
    request.addfinalizer(gc.enable)
    for limit in (INSIDE, AT_ITS_END):
        journey = Journey(micro_batch)
        assert len(journey.calls) <= limit, "\n".join(map(" ".join, journey.calls))
