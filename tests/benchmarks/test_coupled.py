"""python -m benchmarks.coupled: what is alive is put where it belongs, and chunks bound it."""

import pytest
import torch
from torch import nn

from benchmarks.coupled import COUPLED, ENCODING, PLAIN, WHOLE, Towers, main, peaks
from benchmarks.harness.results import read_csv

CPU = torch.device("cpu")
WIDTH, DEPTH, PAIRS, CHUNK = 40, 2, 24, 4


def activations(method, pairs=PAIRS, chunk=CHUNK):
    """Bytes, at their peak."""
    torch.manual_seed(0)
    return peaks(method, pairs, chunk, CPU, Towers(WIDTH, DEPTH))[0]


def saved(rows):
    """Bytes that the towers keep for backward, beside inputs and weights, as autograd itself counts them."""
    towers, found = Towers(WIDTH, DEPTH), {}
    batch = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    held = {tensor.untyped_storage()._cdata for tensor in (*batch, *towers.parameters())}

    def pack(tensor):
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, nn.Identity()):
        encodings = towers.encode(batch)
    assert all(e.requires_grad for e in encodings)
    return sum(nbytes for key, nbytes in found.items() if key not in held)


@pytest.mark.native
def test_activations_are_those_of_a_chunk():
    """The whole batch keeps at least what autograd saves for it; chunks a chunk's, and what the loss needs of all."""
    of_all, of_chunk = saved(PAIRS), saved(CHUNK)
    assert of_all > 4 * of_chunk
    assert activations(WHOLE) >= of_all
    encodings, similarities = 2 * PAIRS * ENCODING * 4, PAIRS * PAIRS * 4
    assert of_chunk <= activations(COUPLED) <= activations(PLAIN) + 3 * encodings + 8 * similarities
    assert activations(PLAIN) < 0.5 * activations(WHOLE)


@pytest.mark.native
def test_a_row_for_every_method(tmp_path, capsys):
    """The whole batch first, as the ratio's base."""
    path = tmp_path / "coupled.csv"
    assert main(["--pairs", "12", "--chunks", "4,6", "--csv", str(path)]) == 0
    rows = read_csv(path)
    assert [(row["method"], row["chunk"]) for row in rows] == [
        (WHOLE, "12"),
        *((method, chunk) for chunk in ("4", "6") for method in (PLAIN, COUPLED)),
    ]
    assert float(rows[0]["activations_to_whole"]) == 1
    assert all(0 < float(row["activations_peak_MB"]) < float(row["peak_MB"]) for row in rows)
    assert "InfoNCE, 12 pairs" in capsys.readouterr().out
