"""The meter of a CUDA device, on an allocator that the test plays; and on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.planning.fit.meters import CountingMeter, CudaMeter, meter_for

DEVICE = torch.device("cuda", 0)
GIB = 2**30


class Allocator:
    """Answers for torch.cuda: 80 GiB, of which others hold 10 and this process 5."""

    def __init__(self, monkeypatch):
        self.fraction = 0.9
        self.fractions = []
        self.retries = 3
        self.emptied = 0
        for name, function in {
            "synchronize": lambda device: None,
            "empty_cache": self._empty,
            "reset_peak_memory_stats": lambda device: None,
            "memory_stats": lambda device: {"num_alloc_retries": self.retries},
            "max_memory_allocated": lambda device: 7 * GIB,
            "mem_get_info": lambda device: (65 * GIB, 80 * GIB),
            "memory_reserved": lambda device: 5 * GIB,
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "set_per_process_memory_fraction": self._set,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def _empty(self):
        self.emptied += 1

    def _set(self, fraction, device):
        self.fraction = fraction
        self.fractions.append(fraction)


@pytest.fixture
def allocator(monkeypatch):
    """A played one."""
    return Allocator(monkeypatch)


@pytest.mark.parametrize(
    ("limit", "margin", "fraction"),
    [
        (None, 0.0, None),
        (None, 0.25, 0.75 - 10 / 80),  # others hold 10 of the 80
        (8 * GIB, 0.0, 0.1),
        (8 * GIB, 0.5, 0.05),
        (200 * GIB, 0.0, 0.9),  # what the user had set stays the most
        (None, 0.95, 0.0),
    ],
)
def test_fraction(allocator, limit, margin, fraction):
    """The allocator enforces limit and margin during the trial, and has its own fraction back afterwards."""
    meter = meter_for(DEVICE, limit, margin)
    assert isinstance(meter, CudaMeter)
    with pytest.raises(KeyboardInterrupt), meter.trial():
        assert allocator.fraction == pytest.approx(0.9 if fraction is None else fraction)
        raise KeyboardInterrupt
    assert allocator.fraction == 0.9
    assert meter.peak == 7 * GIB
    assert allocator.emptied == 2


def test_retries(allocator):
    """A trial that came through only because cached blocks were freed does not count; the next is not blamed."""
    meter = meter_for(DEVICE, None, 0.0)
    with meter.trial():
        allocator.retries += 1
    assert "cached blocks" in meter.rejected
    with meter.trial():
        pass
    assert meter.rejected is None


def test_rejected_sizes_do_not_fit():
    """find_batch_size takes the meter's word."""
    from accumkernels.planning.fit import trial_setup

    class Rejecting(CountingMeter):
        def trial(self):
            self.rejected = "cached blocks" if _seen and _seen[-1] >= 4 else None
            return super().trial()

        def synchronize(self):
            self.rejected = "cached blocks" if _seen[-1] > 4 else None

    _seen: list[int] = []

    def loss_fn(output, target):
        _seen.append(len(output))
        return output.square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_setup, "meter_for", lambda device, limit, margin: Rejecting(device, None))
        found = ak.find_batch_size(nn.Linear(2, 2), "cpu", (2,), (2,), 64, loss_fn=loss_fn, num_iterations=2)
    assert found == 4
    assert found.reason == "oom"
    assert [trial.ok for trial in found.tried] == [True, True, True, False]


def test_cpu_and_others():
    """The CPU's memory is the machine's; of a device whose memory is not known a margin cannot be kept."""
    assert isinstance(meter_for(torch.device("cpu"), None, 0.5), CountingMeter)
    with pytest.raises(ValueError, match="margin on mps needs memory_limit"):
        meter_for(torch.device("mps"), None, 0.5)


@pytest.mark.gpu
def test_on_a_gpu():
    """A limit is kept by the allocator, the answer is the same twice, the model comes back to the CPU."""
    model = nn.Linear(1024, 1024)
    before = [p.detach().clone() for p in model.parameters()]
    answers = [
        ak.find_batch_size(model, "cuda", (1024,), (1024,), 2**20, mode="power", memory_limit=512 * 2**20)
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    assert answers[0].reason == "oom"
    assert 0 < answers[0].peak_bytes <= 512 * 2**20
    assert all(p.device.type == "cpu" and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.cuda.memory_allocated() == 0


@pytest.mark.gpu
def test_prediction_on_a_gpu():
    """The report with fake tensors is within 15 % of the allocator's peak."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def make_batch(n):
        return torch.randn(n, 512, device="cuda"), torch.randn(n, 512, device="cuda")

    measured, predicted = (
        ak.memory_report(model, optimizer, make_batch, 4096, loss_fn=nn.functional.mse_loss, fake=fake)
        for fake in (False, True)
    )
    assert predicted.total == pytest.approx(measured.total, rel=0.15)
