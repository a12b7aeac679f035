"""python -m benchmarks.fits: bytes by kind are those of the model, and README's picture is drawn from the file."""

import pytest
import torch

from benchmarks import fits, pictures
from benchmarks.harness.results import read_csv
from tests.support.doc_blocks import ROOT


def test_rows(tmp_path, capsys):
    """Weights and sums take 4 bytes per parameter, or are on the host; activations grow with the texts of a forward."""
    path = tmp_path / "fits.csv"
    assert fits.main(["--model", "tiny", "--csv", str(path)]) == 0
    assert "PREDICTED" in capsys.readouterr().out
    whole, half, ours, offloaded = rows = read_csv(path)
    fp32 = 4 * int(whole["parameters"]) / 1e9
    for row in rows:
        assert row["origin"] == "predicted"
        assert float(row["parameters_GB"]) == pytest.approx(fp32, abs=1e-3)
        assert float(row["total_GB"]) == pytest.approx(sum(float(row[f"{part}_GB"]) for part in fits.PARTS), abs=4e-3)
    assert float(whole["activations_GB"]) == pytest.approx(2 * float(half["activations_GB"]), rel=0.05)
    assert float(ours["total_GB"]) < float(half["total_GB"]) < float(whole["total_GB"])
    assert float(ours["accumulators_GB"]) == pytest.approx(fp32, abs=1e-3)
    assert float(offloaded["accumulators_GB"]) == float(offloaded["optimizer_GB"]) == 0
    drawn = pictures.draw(path, tmp_path)
    assert [file.name for file in drawn] == ["fits-light.png", "fits-dark.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)


def test_committed_rows():
    """README's model: the batch does not fit the card, half of it does, and so does the batch in micro-batches."""
    rows = read_csv(ROOT / "benchmarks/results/fits_predicted.csv")
    assert [row["way"] for row in rows] == [way.name for way in fits.WAYS]
    assert [float(row["total_GB"]) > float(row["limit_GB"]) for row in rows] == [True, *[False] * (len(rows) - 1)]
    with torch.device("meta"):
        size = fits.SIZES["gpt2"]
        model = fits.Logits(size.vocabulary, size.width, size.depth, size.heads, fits.LENGTH)
    assert {int(row["parameters"]) for row in rows} == {sum(p.numel() for p in model.parameters())}
