"""docs/comparison.md: each cell of its first table has a source, and README shows a part of that table."""

from __future__ import annotations

import re

import pytest

from tests.support.doc_blocks import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text()


def tables(text):
    """Every table of a page, as rows of cells."""
    found = re.findall(r"^\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|\n?)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()] for table in found]


def sections(text):
    """What stands below each heading of the second level."""
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


HEADER, _, *ROWS = tables(PAGE)[0]
PEERS = HEADER[1:]
SECTIONS = {heading.lower(): text for heading, text in sections(PAGE).items()}


def test_first_table():
    """The first column is ours, every row has a cell for everybody, and a cell is short enough for README."""
    assert PEERS[0] == "accumkernels"
    assert {len(row) for row in ROWS} == {len(HEADER)}
    assert [cell for row in ROWS for cell in row[1:] if not 1 <= len(cell.split()) <= 3] == []
    assert list(SECTIONS) == [peer.lower() for peer in PEERS]


@pytest.mark.parametrize("column", range(len(PEERS)), ids=PEERS)
def test_every_cell_has_its_source(column):
    """A peer's section repeats its cells, in order: each with a source, of ours a link to our pages."""
    items = re.findall(r"^\* \*\*(.+?): (.+?)\.\*\* (.+(?:\n  .+)*)", SECTIONS[PEERS[column].lower()], re.MULTILINE)
    assert [(label.lower(), cell) for label, cell, _ in items] == [(row[0].lower(), row[1 + column]) for row in ROWS]
    source = r"\]\([\w/]+\.md" if column == 0 else r"\*Source:\s"
    assert [label for label, _, words in items if not re.search(source, words)] == []


def test_table_of_readme():
    """At most four of us, in at most six questions, to the letter; one of which others answer better."""
    (header, _, *rows) = next(t for t in tables((ROOT / "README.md").read_text()) if "accumkernels" in t[0])
    assert len(header) <= 5
    assert len(rows) <= 6
    columns = [HEADER.index(name) for name in header[1:]]
    full = {row[0]: row for row in ROWS}
    assert rows == [[row[0], *(full[row[0]][column] for column in columns)] for row in rows]
    assert [row[0] for row in rows if row[1] != "yes" and "yes" in row[2:]] != []
