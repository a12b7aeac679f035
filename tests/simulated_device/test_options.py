"""Every set of options on the device: no wait where none is allowed, no race, and the parameters of a CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.capture import choice, graph
from tests import simulated_device as sim
from tests.simulated_device.training import OPTIONS, ROWS, Training, error, stock
from tests.support.models import elements

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend", "ignore:.*in another unit")
WINDOWS = 3
# The same kernels add the same numbers; sums come in another order. Autocast's lists of ops differ between devices, and
# bf16 parameters round each step: some roundings of 2**-9.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.05}


@pytest.fixture
def stages():
    """Waits by stage: stage("forward") counts those inside."""

    class Stages:
        counts = {name: [] for name in ("forward", "backward", "accumulate", "step")}
        seen = None

        @contextlib.contextmanager
        def __call__(self, name):
            first = len(self.seen.waits)
            yield
            self.counts[name].append(self.seen.waits[first:])

    stages = Stages()
    stages.counts = {name: [] for name in stages.counts}
    return stages


@pytest.mark.parametrize("devices", ["sim:1", ("sim:1", "sim:0")], ids=["one", "two"])
@pytest.mark.parametrize("name", OPTIONS)
def test_waits_and_races(name, devices, stages):
    """None in forward, backward and accumulate, from the first window on; none in a step with a fused optimizer."""
    training = Training(devices, name, stages)
    batches = [training.batches(window) for window in range(WINDOWS)]
    with sim.watch() as seen:
        stages.seen = seen
        for window in batches:
            training.window(window)
        found = training.model.state_dict()
        before = len(seen.waits)
    seen.check()
    counts = stages.counts
    assert not any(counts["forward"])
    assert all(len(waits) <= training.waits for waits in counts["backward"] + counts["accumulate"])
    # torch's GradScaler reads one flag back per step and device, in a loop's own calls.
    allowed = len(set(training.devices)) if training.long and training.scaler else 0
    assert all(len(waits) <= allowed for waits in counts["step"]), counts["step"]
    assert before == sum(map(len, counts["step"] + counts["backward"] + counts["accumulate"]))
    assert len(counts["backward"]) == WINDOWS * len(ROWS) and found
    assert error(training.parameters(), stock(name, WINDOWS)) < CLOSE[training.amp or training.model.norm.weight.dtype]


@pytest.mark.parametrize("optimizer", ["foreach", "for loop"])
def test_a_step_waits_once(optimizer, stages):
    """Where the optimizer cannot skip by itself, overflow is asked for: one wait per step."""
    training = Training("sim:0", stage=stages)
    training.optimizer = torch.optim.AdamW(training.acc.parameters(), 0.01, foreach=optimizer == "foreach")
    with sim.watch() as seen:
        stages.seen = seen
        training.windows(2)
    seen.check()
    assert [len(waits) for waits in stages.counts["step"]] == [1, 1]
    assert not any(stages.counts["forward"] + stages.counts["backward"])


def test_what_a_user_reads_waits(stages):
    """Figures wait when they are read, and not before."""
    training = Training("sim:0", "noise scale", stages)
    batches = [training.batches(window) for window in range(2)]
    with sim.watch() as seen:
        stages.seen = seen
        for window in batches:
            training.window(window)
        metrics = training.acc.metrics()
        found, weight, noise = training.acc.found_inf, training.acc.weight, training.acc.noise_scale()
        assert seen.waits == [], seen.waits
        assert not training.acc.step_was_skipped and not found and float(noise) and weight == 0
        assert all(float(value) >= 0 for value in metrics.values())
    assert len(seen.waits) >= 4


@pytest.mark.parametrize(
    ("device", "bandwidth", "options", "expected"),
    [
        ("cpu", 4.8e12, {"fuse_weight_gradients": False}, {"taken in 16 bits": 256 + 1024}),
        ("sim:0", 360e9, {"fuse_weight_gradients": False}, {"taken in 16 bits": 1024}),
        ("sim:0", 4.8e12, {"fuse_weight_gradients": False}, {}),
        ("sim:0", 4.8e12, {"fuse_weight_gradients": False, "bucket_bytes": 4096}, {"taken in 16 bits": 1024}),
        ("sim:0", 360e9, {"release": "backward"}, {"fused": 1024}),
        ("sim:0", 4.8e12, {"release": "backward"}, {}),
        ("sim:0", 4.8e12, {"fuse_weight_gradients": True}, {"fused": 256 + 1024}),
        ("sim:0", 4.8e12, {"cpu_offload": True}, {"taken in 16 bits": 256 + 1024}),
    ],
    ids=["CPU", "casts", "fast", "a bucket each", "fused", "fused, fast", "on demand", "sums in host memory"],
)
def test_small_weights(monkeypatch, device, bandwidth, options, expected):
    """A hook takes the host as long as on a CPU, and saves bytes that an accelerator moves several times as fast."""
    monkeypatch.setattr(graph, "bytes_per_second", lambda device: bandwidth)
    monkeypatch.setattr(graph, "SMALLEST_CAST", 128)
    monkeypatch.setattr(choice, "_SMALLEST_FUSED", 256)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 64, bias=False)).to(device)
    acc = ak.FusedAccumulator(model, **options)
    # Which products in bf16 an accelerator adds to fp32 sums is a table of kinds.
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled="fused" not in expected):
        loss = model(torch.ones(4, 16, device=device, requires_grad=True)).float().sum()
    acc.backward(loss)
    assert {way: count for way, count in elements(acc).items() if count} == expected
