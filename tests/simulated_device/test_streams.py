"""Each stage on a stream of its own, ordered by the user as torch demands: no race, and the same bits."""

from __future__ import annotations

import pytest
import torch

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
