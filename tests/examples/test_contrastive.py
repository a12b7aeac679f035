"""The contrastive example runs, small, and what it prints is so."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_planning import load

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 1e-4  # of the way that the parameters go; measured 3e-7


def test_contrastive(tmp_path, capsys):
    """backward_coupled ends where the whole batch does, plain accumulation elsewhere; and a small picture."""
    picture = tmp_path / "contrastive.png"
    example = load("contrastive")
    sizes = ["--windows", "8", "--batch-size", "32", "--chunk-size", "8"]
    assert example.main([*sizes, "--out", str(picture)]) == 0
    whole, plain, coupled = (float(d) for d in re.findall(r"(\S+) of the way", capsys.readouterr().out))
    assert whole == 0
    assert plain > 0.05
    assert coupled < ROUNDING
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 60_000
    assert "python examples/contrastive.py" in example.__doc__
