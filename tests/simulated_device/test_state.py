"""Checkpoints of windows on the device: between devices, in the middle of a window, bit for bit."""

from __future__ import annotations

import io

import pytest
import torch

from tests import simulated_device as sim
from tests.simulated_device.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend")
NAMES = ["default", "fused", "deferred", "scaled", "masters", "noise scale"]


def save(training):
    """All that a run needs, as a file."""
    parts = {"model": training.model, "acc": training.acc, "optimizer": training.optimizer, "scaler": training.scaler}
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items() if part is not None}, file)
    return file


def load(training, file, **options):
    """Into a new run."""
    file.seek(0)
    found = torch.load(file, weights_only=True, **options)
    training.model.load_state_dict(found["model"])
    training.acc.load_state_dict(found["acc"])
    training.optimizer.load_state_dict(found["optimizer"])
    if training.scaler is not None:
        training.scaler.load_state_dict(found["scaler"])


@pytest.mark.parametrize("place", ["cpu", None], ids=["by the host", "as it was"])
@pytest.mark.parametrize("name", NAMES)
def test_resume(name, place):
    """In the middle of the second window, on the other device: the run goes on as if nothing had been."""
    training = Training("sim:0", name)
    batches = [training.batches(window) for window in range(3)]
    with sim.watch() as seen:
        training.window(batches[0])
        training.micro_batch(batches[1][0])
        file = save(training)
        resumed = Training("sim:1", name)
        load(resumed, file, map_location=place)
        for run in (training, resumed):
            of_run = [[ids.to(run.devices[0]) for ids in window] for window in batches]
            for ids in of_run[1][1:]:
                run.micro_batch(ids)
            run.step()
            run.window(of_run[2])
    seen.check()
    assert all(torch.equal(a, b) for a, b in zip(training.parameters(), resumed.parameters(), strict=True))


def test_a_checkpoint_is_read_when_it_is_made():
    """`state_dict` copied to the host without waiting would be NaN; what it returns is right at once."""
    training = Training("sim:0")
    training.windows(1)
    training.micro_batch(training.batches(1)[0])
    state = training.acc.state_dict()
    values = [value.cpu() for value in _tensors(state)]
    assert values and all(value.isfinite().all() for value in values if value.is_floating_point())


def _tensors(state):
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from _tensors(value)
