"""Each stage on a stream of its own, ordered by the user as torch demands: no race, and the same bits."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

from accumkernels import FusedAccumulator
from accumkernels.capture import choice, graph
from tests import simulated_device as sim
from tests.simulated_device.streams import Chain, Stages
from tests.simulated_device.training import OPTIONS, Training

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend")


def same_bits(name, devices):
    """What one stream computes."""
    training = Training(devices, name)
    training.windows(2)
    return training.parameters()


@pytest.mark.parametrize("kind", [Stages, Chain])
@pytest.mark.parametrize("name", OPTIONS)
def test_random_streams(name, kind):
    """Forward, backward, accumulate and step each on any of three streams of each device."""
    devices = ("sim:0", "sim:0") if kind is Stages else ("sim:1", "sim:0")
    expected = same_bits(name, devices)
    stages = kind(name, [torch.device(d) for d in dict.fromkeys(devices)])
    training = Training(devices, name, stages)
    batches = [training.batches(window) for window in range(2)]
    with sim.watch(lines=True) as seen:
        for window in batches:
            training.window(window)
        if kind is Chain:
            stages.end()
        torch.empty(1, device="sim:0"), torch.empty(1, device="sim:1")
    seen.check()
    assert all(torch.equal(a, b) for a, b in zip(training.parameters(), expected, strict=True))


def test_a_missing_wait_is_seen():
    """The same loop, but a stage does not wait for the one before."""

    class Forgets(Chain):
        def drawn(self):
            self.last = {device: torch.accelerator.current_stream(device) for device in self.devices}
            return super().drawn()

    kinds = set()
    for seed in range(4):  # autograd itself orders backward after forward; a step is on the same stream now and then
        training = Training("sim:0", stage=Forgets(seed, [torch.device("sim:0")]))
        with sim.watch() as seen:
            training.windows(1)
        kinds |= {kind for kind, _ in seen.reports}
    assert kinds == {"race", "free"}


def test_two_devices_share_deferred_products(monkeypatch):
    """Each device's thread finds that earlier micro-batches had another weight, and adds what was kept of them."""
    monkeypatch.setattr(choice, "_SMALLEST_FUSED", 64)
    torch.manual_seed(0)
    devices, size = ("sim:0", "sim:1"), 256
    branches = nn.ModuleList([nn.Linear(size, size, bias=False).to(device) for device in devices])
    acc = FusedAccumulator(branches, fuse_weight_gradients="deferred")
    params = list(branches.parameters())
    meeting, take = threading.Barrier(2, timeout=0.5), graph._Kept.take

    def met(kept, weight):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()
        return take(kept, weight)

    monkeypatch.setattr(graph._Kept, "take", met)
    expected = [torch.zeros(size, size) for _ in params]
    for weight in (1.0, 2.0, 3.0):
        inputs = [torch.randn(4, size, device=device, requires_grad=True) for device in devices]
        one, other = (branch(x).square().mean() for branch, x in zip(branches, inputs, strict=True))
        loss = one + other.to(devices[0])
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        for sum_, grad in zip(expected, grads, strict=True):
            sum_.add_(grad.cpu(), alpha=weight)
        acc.backward(loss, weight)
    for param, sum_ in zip(params, expected, strict=True):
        assert torch.allclose(acc.main_grad(param).cpu(), sum_, rtol=1e-5, atol=1e-7)
