"""python -m benchmarks.whole_batch: every method trains on the same texts, and memory is as small as it says."""

import pytest
import torch

from benchmarks import whole_batch
from benchmarks.harness.results import read_csv


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Windows of 8 short texts, and a model that takes no time."""
    for name, value in {"LONGEST": 64, "WINDOW": 8, "CAPACITY": 128, "WIDTH": 32, "DEPTH": 1, "WARM_UP": 1}.items():
        monkeypatch.setattr(whole_batch, name, value)
    monkeypatch.setattr(whole_batch.Halved, "size", 8)
    monkeypatch.setattr(whole_batch.Budget, "options", {"budget": 128, "cost": whole_batch.padded_length})


@pytest.mark.native
def test_a_row_for_every_method(tmp_path, capsys):
    """Those that do not know the capacity run out of memory; no micro-batch that counts is beyond it."""
    path = tmp_path / "whole_batch.csv"
    assert whole_batch.main(["--windows", "2", "--threads", "1", "--csv", str(path)]) == 0
    rows = {row["method"]: row for row in read_csv(path)}
    assert list(rows) == list(whole_batch.METHODS)
    assert float(rows["fixed"]["to_fixed"]) == 1
    assert [int(rows[name]["tries_out_of_memory"]) for name in ("fixed", "budget", "by hand")] == [0, 0, 0]
    assert all(int(rows[name]["tries_out_of_memory"]) > 0 for name in ("halved", "auto"))
    assert rows["budget"]["micro_batches"] == rows["by hand"]["micro_batches"]
    assert "8 texts of up to 64 bytes" in capsys.readouterr().out


def test_methods_train_the_same():
    """Different micro-batches of the same texts: the same mean over bytes, up to rounding."""
    (texts,) = whole_batch.windows_of(1)
    found = []
    for make in whole_batch.METHODS.values():
        method = make()
        method.prepare(texts)
        method.accumulate(texts)
        method.acc.finalize(method.optimizer)
        found.append(torch.cat([p.grad.flatten() for p in method.model.parameters()]).clone())
        method.acc.remove()
    for grad in found[1:]:
        assert (grad - found[0]).norm() < 1e-5 * found[0].norm()
