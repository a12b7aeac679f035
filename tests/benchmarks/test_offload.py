"""benchmarks.offload runs, small, and its rows say what they should."""

import csv

import pytest

from benchmarks import offload


def test_rows(tmp_path, monkeypatch):
    """Times of each thread count; the bytes on the device are held by tests/simulated_device/test_offload.py."""
    monkeypatch.setattr(offload, "devices", list)
    file = tmp_path / "offload.csv"
    assert offload.main(["--parameters", "1048576", "--threads", "1", "--samples", "1", "--csv", str(file)]) == 0
    rows = {row["what"]: row for row in csv.DictReader(file.open())}
    assert set(rows["add"]) == set(offload.COLUMNS)
    for name, moved in (("mul_", 8), ("add", 10)):
        row = rows[name]
        rate = moved / float(row["ns_per_parameter"])
        assert float(row["GB_per_s"]) == pytest.approx(rate, rel=0.02)
    assert float(rows["mul_"]["of_mul"]) == 1
