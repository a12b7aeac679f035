"""Whether to accumulate: times predicted and measured against a clock that the test drives, and the verdicts."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.planning.costs import StepCosts, measure_step_costs
from accumkernels.planning.trial import Trial


class Clock:
    """In the place of time.perf_counter: time passes only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Case(NamedTuple):
    """What a training takes, in seconds, and what the right verdict is."""

    verdict: str
    target: int
    micro_batch: int
    per_sample: float
    optimizer: float
    fixed: float = 0.0  # of a micro-batch, whatever its size
    accumulate: float = 0.0
    reduction: float = 0.0
    ranks: int = 1
    noise: float | None = None


# The verdicts are worked out by hand from seconds per sample t(K), with a noise scale times 1 + K m ranks / noise.
CASES = {
    # t(1) = 1.0125, t(8) = 1.0016: 1 % less.
    "a cheap step": Case("K = 1", 64, 8, per_sample=1.0, optimizer=0.1),
    # t(1) = 1.5 at 3 times the fewest samples, t(2) = 1.0 at 5 times, t(8) = 0.625 at 17 times.
    "a dear step, but little noise": Case("K = 1", 32, 4, per_sample=0.5, optimizer=4.0, noise=2.0),
    # A sample takes longer in every window.
    "a dear accumulation": Case("K = 1", 16, 4, per_sample=0.5, optimizer=0.5, accumulate=1.0),
    # t(K) = 1 + 1 / K, and t(64) = 1.0156: 1.0667 is 5.02 % more than that, 1.0625 is 4.6 % more.
    "a step as long as a micro-batch": Case("K up to 16", 512, 8, per_sample=1.0, optimizer=8.0),
    # t(K) (1 + K / 4) = (1 + 4 / K) (1 + K / 4) = 2 + K / 4 + 4 / K is 4 at K = 4, and 4.083 (2 % more) at K = 3.
    "a dear step, and noise": Case("K up to 3", 64, 4, per_sample=1.0, optimizer=16.0, noise=16.0),
    # t(K) = (1 + 6 / K) / 2 over two ranks: every K pays.
    "a dear reduction": Case(
        "K = 4 for the batch 32", 32, 4, per_sample=0.5, fixed=2.0, optimizer=4.0, reduction=20.0, ranks=2
    ),
}


