"""The vector that ranks add up: fields come out by name as they went in, and what is not alike is seen."""

from __future__ import annotations

import pytest
import torch

from accumkernels.ranks.packing import Packer

CPU = torch.device("cpu")


def reduced(*reports):
    """What each rank has after the sum, of the fields that it adds and of those that it adds by rank."""

    def packer(rank):
        found = Packer(rank, len(reports), CPU)
        summed, by_rank = reports[rank]
        found.add(**summed)
        found.add_by_rank(**by_rank)
        return found

    vectors = []
    for rank in range(len(reports)):
        packer(rank).reduce(lambda vector: vectors.append(vector.clone()))
    total = torch.stack(vectors).sum(0)
    return [packer(rank).reduce(lambda vector: vector.copy_(total)) for rank in range(len(reports))]


def of(rank, limit=0.5):
    """A report of each kind of field: tensors, lists, numbers, bools and nothing."""
    pair = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
    summed = {"pair": pair, "touched": [rank, 1, 0], "dropped": rank == 1, "squares": None}
    return summed, {"window": 7, "rows": pair, "limit": torch.tensor(limit, dtype=torch.float64), "divisor": None}


def test_fields_come_out_by_name():
    """Summed, or with a row for each rank; the same on the host."""
    for packed in reduced(of(0), of(1), of(2)):
        assert packed["pair"].tolist() == [6, 60]
        assert packed["touched"].tolist() == [3, 3, 0]
        assert packed["dropped"].tolist() == [1]
        assert packed["squares"].tolist() == [0]
        assert packed["rows"].tolist() == [[1, 10], [2, 20], [3, 30]]
        found = packed.on_host()
        assert found["pair"] == [6, 60]
        assert found["window"] == [7, 7, 7]
        assert found["rows"] == [1, 2, 3]  # the first column
        assert found["limit"] == [0.5, 0.5, 0.5]
        assert found["divisor"] == [0, 0, 0]


@pytest.mark.parametrize("limit", [0.5, 0.25, float("nan")])
def test_what_is_not_alike_is_seen(limit):
    """In one field of several, on any rank."""
    for packed in reduced(of(0), of(1), of(2, limit)):
        assert packed.differ("window", "limit", "divisor").item() is (limit != 0.5)
        assert not packed.differ("window", "divisor")


def test_the_vector_has_the_size_of_its_fields():
    """Nothing but them goes out: here 2 + 3 + 1 + 1 numbers, and 1 + 2 + 1 + 1 for each of two ranks."""
    sizes = []
    for rank in range(2):
        packer = Packer(rank, 2, CPU)
        packer.add(**of(rank)[0])
        packer.add_by_rank(**of(rank)[1])
        packer.reduce(lambda vector: sizes.append(vector.numel()))
    assert sizes == [7 + 2 * 5] * 2
