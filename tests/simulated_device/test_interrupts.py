"""Exceptions and Ctrl-C while autograd's device threads are at work: the window afterwards is what it should be."""

from __future__ import annotations

import signal

import pytest
import torch

from tests import simulated_device as sim
from tests.simulated_device.training import OPTIONS, Training

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend")
NAMES = ["default", "whole", "buckets", "fused", "deferred", "autocast, fused", "scaled, per micro-batch", "masters"]


class Raises(torch.autograd.Function):
    """Passes on its input; the backward raises, in the thread of the input's device."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.what()
        return grad, None


def error():
    """A plain one."""
    raise ValueError("planted")


def control_c():
    """Press it, while the main thread waits for this one; Python hears of it once the main thread is back."""
    signal.raise_signal(signal.SIGINT)


def after(training, expected):
    """Two whole windows give the parameters of a training without any accident."""
    training.windows(2)
    assert all(torch.equal(a, b) for a, b in zip(training.parameters(), expected, strict=True))


def plain(name, devices):
    """Those parameters."""
    training = Training(devices, name)
    training.windows(2)
    return training.parameters()


@pytest.mark.parametrize("where", ["embedding", "out"])
@pytest.mark.parametrize("name", NAMES)
def test_an_exception_in_a_device_thread(name, where):
    """It comes out of `acc.backward` unchanged; discard or zero_ then leaves nothing of the micro-batch."""
    devices = ("sim:1", "sim:0")
    expected = plain(name, devices)
    training = Training(devices, name)
    batches = training.batches(0)
    with sim.watch() as seen:
        training.micro_batch(batches[0])
        handle = getattr(training.model, where).register_forward_hook(lambda m, i, output: Raises.apply(output, error))
        with pytest.raises(ValueError, match="planted"):
            training.micro_batch(batches[1])
        handle.remove()
        try:
            training.acc.discard()
            training.micro_batch(batches[2])  # a window that is not broken goes on
            training.acc.zero_()
        except RuntimeError as broken:
            assert "broken" in str(broken) and OPTIONS[name].get("release", "auto") != "microbatch"
            training.acc.zero_()
        assert all(p.grad is None for p in training.model.parameters())
        after(training, expected)
    seen.check()


@pytest.mark.parametrize("name", NAMES)
def test_control_c(name):
    """While the caller waits for a device's thread, which ends what it does."""
    expected = plain(name, "sim:0")
    training = Training("sim:0", name)
    batches = training.batches(0)
    with sim.watch() as seen:
        training.micro_batch(batches[0])
        handle = training.model.out.register_forward_hook(lambda m, i, output: Raises.apply(output, control_c))
        with pytest.raises(KeyboardInterrupt):
            training.micro_batch(batches[1])
        handle.remove()
        training.acc.zero_()
        after(training, expected)
    seen.check()


def test_a_failing_micro_batch_leaves_the_window():
    """With whole micro-batches the others count as if it had not been."""
    training, twin = Training("sim:0", "whole"), Training("sim:0", "whole")
    batches = training.batches(0)
    for ids in (batches[0], batches[2]):
        twin.micro_batch(ids)
    twin.step()
    training.micro_batch(batches[0])
    handle = training.model.norm.register_forward_hook(lambda m, i, output: Raises.apply(output, error))
    with pytest.raises(ValueError, match="planted"):
        training.micro_batch(batches[1])
    handle.remove()
    training.acc.discard()
    training.micro_batch(batches[2])
    training.step()
    assert all(torch.equal(a, b) for a, b in zip(training.parameters(), twin.parameters(), strict=True))