class Training:
    """A model, an optimizer and an accumulator that take the time of a case."""

    def __init__(self, case: Case, clock: Clock, monkeypatch: pytest.MonkeyPatch):
        class Model(nn.Linear):
            def forward(self, x):
                clock.now += case.fixed + case.per_sample * len(x)
                return super().forward(x)

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                clock.now += case.optimizer
                return super().step(closure)

        backward = ak.FusedAccumulator.backward

        def longer(acc, *args, **kwargs):
            clock.now += case.accumulate
            return backward(acc, *args, **kwargs)

        monkeypatch.setattr(ak.FusedAccumulator, "backward", longer)
        self.case, self.clock = case, clock
        self.model, self.optimizer_fn = Model(2, 2), lambda params: Optimizer(params, lr=0.1)

    def seconds_per_sample(self, steps):
        """A loop as a user writes it, timed; the reduction is added, since there is one rank."""
        x, y = torch.randn(self.case.micro_batch, 2), torch.randn(self.case.micro_batch, 2)
        begin = self.clock.now
        if steps == 1:
            optimizer = self.optimizer_fn(self.model.parameters())
            nn.functional.mse_loss(self.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with ak.FusedAccumulator(self.model) as acc:
                optimizer = self.optimizer_fn(acc.parameters())
                for _ in range(steps):
                    acc.backward(nn.functional.mse_loss(self.model(x), y))
                acc.step(optimizer)
        seconds = self.clock.now - begin + self.case.reduction
        return seconds / (steps * self.case.micro_batch * self.case.ranks)


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still between the steps of a case."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def planned(case: Case, **costs) -> ak.AccumulationPlan:
    """The plan of a case."""
    wanted = {"world_size": case.ranks, "noise_scale": case.noise}
    if case.ranks > 1:
        costs["reduction_seconds"] = case.reduction
    return ak.plan(case.target, case.micro_batch, **wanted, **costs)


@pytest.mark.parametrize("name", CASES)
def test_cases(name, clock, monkeypatch):
    """Costs that are measured predict every window's time; the verdict is the best K by the times of real loops."""
    case = CASES[name]
    training = Training(case, clock, monkeypatch)
    costs = measure_step_costs(
        training.model,
        "cpu",
        case.micro_batch,
        input_shape=2,
        output_shape=2,
        optimizer_fn=training.optimizer_fn,
        num_iterations=2,
    )
    made = planned(case, **{**costs._asdict(), "reduction_seconds": case.reduction})
    assert made.verdict == case.verdict

    every = range(1, made.accumulation_steps + 1)
    real = [training.seconds_per_sample(steps) for steps in every]
    assert [made.seconds_per_sample(steps) for steps in every] == pytest.approx(real, rel=1e-9)
    noise = math.inf if case.noise is None else case.noise
    to_loss = [
        seconds * (1 + steps * case.micro_batch * case.ranks / noise)
        for steps, seconds in zip(every, real, strict=True)
    ]
    good = [steps for steps, seconds in zip(every, to_loss, strict=True) if seconds <= 1.05 * min(to_loss)]
    assert made.best_steps == good[0]


@pytest.mark.parametrize("accumulate", [None, 4])
def test_from_batch_size(accumulate, clock, monkeypatch):
    """find_batch_size brings rates and the optimizer's time along, measured with an accumulator or without."""
    case = Case("K up to 16", 512, 8, per_sample=1.0, optimizer=8.0)
    training = Training(case, clock, monkeypatch)
    size = ak.find_batch_size(
        training.model, "cpu", 2, 2, 8, optimizer_fn=training.optimizer_fn, num_iterations=2, accumulate=accumulate
    )
    assert size.optimizer_seconds == pytest.approx(8.0)
    assert size.accumulate == accumulate
    made = ak.plan(case.target, size)
    assert made.verdict == case.verdict
    for steps in (1, 2, 5, 64):
        assert made.seconds_per_sample(steps) == pytest.approx(training.seconds_per_sample(steps))


def test_sizes_between():
    """A micro-batch between two measured sizes takes the time between theirs; beyond them, the nearest's per sample."""
    costs = StepCosts({4: 4.0, 8: 2.0, 16: 2.0}, 0.0)
    expected = {1: 0.25, 4: 1.0, 6: 2.5, 7: 3.25, 8: 4.0, 12: 6.0, 16: 8.0, 32: 16.0}
    assert {size: costs.step_seconds(size) for size in expected} == pytest.approx(expected)
    made = ak.plan(24, 6, samples_per_second={4: 4.0, 8: 2.0}, optimizer_seconds=0.5)
    assert made.seconds_per_sample(1) == pytest.approx(2.5 / 6)
    assert made.seconds_per_sample(4) == pytest.approx((4 * 2.0 + 0.5) / 24)


def test_says_why():
    """The numbers of the verdict are in its reason, and in the table."""
    costs = {"samples_per_second": 500.0, "optimizer_seconds": 8e-3}
    made = ak.plan(512, 8, **costs)
    assert made.why == (
        "with K = 16 a sample takes 47 % less time than with K = 1: the optimizer step takes 8 ms, a micro-batch "
        "8 ms; from there to K = 64 it takes only 4 % less"
    )
    table = str(made).splitlines()
    assert table[-1] == f"verdict: {made.verdict}, since {made.why}"
    start = next(i for i, line in enumerate(table) if line.split()[:1] == ["K"])
    rows = {int(line.split()[0]): line.split()[1:] for line in table[start + 1 : -1]}
    assert list(rows) == [1, 2, 4, 8, 16, 32, 64]
    assert rows[16] == ["128", "1.062"]

    noisy = ak.plan(512, 8, **costs, noise_scale=8)
    assert "at a noise scale of 8, a loss takes" in noisy.why
    assert "time to a loss" in str(noisy)
    slower = ak.plan(16, 8, samples_per_second=8, optimizer_seconds=0.1, accumulate_seconds=0.5)
    assert slower.why.startswith("with K = 2 a sample takes 45 % more time than with K = 1;")


def test_one_micro_batch():
    """Nothing to accumulate, whatever it costs; smaller micro-batches that are faster are pointed to."""
    assert ak.plan(8, 8).verdict == ak.plan(8, 8, samples_per_second=1.0, optimizer_seconds=1.0).verdict == "K = 1"
    assert (
        ak.plan(16, 8, world_size=2).why
        == "the batch of 16 is one micro-batch on each rank: there is nothing to accumulate"
    )
    faster = ak.plan(64, 64, samples_per_second={8: 20.0, 64: 10.0}, optimizer_seconds=0.1)
    assert faster.verdict == "K = 1"
    assert faster.why.endswith(
        "Micro-batches of 8 compute 2.6 times as many samples per second: try max_micro_batch_size=8"
    )


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({}, "samples_per_second, optimizer_seconds"),
        ({"samples_per_second": 10.0}, "optimizer_seconds"),
        ({"optimizer_seconds": 0.1}, "samples_per_second"),
        ({"world_size": 2, "samples_per_second": 10.0, "optimizer_seconds": 0.1}, "reduction_seconds"),
    ],
)
def test_not_measured(arguments, missing):
    """The batch is reached as asked, and the verdict says which costs would tell more."""
    made = ak.plan(64, 8, **arguments)
    assert made.verdict == f"K = {made.accumulation_steps} for the batch 64"
    assert made.why.endswith(f"is not known without {missing}")
    assert made.costs is None
    with pytest.raises(RuntimeError, match=f"give plan\\(\\) {missing}"):
        made.seconds_per_sample(2)
    assert "it takes 4.5 times the samples to a loss" in ak.plan(64, 8, noise_scale=8.0).why


