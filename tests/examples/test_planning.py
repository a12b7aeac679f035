"""The examples run, small, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fit_plan_train(capsys):
    """A batch that does not fit, the size that does, the plan, and the result of the big batch."""
    assert load("fit_plan_train").main(["--limit-mib", "16", "--target", "6", "--windows", "2"]) == 0
    out = capsys.readouterr().out
    for part in ("out of the memory limit", "reason='oom'", "accumulation steps", "the same but for rounding"):
        assert part in out


def test_noise_scale(tmp_path, capsys):
    """A table and a picture."""
    assert (
        load("noise_scale").main(["--windows", "3", "--accumulation-steps", "2", "--out", str(tmp_path / "noise.png")])
        == 0
    )
    assert "critical batch size" in capsys.readouterr().out
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["fit_plan_train", "noise_scale"])
def test_explained(name):
    """The docstring says how to run it."""
    assert f"python examples/{name}.py" in load(name).__doc__
