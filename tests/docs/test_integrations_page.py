"""docs/integrations.md: its rows are whole, and its figures are what tests hold the software to."""

from __future__ import annotations

import re

import pytest

from tests.support.doc_blocks import ROOT
from tests.support.recipes import PAGE, figure, rows
from tests.support.trainer_truth import ROUNDING
from tools import recipes

COLUMNS = 6
LARGEST = {"TRL: KTO": 1e-4}  # its KL term couples rows


def test_rows_are_whole():
    """Each has a page, a figure and what is said where something is wrong; none is silent about it."""
    found = [row[0] for row in rows()]
    assert len(found) == len(set(found)) > 0
    for row in rows():
        assert len(row) == COLUMNS
        assert all(row)
        assert re.search(r"\]\((guides|recipes)/\w+\.md(#\w+)?\)", row[2]), row[0]
        assert "silent" not in row[-1]
        assert figure(row[0]) <= LARGEST.get(row[0], 1e-5)


def test_every_recipe_has_a_row():
    """A page, tests, an extra and a row for each of what `make test-recipes` runs."""
    linked, extras = PAGE.read_text(), re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for name in recipes.names():
        tests, page = recipes.tests_of(name)
        file = page.partition("[")[2].rstrip("]")
        assert (ROOT / tests).is_file()
        assert (ROOT / file).is_file()
        assert file.removeprefix("docs/") in linked
        assert name in extras


@pytest.mark.parametrize("trainer", ["accelerate", "Lightning"])
def test_figures_of_trainers(trainer):
    """tests/integrations holds both to this."""
    assert figure(trainer) == ROUNDING["fp32"]


@pytest.mark.parametrize(
    ("software", "tests"),
    [
        ("transformers", "integrations/test_transformers.py"),
        ("sentence-transformers", "recipes/test_sentence_transformers.py"),
    ],
)
def test_figures_of_tests(software, tests):
    """Their tolerance has the name ROUNDING; what they import may not be installed."""
    (found,) = re.findall(r"^ROUNDING = (\S+)", (ROOT / "tests" / tests).read_text(), re.MULTILINE)
    assert figure(software) == float(found)