def test_bytes_of_what_does_not_fit():
    """A size that ran out of memory is the reason for micro-batches at all."""
    tried = [(8, True, 2**20, 10.0), (16, False, 3 * 2**20, 0.0)]
    size = ak.BatchSize(8, [Trial(*trial) for trial in tried], "oom")
    assert "at most 8 samples (a micro-batch of 16 ran out of memory at 3.0 MiB)" in ak.plan(64, size).why
    measured = ak.plan(16, size, optimizer_seconds=0.4)
    assert measured.verdict == "K = 2 for the batch 16"
    assert measured.why.endswith("(a micro-batch of 16 ran out of memory at 3.0 MiB)")


def test_noise_scale_of_an_accumulator():
    """What acc.noise_scale() returns is taken as it is, and refused before it is a measurement."""
    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 2)
    model = nn.Linear(2, 2)
    with ak.FusedAccumulator(model, noise_scale=True) as acc:
        with pytest.raises(ValueError, match="noise_scale must be positive and finite, got nan; .* more windows"):
            ak.plan(8, 4, noise_scale=acc.noise_scale())
        for rows in (slice(0, 4), slice(4, 8)):
            acc.backward(nn.functional.mse_loss(model(x[rows]), y[rows]), weight=4)
        acc.step(torch.optim.SGD(acc.parameters(), lr=0.0))
        scale = acc.noise_scale()
    assert ak.plan(8, 4, noise_scale=scale).noise_scale == float(scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"optimizer_seconds": 20.0},
            "optimizer_seconds 20 leaves no time for a micro-batch: a whole training step takes 2",
        ),
        ({"accumulate_seconds": -3.0, "optimizer_seconds": 0.0}, r"\(accumulate_seconds: -3\)"),
        ({"samples_per_second": {}}, "at least one micro-batch size, got {}"),
        ({"samples_per_second": {4: 0.0}}, r"samples_per_second\[4\] must be positive and finite, got 0.0"),
        ({"reduction_seconds": -1.0}, "reduction_seconds must be at least 0 and finite, got -1.0"),
        ({"accumulate_seconds": math.inf}, "accumulate_seconds must be finite, got inf"),
        ({"noise_scale": 0}, "noise_scale must be positive and finite, got 0"),
    ],
)
def test_wrong_costs(arguments, message):
    """Named with their value."""
    with pytest.raises(ValueError, match=message):
        ak.plan(64, 8, **{"samples_per_second": 4.0, "optimizer_seconds": 0.1, **arguments})


def test_plans_of_the_same_batches_are_equal():
    """What they cost does not count, and they can be keys."""
    known = ak.plan(64, 8, samples_per_second={8: 4.0}, optimizer_seconds=0.1, noise_scale=3.0)
    assert known == ak.plan(64, 8)
    assert len({known, ak.plan(64, 8)}) == 1


def test_measuring_leaves_no_trace():
    """The model, its gradients and the random state are what they were, also after an error."""
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model(torch.randn(4, 2)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [param.grad for param in model.parameters()]
    random = torch.get_rng_state()

    def broken(output, target):
        raise ZeroDivisionError

    def arguments(**more):
        return {"input_shape": 2, "output_shape": 2, "num_iterations": 2, "duration": 1e-3, **more}

    assert measure_step_costs(model, "cpu", 4, **arguments()).samples_per_second[4] > 0
    with pytest.raises(ZeroDivisionError):
        measure_step_costs(model, "cpu", 4, **arguments(loss_fn=broken))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_measuring_what_does_not_fit():
    """Out of memory is an error that names the size."""

    def full(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="a micro-batch of 4 does not fit on cpu: CUDA out of memory"):
        measure_step_costs(nn.Linear(2, 2), "cpu", 4, input_shape=2, output_shape=2, loss_fn=full)
