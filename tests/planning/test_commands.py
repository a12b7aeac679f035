"""python -m accumkernels plan and fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accumkernels.__main__ import main

pytestmark = pytest.mark.usefixtures("one_thread")

FACTORIES = """
import torch
from torch import nn

LIMIT = 12

def loss_fn(output, target):
    if len(output) > LIMIT:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return (output - target).square().mean()

def fit():
    return {"model": nn.Linear(3, 2), "input_shape": (3,), "output_shape": (2,), "loss_fn": loss_fn, "device": "cpu",
            "num_iterations": 2}

def nothing():
    def never(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return {**fit(), "loss_fn": never}

def broken():
    def bug(output, target):
        raise ValueError("my own bug")
    return {**fit(), "loss_fn": bug}

def crash():
    return {**fit(), "loss_fn": lambda output, target: output @ output}

class Made:
    fit = staticmethod(fit)

def text(): return "model"
def unknown(): return {**fit(), "batch": 3}
def modelless(): return {"device": "cpu"}
number = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A user's module on the path."""
    (tmp_path / "user_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("user_factories", None)


def test_plan(capsys):
    """The issue's example."""
    assert main(["plan", "--target", "512", "--max-micro", "12", "--world-size", "4"]) == 0
    assert "(7 x 12 + 4 x 11) x 4 ranks = 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target", "510", "--max-micro", "12", "--world-size", "4"],
            "--target 510 cannot .* --world-size 4 .* 508 and",
        ),
        (["--target", "8", "--max-micro", "0"], "--max-micro must be at least 1, got 0"),
    ],
)
def test_plan_wrong(arguments, message, capsys):
    """One line that names the option; status 2."""
    import re

    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_plan_costs(capsys):
    """Costs by options: without them it names those, with them a verdict and the time of each K."""
    assert main(["plan", "--target", "32", "--max-micro", "8"]) == 0
    assert "is not known without --samples-per-second, --optimizer-seconds\n" in capsys.readouterr().out
    options = ["--samples-per-second", "100", "--optimizer-seconds", "0.04", "--noise-scale", "1e6"]
    assert main(["plan", "--target", "32", "--max-micro", "8", *options]) == 0
    out = capsys.readouterr().out
    assert "verdict: K = 4 for the batch 32, since with K = 4 a sample takes 38 % less time than with K = 1" in out
    assert out.splitlines()[-2].split() == ["4", "32", "6.25", "63", "%"]


def test_plan_measures(factories, capsys):
    """Costs that are not given are measured; over ranks the reduction must be given, since one process has none."""
    base = ["plan", "--target", "8", "--max-micro", "4", "--measure", "user_factories:fit", "--device", "cpu"]
    base += ["--duration", "0.01"]
    assert main(base) == 0
    out = capsys.readouterr().out
    assert "ms per sample" in out
    assert "verdict: K " in out
    assert main([*base, "--world-size", "2"]) == 0
    assert "K = 1, since the batch of 8 is one micro-batch on each rank" in capsys.readouterr().out
    assert main([*base[:2], "16", *base[3:], "--world-size", "2"]) == 0
    assert "is not known without --reduction-seconds" in capsys.readouterr().out
    assert main([*base[:2], "16", *base[3:], "--world-size", "2", "--reduction-seconds", "1000"]) == 0
    assert "verdict: K = 2 for the batch 16, since with K = 2 a sample takes 50 % less time" in capsys.readouterr().out
    assert main([*base, "--noise-scale", "nan"]) == 2
    assert "--noise-scale must be positive and finite, got nan" in capsys.readouterr().err
    assert main([*base, "--duration", "-1"]) == 2
    assert "--duration must be positive and finite, got -1" in capsys.readouterr().err
    base[6] = "user_factories:missing"
    assert main(base) == 2
    assert "'user_factories' has no function 'missing'" in capsys.readouterr().err
    base[6] = "user_factories:broken"
    with pytest.raises(ValueError, match="my own bug"):
        main(base)


def test_fit(factories, capsys):
    """A table of what was tried, the answer, and the plan for a target."""
    assert main(["fit", "user_factories:fit", "--mode", "binsearch", "--target", "100"]) == 0
    out = capsys.readouterr().out
    assert "batch size 12: larger ones run out of memory" in out
    assert "9 x 12" not in out
    assert "1 x 12 + 8 x 11 = 100" in out
    row = next(line for line in out.splitlines() if line.split()[:1] == ["16"])
    assert row.split()[1] == "no"


