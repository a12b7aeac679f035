"""benchmarks.ranks --simulate: what a rank sends, whatever the number of ranks that do not exist."""

from __future__ import annotations

import pytest

from benchmarks.harness.results import read_csv
from benchmarks.methods import simulated
from benchmarks.methods.simulated import ALL_GATHER, ALL_REDUCE, BROADCAST, MICRO_BATCHES, OURS, REDUCE_SCATTER
from benchmarks.pictures import draw
from benchmarks.ranks import main

FIRST, LAST, END = MICRO_BATCHES
AGREEMENT = 8 * 46  # bytes of a settled window's vector
WINDOWS = 1


def sent(ranks, name, micro_batches=3):
    """What it sends in a settled window, by part, kind and content."""
    found = simulated.simulate(ranks, name, micro_batches, WINDOWS).sent
    return {(s.when, s.kind, s.holds): (s.count, s.nbytes) for s in found}


@pytest.mark.parametrize("ranks", [2, 64, 1024, 16384])
def test_a_window_of_any_number_of_ranks(ranks):
    """The sums while the last backward runs, and one vector, of the same size for any number of ranks."""
    found = sent(ranks, OURS)
    (count, nbytes) = found.pop((LAST, ALL_REDUCE, "gradients"))
    assert found == {(END, ALL_REDUCE, "agreement"): (1, AGREEMENT)}
    assert count == 4  # pieces of a small buffer
    parameters = simulated.parameters_of(simulated.model())
    assert 4 * parameters <= nbytes < 4.01 * parameters  # with the padding between segments


def test_building_an_accumulator():
    """As many collectives of the same sizes for any number of ranks: a digest, the parameters, a group of its own."""
    parameters = 4 * simulated.parameters_of(simulated.model())
    alike, own = [(ALL_REDUCE, 16), (BROADCAST, parameters)], [(ALL_REDUCE, 64), (ALL_REDUCE, 4)]
    for ranks in (2, 64, 16384):
        assert simulated.construction(ranks) == alike + own
        assert simulated.construction(ranks, release="microbatch") == alike


def test_peers():
    """Stock sends its gradients once; FSDP2 gathers and reduces in every micro-batch, ours over it agrees once more."""
    parameters = 4 * simulated.parameters_of(simulated.model())
    assert sent(1024, "DDP, no_sync") == {(LAST, ALL_REDUCE, "gradients"): (2, parameters)}
    stock, ours = sent(64, "FSDP2"), sent(64, "FusedAccumulator, FSDP2")
    assert {(when, kind) for when, kind, _ in stock} == {
        (when, kind) for when in (FIRST, LAST) for kind in (ALL_GATHER, REDUCE_SCATTER)
    }
    agreement = ours.pop((END, ALL_REDUCE, "agreement"))
    assert ours == stock
    assert agreement == sent(2, "FusedAccumulator, FSDP2")[END, ALL_REDUCE, "agreement"]


@pytest.mark.native
def test_command(tmp_path):
    """It writes what the picture is drawn from."""
    path = tmp_path / "found.csv"
    assert main(["--simulate", "--ranks", "2,128", "--micro-batches", "2", "--windows", "1", "--csv", str(path)]) == 0
    rows = read_csv(path)
    assert {row["method"] for row in rows} == {*simulated.RECORDED, simulated.MEGATRON}
    assert {row["source"] for row in rows} == {"recorded", "recorded on 64", "documentation"}
    assert all(float(row["link_ms_1e9"]) >= float(row["link_ms"]) > 0 for row in rows)
    (picture,) = draw(path, tmp_path)
    assert picture.stat().st_size > 1000
