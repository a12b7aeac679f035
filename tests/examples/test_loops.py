"""The loops of examples/loops run, and the swapped one's losses are the stock one's."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "examples" / "loops"
SAME = 1e-5  # of a loss, in every update: micro-batches are equal, and all is fp32

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def loops(monkeypatch):
    """Imports one of them, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(LOOPS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {"compare", *(path.stem for path in LOOPS.glob("*.py"))} - before:
        sys.modules.pop(name, None)


def marks(name):
    """Of a package that the tests can do without."""
    return pytest.mark.integrations if name == "diffusion" else ()


NAMES = [path.stem for path in sorted(LOOPS.glob("*.py")) if path.stem != "compare"]
each_loop = pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in NAMES])


@each_loop
def test_losses_are_stocks(name, loops, capsys, caplog):
    """Update by update, without a warning of ours; the losses move, and the file says how to run it."""
    if name == "diffusion":
        pytest.importorskip("accelerate")
    example = loops(name)
    assert (example.main() if hasattr(example, "main") else example.compare(example.stock, example.swapped)) == 0
    out = capsys.readouterr().out
    updates = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", out, re.MULTILINE)
    assert len(updates) >= 8
    assert max(float(difference) for *_, difference in updates) < SAME
    assert len({stock for stock, *_ in updates}) > 1
    assert re.search(r"\d+ lines go, \d+ come", out)
    assert out.count("of tensors") == 2
    assert [r.getMessage() for r in caplog.records if r.name.startswith("accumkernels")] == []
    assert f"python examples/loops/{name}.py" in example.__doc__


@each_loop
def test_docs_show_the_difference(name, loops):
    """The diff in docs/loops.md is that of the file."""
    if name == "diffusion":
        pytest.importorskip("accelerate")
    example = loops(name)
    shown = re.search(rf"<!-- loop: {name} -->\n```diff\n(.*?)\n```", (ROOT / "docs/loops.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].split("\n") == loops("compare").difference(example.stock, example.swapped)


def test_a_wrong_swap_is_seen(loops, capsys):
    """A loop that differs ends with status 1."""
    compare = loops("compare").compare

    def stock():
        """Two losses."""
        yield from (1.0, 0.5)

    def swapped():
        """Others."""
        yield from (1.0, 0.6)

    assert compare(stock, swapped) == 1
    assert "largest difference of a loss: 1.0e-01" in capsys.readouterr().out