def test_fit_options(factories, capsys):
    """The command line goes before the factory; a function may be an attribute."""
    assert (
        main(["fit", "user_factories:Made.fit", "--max-batch-size", "9", "--mode", "binsearch", "--device", "cpu"]) == 0
    )
    assert "batch size 9: max_batch_size allows no larger one" in capsys.readouterr().out
    arguments = ["--dataset-size", "6", "--amp", "bf16", "--multiple-of", "3", "--accumulate", "2", "--margin", "0.1"]
    assert main(["fit", "user_factories:fit", *arguments, "--memory-limit", "1MiB", "--num-iterations", "3"]) == 0
    assert "batch size 6: there are no more samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("user_factories", "'user_factories' is not MODULE:FACTORY, as in train:fit"),
        ("no_such_module:fit", "there is no module 'no_such_module' on the path"),
        ("./train.py:fit", "there is no module './train.py' on the path: a module is named with dots"),
        ("..:fit", "there is no module '..' on the path"),
        ("user_factories:missing", "'user_factories' has no function 'missing'"),
        ("user_factories:number", "'user_factories' has no function 'number'"),
        ("user_factories:text", "user_factories:text must return a dict of find_batch_size's arguments, got 'model'"),
        ("user_factories:unknown", "user_factories:unknown returns batch; find_batch_size takes model, device"),
        ("user_factories:modelless", "user_factories:modelless returns no 'model'"),
    ],
)
def test_fit_wrong_factory(factories, factory, message, capsys):
    """One line that says what to change; status 2."""
    assert main(["fit", factory]) == 2
    assert message in capsys.readouterr().err


def test_an_import_that_fails_in_the_users_module(factories):
    """Its own error says which: the module itself is on the path."""
    (factories / "user_imports.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="'no_such_module'"):
        main(["fit", "user_imports:fit"])


def test_fit_errors(factories, capsys):
    """Nothing fits: 1. A wrong option: 2. A target that ranks cannot share: 2. The user's own bug: its traceback."""
    assert main(["fit", "user_factories:nothing"]) == 1
    assert "not even the smallest batch fits" in capsys.readouterr().err
    assert main(["fit", "user_factories:fit", "--margin", "2"]) == 2
    assert "margin must be" in capsys.readouterr().err
    assert main(["fit", "user_factories:fit", "--target", "3", "--world-size", "2"]) == 2
    said = capsys.readouterr()
    assert "--target 3 cannot be shared equally by --world-size 2 ranks; the nearest possible: 2 and 4" in said.err
    assert said.out == ""  # nothing was trained
    with pytest.raises(ValueError, match="my own bug"):
        main(["fit", "user_factories:broken"])
    with pytest.raises(RuntimeError, match="size mismatch|shapes"):
        main(["fit", "user_factories:crash", "--dataset-size", "3"])


def test_memory_limit(factories, capsys):
    """The option takes what `memory_limit=` takes, and says what is wrong with the rest."""
    assert main(["fit", "user_factories:fit", "--dataset-size", "4", "--memory-limit", "8GiB"]) == 0
    assert "batch size 4: there are no more samples" in capsys.readouterr().out
    for text, message in (("8 gallons", "is not a number of bytes: '8 gallons'"), ("12", "add the unit that is meant")):
        with pytest.raises(SystemExit):
            main(["fit", "user_factories:fit", "--memory-limit", text])
        assert message in capsys.readouterr().err


@pytest.mark.starts
@pytest.mark.parametrize("buffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_has_read_enough(buffered):
    """`| head` closes the pipe: no traceback, neither of the command's nor of Python's when it ends."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "accumkernels", "plan", "--target", "32", "--max-micro", "8"],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "", **buffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.starts
def test_as_a_process(factories):
    """`python -m accumkernels fit` finds modules in the working directory."""
    result = subprocess.run(
        [sys.executable, "-m", "accumkernels", "fit", "user_factories:fit", "--dataset-size", "4"],
        cwd=factories,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "batch size 4: there are no more samples" in result.stdout
