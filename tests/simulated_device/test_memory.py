"""Batches that run out of the device's memory, wherever that happens."""

from __future__ import annotations

import copy
import traceback

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests import simulated_device as sim
from tests.support.models import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:accumkernels uses its reference backend")
ROWS, WIDTH = 12, 24
REPORT = 10  # allocations after the last micro-batch was counted, for the report
WAYS = {
    "whole": {"release": "microbatch", "fuse_weight_gradients": False},
    "buckets": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": False},
    "fused": {"release": "backward", "bucket_bytes": 1, "fuse_weight_gradients": True},
    "deferred": {"fuse_weight_gradients": "deferred"},
}


def build(seed=0):
    """A model in fp64, a batch on the host, and the gradient of the mean over it."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
    ).double()
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, 2, dtype=torch.float64)
    twin = copy.deepcopy(model)
    mse_loss(twin(x), y).backward()
    return model.to("sim:0"), (x.to("sim:0"), y.to("sim:0")), [p.grad for p in twin.parameters()]


def check(acc, model, expected):
    """The window's mean."""
    acc.finalize()
    assert relative_error([p.grad.cpu() for p in model.parameters()], expected) < 1e-12


def batch(acc, model, data):
    """The whole of it."""
    return acc.backward_batch(data, lambda part: mse_loss(model(part[0]), part[1]))


def allocations(way, settled):
    """How many a batch makes that fits, up to where its last micro-batch is counted."""
    model, data, _ = build()
    with ak.FusedAccumulator(model, **WAYS[way]) as acc:
        for _ in range(1 + settled):
            before = sim.allocations(0)
            batch(acc, model, data)
            after = sim.allocations(0)
            acc.zero_()
    return after - before - REPORT


@pytest.mark.parametrize("settled", [False, True], ids=["first window", "later window"])
@pytest.mark.parametrize("way", WAYS)
def test_any_allocation_may_fail(way, settled):
    """In a forward, a backward or an op: the micro-batch is split, and the sum is exact."""
    for number in range(list(WAYS).index(way), allocations(way, settled), 19):
        model, data, expected = build()
        with ak.FusedAccumulator(model, **WAYS[way]) as acc:
            if settled:
                batch(acc, model, data)
                acc.zero_()
            with sim.watch() as seen:
                sim.fail_after(0, number)
                report = batch(acc, model, data)
                assert report.out_of_memory == 1 and sum(report.sizes) == ROWS, number
                acc.finalize()
                found = [p.grad.cpu() for p in model.parameters()]
                assert relative_error(found, expected) < 1e-12, number
            seen.check()


def test_a_limit():
    """The batch does not fit: it is split until its parts do; a row that does not fit raises."""
    total = torch.sim.mem_get_info(0)[1]
    peak = None
    for room in (None, 0.7, 0.5, 0.0):
        model, data, expected = build()
        data = tuple(part.repeat(40, 1) for part in data)  # activations take more than gradients and sums
        torch.accelerator.reset_peak_memory_stats(0)
        before = torch.accelerator.memory_allocated(0)
        with ak.FusedAccumulator(model) as acc, sim.watch() as seen:
            try:
                if room is not None:
                    sim.limit(0, int(before + peak * room))
                if room == 0:
                    with pytest.raises(torch.OutOfMemoryError):
                        batch(acc, model, data)
                else:
                    report = batch(acc, model, data)
                    assert (len(report.sizes) > 1) == (report.out_of_memory > 0) == (room is not None)
            finally:
                sim.limit(0, total)
            if room is None:
                peak = torch.accelerator.max_memory_allocated(0) - before
            if room == 0:
                acc.zero_()
                batch(acc, model, data)
            check(acc, model, expected)
        seen.check()


def test_a_memory_limit_is_kept():
    """From the first micro-batch on, by the figures of the device's own allocator."""
    model, data, expected = build()
    data = tuple(part.repeat(400, 1) for part in data)
    allowed = torch.accelerator.memory_allocated(0) + 3 * 2**19
    with ak.FusedAccumulator(model, memory_limit=allowed) as acc:
        for _ in range(2):
            torch.accelerator.reset_peak_memory_stats(0)
            report = batch(acc, model, data)
            assert torch.accelerator.max_memory_allocated(0) <= allowed and len(report.sizes) > 1, report
            check(acc, model, expected)
            acc.zero_()


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_a_step_that_is_called_again(max_norm):
    """After its end ran out of memory anywhere, a window makes the step of float64 arithmetic, or says that it is lost.

    Memory for gradients of 16-bit parameters is taken while the sums are as they were.
    """
    torch.manual_seed(0)
    first = nn.Linear(8, 4)
    start, x = first.weight.detach().to(torch.bfloat16).double(), torch.randn(2, 8, dtype=torch.float64)
    x = x.to(torch.bfloat16).double()
    mean = (100 * x[0] + 300 * x[1]).expand(4, 8) / 400  # of a sum over outputs
    factor = 1.0 if max_norm is None else max_norm / float((mean.square().sum() + 4).sqrt())  # the bias's are 1
    outcomes = []
    for number in range(200):
        model = copy.deepcopy(first).to("sim:0", torch.bfloat16)
        with ak.FusedAccumulator(model) as acc:
            optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
            for row, weight in zip(x.to("sim:0", torch.bfloat16), (100, 300), strict=True):
                acc.backward(model(row).sum(), weight=weight)
            sim.fail_after(0, number)
            try:
                acc.step(optimizer, max_norm=max_norm)
                outcomes.append("at once")
            except torch.OutOfMemoryError as error:
                places = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
                sim.fail_after(0, -1)
                try:
                    acc.step(optimizer, max_norm=max_norm)
                    outcomes.append("again")
                except RuntimeError as said:
                    assert "its sums are lost" in str(said) and "allocate" not in places, number
                    outcomes.append("lost")
                    acc.zero_()
            finally:
                sim.fail_after(0, -1)
            moved = start - model.weight.detach().cpu().double()
            expected = mean * (0.0 if outcomes[-1] == "lost" else factor)
            rounding = 0.01 * factor + 1e-3  # of gradients up to 1.5 times the factor, and of weights, to 8 bits
            assert (moved - expected).abs().max() < rounding, (number, outcomes[-1])
        if outcomes[-1] == "at once":
            break
    assert set(outcomes) == {"again", "lost", "at once"}
