"""The benchmark of the usual AMP loop: what it subtracts, and that the command runs."""

import csv

import pytest
import torch

from benchmarks import autocast
from benchmarks.methods.training import SIZES, batches
from tests.benchmarks.test_benchmarks import command

CPU = torch.device("cpu")


def test_gradient_side_is_what_the_floor_leaves():
    """Window less floor less optimizer, in ms; ratios to stock; the route's own cost as a share of its window."""
    seconds = {m.name: [0.5] for m in autocast.METHODS} | {autocast.FLOOR: [0.3], autocast.OPTIMIZER: [0.1]}
    seconds[autocast.STOCK] = [0.9]
    seen = {"FusedAccumulator, autocast route": {"routed": 0.9, "graphs": 1}}
    found = autocast.rows(seconds, {False: [0.001], True: [0.002]}, 8, {"tokens_per_micro_batch": 32}, seen)
    by_name = {row["method"]: row for row in found}
    assert by_name[autocast.STOCK]["gradient_side_ms"] == 500
    ours = by_name["FusedAccumulator, autocast route"]
    assert ours["gradient_side_ms"] == pytest.approx(100)
    assert (ours["stock_to_this"], ours["share_of_window"]) == (5.0, 0.2)
    assert (ours["fused"], ours["routed"], ours["graphs"]) == (None, 0.9, 1)
    assert (by_name[autocast.STOCK]["tokens_per_second"], ours["tokens_per_second"]) == (284, 512)
    assert by_name[autocast.FLOOR]["gradient_side_ms"] is None
    assert by_name["with the route"]["share_of_window"] == pytest.approx(8 * 0.001 / 0.5)


def test_methods_train_alike():
    """All loops take the same step: the time is for the same work."""
    size = SIZES["tiny"]
    data = batches(size, 3, CPU)
    parameters = []
    for method in autocast.METHODS:
        loop = autocast.build(method, size, torch.bfloat16, CPU)
        assert loop.scaler.is_enabled()
        for _ in range(2):
            loop.window(data)
        parameters.append(torch.cat([p.detach().flatten() for p in loop.model.parameters()]))
    untrained = autocast.build(autocast.METHODS[0], size, torch.bfloat16, CPU).model
    start = torch.cat([p.detach().flatten() for p in untrained.parameters()])
    moved = (parameters[0] - start).norm()
    for other in parameters[1:]:  # bf16 gradients of loss / K differ in their last bits, which AdamW turns into signs
        assert (other - parameters[0]).norm() < 0.05 * moved
    assert torch.equal(parameters[1], parameters[2])  # the route changes no bit
    # In buckets the two parts of the tied embedding's gradient are added one by one: no exact bits there.


@pytest.mark.starts
def test_command(tmp_path):
    """A row per method, floor and optimizer, and two of the forward."""
    out = tmp_path / "autocast.csv"
    command("autocast", "--model", "tiny", "--tokens", "8", "--windows", "2", "--micro-batches", "2", "--csv", str(out))
    rows = list(csv.DictReader(out.open()))
    assert [row["table"] for row in rows] == ["window"] * (len(autocast.METHODS) + 2) + ["forward"] * 2
    assert rows[0]["stock_to_this"] == "1.0"
    ours = next(row for row in rows if row["method"] == "FusedAccumulator, autocast route")
    assert ours["fused"] == ours["routed"] == "0.0"  # so small modules are left to autocast
    assert rows[0]["routed"] == "" and ours["graphs"] == ""  # stock has no ways, and nothing is compiled
