"""benchmarks.growing_window: its statistics, a short training, and the committed rows."""

import csv
import math

import pytest

from benchmarks import growing_window as benchmark
from tests.support.doc_blocks import ROOT


def rows(**columns):
    """Of three seeds; a list of tokens for each window."""
    return [
        {"window": name, "seed": seed, "tokens": tokens}
        for name, found in columns.items()
        for seed, tokens in enumerate(found)
    ]


def test_the_best_fixed_window_is_compared():
    """Seed by seed, by logarithms: ratios of 2, 4 and 8 have the mean 4, and t = ln 4 / (ln 2 / sqrt 3)."""
    found = rows(**{"2": [20, 40, 80], "4": [90, 90, 90], benchmark.GROWS: [10, 10, 10]})
    best, ratio, low, high, p = benchmark.compared(found, "tokens")
    assert (best, ratio) == ("2", pytest.approx(4))
    assert high / ratio == pytest.approx(ratio / low) == pytest.approx(math.exp(4.302653 * math.log(2) / math.sqrt(3)))
    assert p == pytest.approx(1 - math.sqrt(12 / 14))  # Student's t with two degrees of freedom has this in closed form


def test_training_ends_at_the_target(monkeypatch):
    """At the first look where the loss is below it, or when it has used what it may."""
    monkeypatch.setattr(benchmark, "LOOK", 16)
    row = benchmark.train(2, 0, 5.5)
    assert row["reached"] and row["loss"] <= 5.5 and row["tokens"] == row["steps"] * 8 * benchmark.CONTEXT
    monkeypatch.setattr(benchmark, "MOST", 24)
    row = benchmark.train(None, 0, 0.1)
    assert not row["reached"] and (row["tokens"], row["last_batch"]) == (24 * benchmark.CONTEXT, 8)


def test_committed_rows():
    """Why the library has no schedule that follows the noise scale: the page's figures."""
    with (ROOT / "benchmarks/results/growing_window_cpu.csv").open() as file:
        found = list(csv.DictReader(file))
    assert {row["seed"] for row in found} == {"0", "1", "2", "3", "4"} and {row["reached"] for row in found} == {"True"}
    for column in ("tokens", "seconds"):
        best, ratio, *_ = benchmark.compared(found, column)
        assert best == "2" and ratio < 1
