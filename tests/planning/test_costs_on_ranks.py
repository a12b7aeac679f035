"""measure_step_costs on two gloo ranks: it times what is reduced over them, and no rank waits for one that failed."""

from __future__ import annotations

import contextlib
import itertools
import time
import unittest.mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.buffers.store import has_accumulator
from accumkernels.planning.costs import measure_step_costs
from accumkernels.planning.fit.averaging import Averaging
from accumkernels.ranks import chunks, data_parallel
from tests.support import ranks
from tests.support.ranks import message, parameters


class Bug(Exception):
    """A rank's own."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


def _over_ranks(param):
    """Whether a trial over ranks is under way: nothing else here has accumulators or such hooks."""
    return has_accumulator(param) or bool(param._post_accumulate_grad_hooks)


class Model(nn.Module):
    """Larger than a bucket, so that some of it has been sent when its first layer's backward raises.

    Args:
        where: "forward" or "backward": what raises, in trials over ranks; "" for nothing.
        after: How many micro-batches in these trials are well.
        error: What is raised.
    """

    def __init__(self, where="", after=0, error=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 512), *(nn.Linear(512, 512) for _ in range(3)), nn.Linear(512, 2))
        self.where, self.after, self.error = where, after, error
        self.calls = itertools.count()  # not put back after a trial, as a number would be

    def forward(self, x):
        """Run, or do not."""
        if not self.where or not _over_ranks(self.layers[0].weight) or next(self.calls) < self.after:
            return self.layers(x)
        if self.where == "forward":
            raise self.error
        return self.layers[1:](_Raise.apply(self.layers[0](x), self.error))


def _measure(model, **arguments):
    wanted = {"input_shape": 2, "output_shape": 2, "num_iterations": 2, "duration": 1e-3}
    with unittest.mock.patch.object(chunks, "CHUNK_BYTES", 2**18):
        return measure_step_costs(model, "cpu", 2, **{**wanted, **arguments})


@contextlib.contextmanager
def _recorded():
    """A list that gets, for every step and window, its micro-batches and how many sums over ranks it took."""
    windows, sums = [], []
    step, run, all_reduce = ak.FusedAccumulator.step, Averaging.run, torch.distributed.all_reduce

    def recorded_step(acc, *args, **kwargs):
        micro_batches = acc.micro_batches
        step(acc, *args, **kwargs)
        windows.append((micro_batches, len(sums)))
        sums.clear()

    def recorded_run(averaging, backward):
        sums.clear()
        run(averaging, backward)
        windows.append((1, len(sums)))
        sums.clear()

    def recorded_all_reduce(*args, **kwargs):
        sums.append(1)
        return all_reduce(*args, **kwargs)

    with (
        unittest.mock.patch.object(ak.FusedAccumulator, "step", recorded_step),
        unittest.mock.patch.object(Averaging, "run", recorded_run),
        unittest.mock.patch.object(torch.distributed, "all_reduce", recorded_all_reduce),
    ):
        yield windows


def same_trials(rank, size):
    """What is timed are steps and windows that are reduced over the ranks, as many on every rank.

    One rank's clock runs a thousand times as fast, so that its time is up after the first trials.
    """
    clock = time.perf_counter
    with (
        _recorded() as windows,
        unittest.mock.patch.object(time, "perf_counter", lambda: clock() * (1000 if rank else 1)),
    ):
        _measure(nn.Linear(2, 2), duration=0.5)
    assert {micro_batches for micro_batches, _ in windows} == {1, 4}
    assert {sums for micro_batches, sums in windows if micro_batches == 1} == {1}  # one bucket
    assert min(sums for micro_batches, sums in windows if micro_batches == 4) > 1  # scalars, and chunks
    everyones = [None] * size
    torch.distributed.all_gather_object(everyones, windows)
    assert everyones[0] == everyones[1]


def costs(rank, size):
    """The slowest rank's costs predict a step, which hides a part of its reduction, and windows to the last digit."""
    now = 0.0

    def spend(seconds):
        nonlocal now
        now += seconds

    class Slow(nn.Linear):
        def forward(self, x):
            spend((1 + rank) * len(x))
            return super().forward(x)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            spend(4.0)
            return super().step(closure)

    agree, run = data_parallel.DataParallel.all_reduce_stats, Averaging.run

    def slow_agree(*args):
        spend(8.0)
        return agree(*args)

    def slow_run(*args):
        spend(6.0)
        run(*args)

    with (
        unittest.mock.patch.object(time, "perf_counter", lambda: now),
        unittest.mock.patch.object(data_parallel.DataParallel, "all_reduce_stats", slow_agree),
        unittest.mock.patch.object(Averaging, "run", slow_run),
    ):
        found = _measure(Slow(2, 2), optimizer_fn=lambda params: Optimizer(params, lr=0.1))
    assert found.samples_per_second == {2: 2 / (4 + 4)}
    assert found[1:] == pytest.approx((6.0, 6.0, 2.0))
    assert [found.window_seconds(steps, 2) for steps in (1, 2, 5)] == pytest.approx([14.0, 20.0, 32.0])
    assert ak.plan(8, 2, world_size=2, **found._asdict()).seconds_per_sample(2) == pytest.approx(20 / 8)


