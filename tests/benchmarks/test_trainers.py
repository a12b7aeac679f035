"""benchmarks.trainers runs, small, and its bytes are what must be alive."""

from __future__ import annotations

import csv

import pytest

from accumkernels.buffers.flat import ALIGNMENT_BYTES
from benchmarks import trainers
from benchmarks.methods.training import SIZES

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

TINY = "--model tiny --windows 3 --micro-batches 2 --threads 1".split()


def megabytes():
    """Per method the gradient bytes that a window's arithmetic gives, as the rows round them.

    Alone a trainer has the fp32 `.grad`s. With an accumulator there are the sums, and one micro-batch's gradients: all
    of them, since so small a model is less than a bucket, and in fp32, since its weights are too small to be worth a
    hook on their casts.
    """
    model = trainers.Model(SIZES["tiny"])
    assert not any(4 * p.numel() % ALIGNMENT_BYTES for p in model.parameters())  # nothing is padded
    fp32 = 4 * sum(p.numel() for p in model.parameters())
    return [float(f"{nbytes / 1e6:.4g}") for nbytes in (fp32, 2 * fp32, 2 * fp32)]


@pytest.mark.starts
@pytest.mark.parametrize("name", list(trainers.TRAINERS))
def test_a_row_per_method(name, tmp_path):
    """With versions, speed, and the bytes that must be alive."""
    pytest.importorskip(name)
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--trainers", name, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["method"] for row in rows] == list(trainers.OPTIONS)
    assert {row["ranks"] for row in rows} == {"1"}
    assert [float(row["peak_gradient_MB"]) for row in rows] == megabytes()
    for row in rows:
        assert float(row["samples_per_second"]) > 0
        assert row["trainer_version"] and row["torch"] and row["commit"] and row["date"]
        assert int(row["windows"]) == 2


@pytest.mark.starts
@pytest.mark.parametrize("name", ["lightning"])  # the others differ from it as on one rank
def test_two_ranks(name, tmp_path):
    """The same rows, of both ranks' samples; the gradient bytes are those of a rank."""
    pytest.importorskip(name)
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--ranks", "2", "--trainers", name, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [(row["method"], row["ranks"]) for row in rows] == [(name, "2") for name in trainers.OPTIONS]
    assert [float(row["peak_gradient_MB"]) for row in rows] == megabytes()
    for row in rows:
        seconds = float(row["ms_median"]) / 1e3
        assert float(row["samples_per_second"]) == pytest.approx(2 * 2 * SIZES["tiny"].samples / seconds, rel=1e-3)


def test_windows_of_several_processes(tmp_path, monkeypatch):
    """Count together: medians and ratios are over all of them."""
    runs = iter([(1.0, 2.0), (3.0, 4.0), (5.0, 10.0)])

    def measure(*_):
        without, ours = next(runs)
        return {name: trainers.Measured([without if name == "without" else ours] * 2, 7) for name in trainers.OPTIONS}

    monkeypatch.setattr(trainers, "measure", measure)
    monkeypatch.setattr(trainers, "version", lambda package: "1.0")
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--trainers", "accelerate", "--processes", "3", "--csv", str(file)]) == 0
    without, ours, _ = csv.DictReader(file.open())
    assert (without["ms_median"], ours["ms_median"]) == ("3000.0", "4000.0")
    assert ours["speed_to_without"] == "0.5"
    assert (ours["windows"], ours["processes"]) == ("6", "3")


def test_a_trainer_that_is_not_installed(tmp_path, monkeypatch):
    """A row that says so."""
    monkeypatch.setattr(trainers, "version", lambda package: "")
    file = tmp_path / "trainers.csv"
    assert trainers.main([*TINY, "--csv", str(file)]) == 0
    assert [row["unavailable"] for row in csv.DictReader(file.open())] == ["not installed"] * 3


def test_measured_in_pieces(tmp_path, monkeypatch):
    """With --keep the file has the rows of all pieces, and of one that is measured again the new."""
    monkeypatch.setattr(trainers, "version", lambda package: "")
    file = tmp_path / "trainers.csv"
    pieces = [("accelerate", "1"), ("lightning", "1"), ("lightning", "2"), ("accelerate", "1")]
    for name, ranks in pieces:
        assert trainers.main([*TINY, "--trainers", name, "--ranks", ranks, "--csv", str(file), "--keep"]) == 0
    rows = [(row["trainer"], row["ranks"], row["unavailable"]) for row in csv.DictReader(file.open())]
    assert rows == [(name, ranks, "not installed") for name, ranks in pieces[1:]]
    assert trainers.main([*TINY, "--trainers", "accelerate", "--csv", str(file)]) == 0
    assert len(list(csv.DictReader(file.open()))) == 1
