"""The trainers' examples run, and what they print is so."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.methods.trainers import reset

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING = 1e-5  # of the way that the parameters go; measured 1.4e-7

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


TRAINERS = [
    ("accelerate_loop", "accelerate"),
    ("lightning_loop", "lightning"),
    ("transformers_trainer", "transformers"),
]


@pytest.mark.parametrize(("name", "package"), TRAINERS)
def test_ends_where_the_big_batch_does(name, package, monkeypatch, capsys):
    """And the trainer alone does not: unequal micro-batches, and a short last window."""
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    reset()  # what other tests set for accelerate's singletons
    example = importlib.import_module(name)
    try:
        assert example.main() == 0
    finally:
        for module in (name, "big_batch"):
            sys.modules.pop(module)
        reset()
    check(capsys.readouterr().out)
    assert f"make example-{name}" in example.__doc__


@pytest.mark.starts
@pytest.mark.parametrize(("name", "package"), TRAINERS)
def test_on_two_ranks(name, package):
    """As `make trainers-on-ranks` runs all three: the windows of both ranks together are the big batch."""
    pytest.importorskip(package)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    found = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, env=environment, timeout=300
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert "on 2 ranks" in found.stdout
    check(found.stdout)


def check(printed):
    """The trainer alone, then with FusedAccumulator."""
    distances = [float(found) for found in re.findall(r"(\S+) of the way", printed)]
    assert len(distances) >= 2
    assert min(distances[::2]) > 1e-3
    assert max(distances[1::2]) < ROUNDING
