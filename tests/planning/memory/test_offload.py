"""memory_report with cpu_offload: what a card that is not there, and the host, would hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accumkernels import memory_report


class Layers(nn.Module):
    """Square layers with little else, so that parameters are what counts."""

    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def report(count, width, optimizer=torch.optim.AdamW, **options):
    """The number of parameters, and the report of windows of 8 micro-batches on a card that is not there."""
    with torch.device("meta"):
        model = Layers(count, width).bfloat16()
    made = {"accumulate": 8, "cpu_offload": True, "device": "cuda", "fake": True, **options}
    params = sum(p.numel() for p in model.parameters())
    return params, memory_report(
        model, optimizer(model.parameters()), lambda n: (torch.randn(n, width).bfloat16(),) * 2, 64, **made
    )


@pytest.mark.parametrize(("billions", "count", "limit"), [(1.3, 20, 6e9), (2.6, 40, 12e9)])
def test_what_fits(billions, count, limit):
    """The sizes of the page: 1.3 billion parameters under 6 GB, 2.6 billion under 12 GB, whatever K is."""
    params, found = report(count, 8192)
    assert params == pytest.approx(billions * 1e9, rel=0.05)
    assert found.fits(int(limit))
    assert (found.accumulators, found.optimizer) == (0, 0)
    assert found.gradients == 2 * 16 * 2**20 + 8192**2 * 2
    assert found.host == pytest.approx(18 * params, rel=0.001)
    assert f"host memory   {found.host:,}" in str(found)


def test_backward_keeps_two_buckets():
    """Its peak is that of two buckets and a gradient, not of all gradients."""
    params, found = report(16, 4096)
    _, stock = report(16, 4096, cpu_offload=False)
    largest = 4096**2 * 2
    assert found.training_peak < 2 * params + 3 * largest + 2 * 2**24
    assert stock.training_peak >= 2 * params + 2 * params + 4 * params


def test_the_optimizer_decides_about_the_host():
    """Adafactor keeps next to nothing; SGD without momentum, nothing."""
    params, found = report(4, 1024, torch.optim.Adafactor)
    assert found.host == pytest.approx(10 * params, rel=0.01)
    params, found = report(4, 1024, lambda p: torch.optim.SGD(p, lr=0.1))
    assert found.host == 10 * params


def test_the_cpu_is_refused():
    """There the sums are in host memory anyway."""
    with pytest.raises(ValueError, match="cpu_offload=True on the CPU, .* give the device"):
        report(2, 64, device="cpu")
