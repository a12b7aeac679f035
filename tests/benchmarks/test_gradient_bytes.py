"""Live bytes, followed op by op, against counts by hand."""

import pytest
import torch
from torch import nn

import accumkernels as ak
from benchmarks.harness.gradient_bytes import GradientBytes
from benchmarks.harness.live_storages import LiveStorages

WEIGHT = 256 * 256
PADDED = WEIGHT + 256  # with the bias, which fills its segment


def test_storages_count_once_while_they_live():
    """Views are free, what is dropped is gone, and the peak stays."""
    existing = torch.ones(8)
    view = existing[:2]
    with LiveStorages() as live:
        assert live.add([existing, view]) == 32
        a = torch.ones(100)
        b = a[10:20].view(2, 5)
        assert sum(live.nbytes.values()) == 32 + 400
        del a, b
        assert sum(live.nbytes.values()) == 32
    assert live.peak == 432


class Two(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def forward(self, x):
        return self.layers(x).square().mean()


def train(model: nn.Module, options: dict | None, autocast: bool = True) -> int:
    """Two windows of two micro-batches; the peak of the second."""
    ended = []
    with GradientBytes(model, counts=lambda: bool(ended)) as held:
        accumulator = None if options is None else ak.FusedAccumulator(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = model(torch.ones(3, 256))
                if accumulator is None:
                    loss.backward()
                else:
                    accumulator.backward(loss)
            if accumulator is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                accumulator.step(optimizer)
            ended.append(True)
    return held.gradient_peak


@pytest.mark.filterwarnings("ignore:Full backward hook")
class TestGradientBytes:
    """Of two square layers."""

    def test_stock(self):
        """The sums in fp32."""
        assert train(Two(), None) == 2 * PADDED * 4

    @pytest.mark.native
    def test_all_at_once(self):
        """The buffer, and every gradient of a micro-batch, in fp32."""
        assert train(Two(), {"release": "microbatch"}, autocast=False) == 2 * PADDED * (4 + 4)

    @pytest.mark.native
    def test_taken_in_16_bit(self):
        """Under autocast, gradients that wait to be added count as well, though nothing public shows them."""
        assert train(Two(), {"release": "microbatch"}) == 2 * PADDED * (4 + 2)

    @pytest.mark.native
    def test_buckets(self):
        """A layer's gradients at a time."""
        options = {"release": "backward", "bucket_bytes": PADDED * 4}
        assert train(Two(), options, autocast=False) == (2 + 1) * PADDED * 4
