"""The benchmark of the usual AMP loop: what it subtracts, and that the command runs."""

import csv

import pytest
import torch

from benchmarks import autocast
from benchmarks.methods.training import SIZES, batches
from tests.benchmarks.test_benchmarks import command

CPU = torch.device("cpu")
DEFAULTS = "FusedAccumulator, defaults"


def test_gradient_side_is_what_the_floor_leaves():
    """Window less floor less optimizer, in ms; ratios to stock."""
    seconds = {m.name: [0.5] for m in autocast.METHODS} | {autocast.FLOOR: [0.3], autocast.OPTIMIZER: [0.1]}
    seconds[autocast.STOCK] = [0.9]
    seen = {DEFAULTS: {"in_16_bits": 0.9, "graphs": 1}}
    found = autocast.rows(seconds, 8, {"tokens_per_micro_batch": 32}, seen)
    by_name = {row["method"]: row for row in found}
    assert by_name[autocast.STOCK]["gradient_side_ms"] == 500
    ours = by_name[DEFAULTS]
    assert ours["gradient_side_ms"] == pytest.approx(100)
    assert (ours["stock_to_this"], ours["share_of_window"]) == (5.0, 0.2)
    assert (ours["fused"], ours["in_16_bits"], ours["graphs"]) == (None, 0.9, 1)
    assert (by_name[autocast.STOCK]["tokens_per_second"], ours["tokens_per_second"]) == (284, 512)
    assert by_name[autocast.FLOOR]["gradient_side_ms"] is None


def test_methods_train_alike():
    """All loops take the same step: the time is for the same work."""
    size = SIZES["tiny"]
    data = batches(size, 3, CPU)
    parameters = []
    for method in autocast.METHODS:
        loop = autocast.build(method, size.model, torch.bfloat16, CPU)
        assert loop.scaler.is_enabled()
        for _ in range(2):
            loop.window(data)
        parameters.append(torch.cat([p.detach().flatten() for p in loop.model.parameters()]))
    untrained = autocast.build(autocast.METHODS[0], size.model, torch.bfloat16, CPU).model
    start = torch.cat([p.detach().flatten() for p in untrained.parameters()])
    moved = (parameters[0] - start).norm()
    for other in parameters[1:]:  # bf16 gradients of loss / K differ in their last bits, which AdamW turns into signs
        assert (other - parameters[0]).norm() < 0.05 * moved


@pytest.mark.starts
def test_command(tmp_path):
    """A row per method, and those of the floor and the optimizer."""
    out = tmp_path / "autocast.csv"
    command("autocast", "--model", "tiny", "--tokens", "8", "--windows", "2", "--micro-batches", "2", "--csv", str(out))
    rows = list(csv.DictReader(out.open()))
    names = [method.name for method in autocast.METHODS]
    assert [row["method"] for row in rows] == [*names, autocast.FLOOR, autocast.OPTIMIZER]
    assert rows[0]["stock_to_this"] == "1.0"
    ours = next(row for row in rows if row["method"] == DEFAULTS)
    assert ours["fused"] == ours["in_16_bits"] == "0.0"  # so small weights are left to autograd
    assert rows[0]["in_16_bits"] == "" and ours["graphs"] == ""  # stock has no ways, and nothing is compiled
