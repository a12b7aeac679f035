"""benchmarks.verdict runs, small, and holds predictions and verdicts to the times that it is given."""

from __future__ import annotations

import csv

import pytest

import accumkernels as ak
from benchmarks import verdict
from benchmarks.methods.verdict import CASES

NAME = "MLP, 4 samples, AdamW"


@pytest.mark.starts
def test_rows(tmp_path):
    """A row per K, powers of two and the verdict's, from a process of its own."""
    file = tmp_path / "verdict.csv"
    number = str(1 + list(CASES).index(NAME))
    assert verdict.main(["--cases", number, "--duration", "0.01", "--csv", str(file)]) in (0, 1)  # by the times
    rows = list(csv.DictReader(file.open()))
    assert set(rows[0]) == set(verdict.COLUMNS)
    assert {1, 2, 4, 8, 16} <= {int(row["micro_batches"]) for row in rows}
    for row in rows:
        assert row["case"] == NAME
        predicted, measured = float(row["us_per_sample_predicted"]), float(row["us_per_sample"])
        assert measured > 0
        assert float(row["error"]) == pytest.approx(predicted / measured - 1, abs=2e-3)
        assert row["verdict"].startswith("K ") and row["torch"] and row["date"]


@pytest.mark.parametrize(
    ("seconds", "right"),
    [
        ({1: 10e-3, 2: 7e-3, 4: 5.5e-3}, True),
        ({1: 10e-3, 2: 9e-3, 4: 9.5e-3}, True),
        ({1: 5e-3, 2: 6e-3, 4: 5.6e-3}, False),
    ],
)
def test_verdicts_are_held_to_times(seconds, right):
    """Within 10 % of the fastest K by the clock, whatever was predicted."""
    case = CASES[NAME]._replace(micro_batch=8, target=32)
    plan = ak.plan(32, 8, samples_per_second=100.0, optimizer_seconds=0.06)
    assert plan.verdict == "K = 4 for the batch 32"
    rows = verdict.rows("a case", case, verdict.Measured(plan, seconds, 7), {})
    assert [row["right"] for row in rows] == [right] * 3
    assert rows[0]["us_per_sample_predicted"] == 10_000
    assert rows[0]["error"] == pytest.approx(10e-3 / seconds[1] - 1, abs=1e-3)
    noisy = verdict.rows("a case", case._replace(noise_scale=8.0), verdict.Measured(plan, seconds, 7), {})
    assert [row["time_to_loss"] for row in noisy] == pytest.approx(
        [seconds[k] * (1 + k) / (2 * seconds[1]) for k in seconds], abs=1e-3
    )
