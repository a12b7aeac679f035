"""What the simulated device is told about GPUs, on a GPU: sums, waits, sums in host memory, and batches that fit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.simulated_device.training import OPTIONS, Training, error, stock
from tests.support.models import relative_error
from tests.support.offloaded import CASES, Twins

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*in another unit")]
WINDOWS = 3
# cuBLAS adds in another order than the CPU's kernels, and the loss is made of fp32 logits; autocast's lists of ops
# differ, and bf16 parameters round each step: some roundings of 2**-9.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


@contextlib.contextmanager
def without_waits(stage):
    """An error from whatever makes the host wait."""
    torch.cuda.set_sync_debug_mode("error" if stage in ("backward", "accumulate") else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, backend):
    """Every set of options has the CPU's parameters, and backward does not wait for the GPU."""
    stage = contextlib.nullcontext if name == "raises" else without_waits
    training = Training("cuda", name, stage, backend=backend)
    training.windows(WINDOWS)
    assert error(training.parameters(), stock(name, WINDOWS)) < CLOSE[training.amp or training.model.norm.weight.dtype]


@pytest.mark.parametrize("case", CASES)
def test_offloaded(case, monkeypatch):
    """The bits of sums that are added on the host from stock's gradients."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    twins = Twins(**CASES[case], device="cuda:0")
    for number in range(12):
        twins.window(twins.random.randint(1, 8), 0.1, 0.5 if number % 2 else None)


@pytest.fixture
def problem():
    """A model on the GPU, a batch, and the gradient of its mean in fp64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).cuda()
    data = torch.randn(2**14, 64, device="cuda"), torch.randn(2**14, 1, device="cuda")
    twin = copy.deepcopy(model).double()
    mse_loss(twin(data[0].double()), data[1].double()).backward()
    expected = [p.grad for p in twin.parameters()]
    del twin
    torch.cuda.empty_cache()
    return model, data, expected


def whole(acc, model, data, expected, **options):
    """One batch; its report."""
    report = acc.backward_batch(data, lambda part: mse_loss(model(part[0]), part[1]), **options)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-4
    acc.zero_()
    return report


def test_a_memory_limit_is_kept(problem):
    """From the first micro-batch on."""
    model, data, expected = problem
    allowed = torch.cuda.memory_allocated() + 120 * 2**20
    with ak.FusedAccumulator(model, memory_limit=allowed) as acc:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            report = whole(acc, model, data, expected)
            assert len(report.sizes) > 1 and torch.cuda.max_memory_allocated() <= allowed, report


def test_out_of_memory(problem):
    """The allocator has less than the batch needs: what does not fit is split, and the gradient is the batch's."""
    model, data, expected = problem
    total = torch.cuda.get_device_properties(0).total_memory
    with ak.FusedAccumulator(model) as acc:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 150 * 2**20) / total)
        try:
            reports = [whole(acc, model, data, expected) for _ in range(3)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(len(report.sizes) > 1 for report in reports), reports
    assert reports[0].out_of_memory > 0 == reports[-1].out_of_memory, reports
