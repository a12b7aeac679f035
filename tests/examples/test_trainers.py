"""The trainers' examples run, and what they print is so."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from benchmarks.methods.trainers import reset

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDING = 1e-5  # of the way that the parameters go; measured 1.4e-7

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("name", "package"),
    [("accelerate_loop", "accelerate"), ("lightning_loop", "lightning"), ("transformers_trainer", "transformers")],
)
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
    distances = [float(found) for found in re.findall(r"(\S+) of the way", capsys.readouterr().out)]
    assert len(distances) >= 2
    assert min(distances[::2]) > 1e-3
    assert max(distances[1::2]) < ROUNDING
    assert f"make example-{name}" in example.__doc__
