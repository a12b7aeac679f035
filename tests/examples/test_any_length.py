"""The example with texts of any length runs, small, and what it prints is so."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_planning import load

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 1e-4  # of the way that the parameters go; measured 1e-6


def test_any_length(tmp_path, capsys):
    """The size for usual lengths dies, backward_batch ends where the whole window does; and a small picture."""
    picture = tmp_path / "any_length.png"
    example = load("any_length")
    example.LONGEST = 256
    sizes = ["--windows", "2", "--limit", "16", "--usual", "24", "--longest", "4"]
    assert example.main([*sizes, "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^micro-batches of 24 +[01]/2 .* died: out of the memory limit", printed, re.MULTILINE)
    (ours,) = re.findall(r"^backward_batch +2/2 .* (\S+) of the way", printed, re.MULTILINE)
    assert float(ours) < ROUNDING
    assert "micro-batches of backward_batch: cost" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 60_000
    assert "python examples/any_length.py" in example.__doc__
