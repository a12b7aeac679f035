"""The meter of an accelerator, on an allocator that the test plays; and on a GPU, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels import devices
from accumkernels.planning.trial import Trials, memory_for
from accumkernels.splitting.memory import AllocatorMemory, CountedMemory

DEVICE = torch.device("cuda", 0)
GIB = 2**30


class Allocator:
    """Answers for torch.accelerator: 80 GiB, of which others hold 10 and this process 5."""

    def __init__(self, monkeypatch):
        self.fraction = 0.9
        self.fractions = []
        self.retries = 3
        self.segments = []
        self.emptied = 0
        for name, function in {
            "empty_cache": self._empty,
            "reset_peak_memory_stats": lambda device: None,
            "memory_stats": lambda device: {"num_alloc_retries": self.retries},
            "max_memory_allocated": lambda device: 7 * GIB,
            "memory_allocated": lambda device: 4 * GIB,
            "get_memory_info": lambda device: (65 * GIB, 80 * GIB),
            "memory_reserved": lambda device: 5 * GIB,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, function)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(devices, "counts_memory", lambda device: device.type == "cuda")

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
    memory = memory_for(DEVICE, limit, margin, list)
    assert isinstance(memory, AllocatorMemory)
    with pytest.raises(KeyboardInterrupt), memory.measured():
        assert allocator.fraction == pytest.approx(0.9 if fraction is None else fraction)
        raise KeyboardInterrupt
    assert allocator.fraction == 0.9
    assert (memory.before, memory.peak, memory.taken) == (4 * GIB, 7 * GIB, 3 * GIB)


@pytest.mark.parametrize(("limit", "emptied"), [(6 * GIB, 0), (4 * GIB, 1), (None, 0)])
def test_cached_blocks(allocator, limit, emptied):
    """Blocks that the allocator has cached beyond the limit would be handed out without a look at it."""
    with AllocatorMemory(DEVICE, limit).limited():
        assert allocator.emptied == emptied
        assert allocator.fraction == (0.9 if limit is None else pytest.approx(limit / (80 * GIB)))
    assert allocator.fraction == 0.9


def test_error_of_a_trial(monkeypatch):
    """It comes out itself, where a kernel has failed and every call raises that from then on."""
    failing = []

    def synchronize(trials):
        if failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(output, target):
        failing.append(True)
        raise KeyError("first")

    monkeypatch.setattr(Trials, "_synchronize", synchronize)
    with pytest.raises(KeyError, match="first"):
        ak.find_batch_size(nn.Linear(2, 2), "cpu", (2,), (2,), 4, loss_fn=fails)
    failing.clear()

    def fails_later(output, target):
        failing.append(True)  # nobody else has noticed
        return output.sum()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        ak.find_batch_size(nn.Linear(2, 2), "cpu", (2,), (2,), 4, loss_fn=fails_later)


def test_limit_of_an_allocator(allocator):
    """Of 70 GiB that others do not hold, what the user gave this process, without what graphs have reserved."""
    memory = AllocatorMemory(DEVICE, None)
    allocator.fraction = 1.0
    assert memory.limit == 70 * GIB
    assert memory.free() == 66 * GIB
    allocator.fraction = 0.5
    assert memory.limit == 40 * GIB
    allocator.segments = [
        {"device": 0, "total_size": 3 * GIB, "allocated_size": GIB, "segment_pool_id": pool}
        for pool in ((0, 0), (0, 1))
    ]
    assert memory.limit == 38 * GIB
    assert AllocatorMemory(DEVICE, 8 * GIB).limit == 8 * GIB


def test_retries(allocator):
    """A trial that came through only because cached blocks were freed does not count; the next is not blamed."""
    memory = memory_for(DEVICE, None, 0.0, list)
    with memory.measured():
        allocator.retries += 1
    assert memory.over_limit
    with memory.measured():
        pass
    assert not memory.over_limit


def test_sizes_over_the_limit_do_not_fit():
    """find_batch_size takes the memory's word."""
    from accumkernels.planning import trial as trials

    class Crowded(CountedMemory):
        @property
        def over_limit(self):
            return _seen[-1] > 4

    _seen: list[int] = []

    def loss_fn(output, target):
        _seen.append(len(output))
        return output.square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "memory_of", Crowded)
        found = ak.find_batch_size(nn.Linear(2, 2), "cpu", (2,), (2,), 64, loss_fn=loss_fn, num_iterations=2)
    assert found == 4
    assert found.reason == "oom"
    assert [trial.ok for trial in found.tried] == [True, True, True, False]


def test_cpu_and_others():
    """The CPU's memory is the machine's; of a device whose memory is not known a margin cannot be kept."""
    memory = memory_for(torch.device("cpu"), None, 0.5, list)
    assert isinstance(memory, CountedMemory) and memory.limit > 2**28
    assert memory_for(torch.device("cpu"), 2**30, 0.25, list).limit == 3 * 2**28
    with pytest.raises(ValueError, match="margin on mps needs memory_limit"):
        memory_for(torch.device("mps"), None, 0.5, list)


@pytest.mark.gpu
def test_on_a_gpu():
    """A limit is kept by the allocator, the answer is the same twice, the model comes back to the CPU."""
    model = nn.Linear(1024, 1024)
    before = [p.detach().clone() for p in model.parameters()]

    def find():
        return ak.find_batch_size(model, "cuda", (1024,), (1024,), 2**20, mode="power", memory_limit=512 * 2**20)

    find()  # makes cuBLAS's workspaces, which stay
    allocated = torch.cuda.memory_allocated()
    answers = [find() for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].reason == "oom"
    assert 0 < answers[0].peak_bytes <= 512 * 2**20
    assert all(p.device.type == "cpu" and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.gpu
def test_prediction_on_a_gpu():
    """The report with fake tensors is within 15 % of the allocator's peak without cuBLAS's workspaces."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    model(torch.zeros(4096, 512, device="cuda")).sum().backward()  # makes them, of both threads; on Hopper 32 MiB each
    optimizer = torch.optim.AdamW(model.parameters())

    def make_batch(n):
        return torch.randn(n, 512, device="cuda"), torch.randn(n, 512, device="cuda")

    measured, predicted = (
        ak.memory_report(model, optimizer, make_batch, 4096, loss_fn=nn.functional.mse_loss, fake=fake)
        for fake in (False, True)
    )
    assert predicted.total == pytest.approx(measured.total, rel=0.15)
