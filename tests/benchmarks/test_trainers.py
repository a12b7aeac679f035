"""benchmarks.trainers runs, small, and its bytes are what must be alive."""

from __future__ import annotations

import csv

import pytest

from benchmarks.commands import trainers
from benchmarks.methods.training import SIZES

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

TINY = "--model tiny --windows 3 --runs 1 --micro-batches 2 --threads 1".split()


@pytest.mark.parametrize("name", list(trainers.TRAINERS))
def test_a_row_per_method(name, tmp_path):
    """With versions, speed, and peaks between what must be and what can be alive."""
    pytest.importorskip(name)
    trainers.reset()  # what other tests set for accelerate's singletons
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--trainers", name, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["method"] for row in rows] == list(trainers.OPTIONS)
    assert {row["ranks"] for row in rows} == {"1"}
    fp32 = 4 * sum(p.numel() for p in trainers.Model(SIZES["tiny"]).parameters()) / 1e6
    without, fused, released = (float(row["peak_gradient_MB"]) for row in rows)
    assert without == pytest.approx(fp32, rel=0.01)
    assert fp32 < released <= fused * 1.01
    assert fused < 1.9 * fp32  # a flat buffer, with alignment, and gradients, most of them in 16 bit
    for row in rows:
        assert float(row["samples_per_second"]) > 0
        assert row["trainer_version"] and row["torch"] and row["commit"] and row["date"]
        assert int(row["runs"]) == 2


@pytest.mark.parametrize("name", list(trainers.TRAINERS))
def test_two_ranks(name, tmp_path):
    """The same rows, of both ranks' samples; the gradient bytes are those of a rank."""
    pytest.importorskip(name)
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--ranks", "2", "--trainers", name, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [(row["method"], row["ranks"]) for row in rows] == [(name, "2") for name in trainers.OPTIONS]
    fp32 = 4 * sum(p.numel() for p in trainers.Model(SIZES["tiny"]).parameters()) / 1e6
    for row in rows:
        # Sums, and the fp32 gradients of a micro-batch: so small a model is left to autocast.
        assert fp32 <= float(row["peak_gradient_MB"]) * 1.01 < 2.05 * fp32
        seconds = float(row["ms_median"]) / 1e3
        assert float(row["samples_per_second"]) == pytest.approx(2 * 2 * SIZES["tiny"].samples / seconds, rel=1e-3)


def test_a_trainer_that_is_not_installed(tmp_path, monkeypatch):
    """A row that says so."""
    monkeypatch.setattr(trainers, "version", lambda package: "")
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--csv", str(file)]) == 0
    assert [row["unavailable"] for row in csv.DictReader(file.open())] == ["not installed"] * 3
