"""The notebook runs, and the outputs that it is committed with are what its cells give."""

from __future__ import annotations

import copy
import re

import nbformat
import pytest

from tools import notebook

pytestmark = pytest.mark.starts

LARGEST = 150_000  # bytes of the file, pictures included
SAME = 0.1  # of a number: what rounding on another processor makes of 150 windows
ROUNDING = 1e-6  # relative errors below are those of fp32 sums, of whatever size
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def shown(cell):
    """What a cell shows: (texts without their numbers, the numbers, the number of pictures)."""
    outputs = cell.get("outputs", [])
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    numbers = [float(found.replace(",", "")) for found in NUMBER.findall(text)]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    return re.sub(r" +", " ", NUMBER.sub("#", text)), numbers, len(pictures)


def stale(committed, fresh):
    """Cells whose committed outputs are not those of a run."""
    wrong = []
    for index, (old, new) in enumerate(zip(committed.cells, fresh.cells, strict=True)):
        words, numbers, pictures = shown(old)
        new_words, new_numbers, new_pictures = shown(new)
        close = len(numbers) == len(new_numbers) and numbers == pytest.approx(new_numbers, rel=SAME, abs=ROUNDING)
        if words != new_words or not close or pictures != new_pictures:
            wrong.append(f"cell {index}: {shown(old)} is committed, {shown(new)} comes: python -m tools.notebook")
    return wrong


def test_outputs_are_those_of_the_cells():
    """Every cell runs, without a warning, and prints and draws what readers see on a page that shows the file."""
    committed = nbformat.read(notebook.NOTEBOOK, as_version=4)
    fresh = notebook.execute(copy.deepcopy(committed))
    assert stale(committed, fresh) == []
    assert sum(shown(cell)[2] for cell in committed.cells) == 3
    assert [
        output for cell in fresh.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ] == []
    assert notebook.NOTEBOOK.stat().st_size < LARGEST

    # The check sees an output that is of another cell, or of none.
    other = copy.deepcopy(fresh)
    printed = next(cell for cell in other.cells if cell.get("outputs"))
    printed.outputs[0].text = printed.outputs[0].text.replace("equal", "alike")
    drawn = next(cell for cell in other.cells if shown(cell)[2])
    drawn.outputs = []
    assert len(stale(committed, other)) == 2
