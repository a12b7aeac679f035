"""Every argument of planning's functions: a wrong type is an error that names the argument and repeats the value."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.errors import wrong_type


class Odd:
    """What no argument takes."""

    def __repr__(self):
        return "an odd value"


ODD = Odd()
FIT = {"model": nn.Linear(2, 2), "device": "cpu", "input_shape": 2, "output_shape": 2, "dataset_size": 2}
COSTS = {"model": nn.Linear(2, 2), "device": "cpu", "micro_batch_size": 1, "input_shape": 2, "output_shape": 2}

# Arguments that are right, by function; what is not mentioned has a default.
CALLS = {
    ak.find_batch_size: FIT,
    ak.measure_step_costs: COSTS,
    ak.memory_report: {
        "model": FIT["model"],
        "optimizer": torch.optim.SGD(FIT["model"].parameters()),
        "make_batch": lambda n: (torch.zeros(n, 2), torch.zeros(n, 2)),
        "batch_size": 1,
        "fake": True,
    },
    ak.plan: {
        "target_batch_size": 8,
        "max_micro_batch_size": 4,
        "samples_per_second": 1.0,
        "optimizer_seconds": 0.0,
        "reduction_seconds": 0.0,
    },
    ak.suggest_learning_rate: {"base_lr": 0.1, "base_batch_size": 1, "batch_size": 1},
    ak.suggest_betas: {"beta2": 0.9, "base_batch_size": 1, "batch_size": 1},
    ak.is_oom_error: {"exception": MemoryError()},
    ak.batchnorm_modules: {"model": FIT["model"]},
    ak.replace_batchnorm: {"model": FIT["model"]},
    ak.correct_batchnorm_momentum: {"model": FIT["model"], "accumulation_steps": 2},
    ak.Milestones: {"sizes": {0: 1}},
    ak.Milestones.instead_of_decay: {"batch_size": 1, "milestones": [1]},
    ak.plan(8, 4).seconds_per_sample: {"accumulation_steps": 1},
    ak.plan(8, 4).split: {"batch": torch.ones(8)},
    ak.plan(8, 4).windows: {"loader": []},
    ak.plan(8, 4).batch_sampler: {"sampler": range(8)},
    ak.draw_memory: {"path": "", "reports": []},
}
# Flags that only choose, what matplotlib draws, and any structure of tensors, which `split` judges by its samples.
UNCHECKED = {"progress", "fake", "path", "limit", "batch"}


def test_no_function_is_missing():
    """All that is public, but for the accumulator and for what these functions return."""
    returned = {
        "AccumulationPlan",
        "BatchReport",
        "BatchSize",
        "FusedAccumulator",
        "MemoryReport",
        "NoiseScale",
        "StepCosts",
    }
    assert {function.__name__ for function in CALLS} >= set(ak.__all__) - returned
    reference = (Path(__file__).parents[2] / "docs/reference/planning.md").read_text()
    entries = {entry.rpartition(".")[2] for entry in re.findall("^::: (.+)$", reference, re.MULTILINE)}
    assert {function.__name__ for function in CALLS} >= entries - returned
    methods = {name for name, f in vars(ak.AccumulationPlan).items() if inspect.isfunction(f) and name[0] != "_"}
    taking = {name for name in methods if len(inspect.signature(getattr(ak.AccumulationPlan, name)).parameters) > 1}
    assert {function.__name__ for function in CALLS} >= taking


def arguments():
    """Every function with each of its arguments."""
    for function, right in CALLS.items():
        for name in inspect.signature(function).parameters:
            if name not in UNCHECKED:
                yield pytest.param(function, right, name, id=f"{function.__qualname__}-{name}")


@pytest.mark.parametrize(("function", "right", "name"), [*arguments()])
def test_wrong_type(function, right, name):
    """The message names the argument and repeats the value; nothing has run."""
    kind = ValueError if name in ("mode", "rule") else TypeError
    with pytest.raises(kind, match=f"{name} must be .*, got an odd value$"):
        function(**{**right, name: ODD})


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_calls_are_right(function):
    """But for the value that a test puts in, the calls are."""
    signature = inspect.signature(function)
    signature.bind(**CALLS[function])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1MB", "'1MB'"),
        ("x" * 1000, "'" + "x" * 27 + "..." + "x" * 28 + "'"),
        (torch.zeros(3), "tensor([0., 0., 0.])"),
        (nn.Sequential(nn.Linear(2, 2)), "Sequential( (0): Linear(in... out_features=2, bias=True) )"),
        ([1] * 100, "[1, 1, 1, 1, 1, 1, ...]"),
    ],
)
def test_values_are_short(value, said):
    """One line of some 60 characters at most."""
    assert str(wrong_type("bucket_bytes", "an int", value)) == f"bucket_bytes must be an int, got {said}"


def test_values_that_cannot_be_said():
    """A value whose repr fails is called by its class."""

    class Broken:
        def __repr__(self):
            raise RuntimeError("no repr")

    assert "got <Broken instance at " in str(wrong_type("n", "an int", Broken()))
