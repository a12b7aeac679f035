"""Coupled losses with dropout: the second pass draws what the first drew, on the device's own generator."""

from __future__ import annotations

import copy

import pytest
import torch

import accumkernels as ak
from tests import simulated_device as sim
from tests.simulated_device.training import on
from tests.support.models import relative_error
from tests.support.towers import Towers, chunked, data

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend")
OPTIONS = [
    {},
    {"release": "microbatch"},
    {"release": "backward", "bucket_bytes": 64, "fuse_weight_gradients": True},
    {"overflow": "microbatch"},
]


class OnDevice(Towers):
    """The same towers, the second perhaps on another device than the first."""

    def __init__(self, devices):
        super().__init__()
        self.images.to(devices[0])
        self.texts.to(devices[1])
        self.scale = torch.nn.Parameter(self.scale.detach().to(devices[0]))

    def encode(self, pair):
        x, y = pair
        return self.images(x), self.texts(y)

    def loss(self, images, texts):
        texts = texts.to(images.device)
        logits = self.scale.exp() * torch.nn.functional.normalize(images, dim=1)
        logits = logits @ torch.nn.functional.normalize(texts, dim=1).T
        targets = torch.arange(len(logits), device=logits.device)
        cross_entropy = torch.nn.functional.cross_entropy
        return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


@pytest.mark.parametrize("devices", [("sim:0", "sim:0"), ("sim:0", "sim:1"), ("sim:1", "sim:0")], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_one_graph(options, devices):
    """All chunks encoded in one graph, with the same random numbers."""
    model = OnDevice(devices)
    chunks = [(x.to(devices[0]), y.to(devices[1])) for x, y in chunked(*data(1))]
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    encoded = [twin.encode(pair) for pair in chunks]
    loss = twin.loss(*(torch.cat(parts) for parts in zip(*encoded, strict=True)))
    loss.backward()
    after = [torch.sim.get_rng_state(index) for index in (0, 1)]
    torch.manual_seed(5)
    with ak.FusedAccumulator(model, **options) as acc:
        with sim.watch() as seen:
            found = acc.backward_coupled(chunks, model.encode, model.loss)
        seen.check()
        assert seen.waits == []
        assert found.item() == pytest.approx(loss.item(), rel=1e-12)
        acc.finalize()
        expected = [p.grad.cpu() for p in twin.parameters()]
        assert relative_error([p.grad.cpu() for p in model.parameters()], expected) < 1e-12
    assert all(torch.equal(state, torch.sim.get_rng_state(index)) for index, state in enumerate(after))


def test_on_a_side_stream():
    """Both passes where the caller is."""
    model = OnDevice(("sim:0", "sim:0"))
    chunks = [(x.to("sim:0"), y.to("sim:0")) for x, y in chunked(*data(1))]
    with ak.FusedAccumulator(model, release="backward", bucket_bytes=1) as acc, sim.watch(lines=True) as seen:
        for _ in range(2):
            with on(torch.Stream("sim:0")):
                acc.backward_coupled(chunks, model.encode, model.loss)
        acc.finalize()
        torch.empty(1, device="sim:0")
    seen.check()