def as_before(rank, size):
    """Ranks that differ in their parameters, which a window makes alike, differ afterwards as before."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _measure(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not has_accumulator(model[0].weight)


def wrapped(rank, size):
    """A DistributedDataParallel module brings its group, and averages gradients afterwards as before."""
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with _recorded() as windows:
        _measure(ddp)
    assert min(sums for _, sums in windows) > 0
    ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((2, 2), 1.5))


def one_fails(rank, size):
    """Wherever one rank's training raises, that comes out there, and an error that names the rank on the other."""

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            if rank and has_accumulator(self.param_groups[0]["params"][0]):
                raise Bug("in step")
            return super().step(closure)

    def optimizer_fn(params):
        if rank and has_accumulator(params[0]):
            raise Bug("in optimizer_fn")
        return torch.optim.SGD(params, lr=0.1)

    models = {
        # Two windows of 4, then two steps, whose gradients are sent while backward runs.
        "in forward": Model("forward", 0, Bug("in forward")),
        "in backward": Model("backward", 1, Bug("in backward")),
        "in a step's backward": Model("backward", 8, Bug("in a step's backward")),
        "in a step's forward": Model("forward", 9, Bug("in a step's forward")),
        "out of memory": Model("forward", 2, torch.OutOfMemoryError("CUDA out of memory")),
    }
    found = {name: message(_measure, model if rank else Model()) for name, model in models.items()}
    found["in step"] = message(_measure, Model(), optimizer_fn=lambda params: Optimizer(params, lr=0.1))
    found["in optimizer_fn"] = message(_measure, Model(), optimizer_fn=optimizer_fn)
    if rank == 0:
        expected = "measure_step_costs: rank 1 failed at its trials; its own error says why"
        assert found == dict.fromkeys(found, ("RuntimeError", expected))
    else:
        error, text = found.pop("out of memory")
        assert (error, text) == (
            "RuntimeError",
            "measure_step_costs: a micro-batch of 2 does not fit on cpu: CUDA out of memory",
        )
        assert found == {name: ("Bug", name) for name in found}
    assert _measure(nn.Linear(2, 2)).reduction_seconds >= 0  # ranks are in step again


def wrong_argument(rank, size):
    """One rank's arguments are wrong: it says so, and the other names it."""
    error, text = message(_measure, Model(), duration=-1.0 if rank else 1e-3)
    if rank:
        assert (error, text) == ("ValueError", "duration must be positive and finite, got -1.0")
    else:
        assert text == "measure_step_costs: rank 1 failed at its arguments; its own error says why"


def leaves_nothing(rank, size):
    """After a failure the model has its parameters, and no accumulator."""
    model = Model("backward", 8 if rank else 99, Bug())
    before = parameters(model)
    message(_measure, model)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
    assert all(param.grad is None and not has_accumulator(param) for param in model.parameters())


def averages(rank, size):
    """Gradients are averaged as by DistributedDataParallel, of unused parameters too, and sent when backward raises."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)), nn.Linear(256, 2, dtype=torch.float32))
    unused = nn.Linear(3, 3)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
    ddp = DistributedDataParallel(model)
    ddp(x).square().sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()

    averaging = Averaging([*unused.parameters(), *model.parameters()], torch.distributed.group.WORLD)
    if rank:
        with pytest.raises(Bug):
            averaging.run(lambda: model[1:](_Raise.apply(model[0](x), Bug())).sum().backward())
    else:
        averaging.run(lambda: model(x).square().sum().backward())
    model.zero_grad()
    averaging.run(lambda: model(x).square().sum().backward())
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)  # halved before they are added, as there
    assert all(param.grad is None for param in unused.parameters())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


SCENARIOS = [averages, same_trials, costs, as_before, wrapped, one_fails, wrong_argument, leaves_nothing]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What failed on each of two ranks."""
    return ranks.run(2, tmp_path_factory.mktemp("costs"), SCENARIOS)


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_two_ranks(two, scenario):
    """See the function of that name."""
    ranks.check(two, scenario)
