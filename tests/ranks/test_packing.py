"""The vector that ranks add up: fields come out by name as they went in, and what is not alike is seen."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from accumkernels.ranks.packing import Packer, different_limits, listed

CPU = torch.device("cpu")


def summed(groups):
    """What a rank has after the sum, where each of `groups` is how many ranks add which fields and values."""
    size = sum(count for count, *_ in groups)
    vectors = []

    def packer(fields, alike):
        found = Packer(0, size, CPU)
        found.add(**fields)
        found.add_alike(**alike)
        return found

    for count, fields, alike in groups:
        packer(fields, alike).reduce(lambda vector, count=count: vectors.append(vector * count))
    return packer(*groups[0][1:]).reduce(lambda vector: vector.copy_(torch.stack(vectors).sum(0)))


def of(rank, limit=0.5):
    """A report of each kind of field: tensors, lists, numbers, bools and nothing."""
    pair = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
    fields = {"pair": pair, "touched": [rank, 1, 0], "dropped": rank == 1, "squares": None}
    return 1, fields, {"window": 7, "limit": torch.tensor(limit, dtype=torch.float64), "divisor": None}


def test_fields_come_out_by_name():
    """Summed; the same on the host."""
    packed = summed([of(0), of(1), of(2)])
    assert packed["pair"].tolist() == [6, 60]
    assert packed["touched"].tolist() == [3, 3, 0]
    assert packed["dropped"].tolist() == [1]
    assert packed["squares"].tolist() == [0]
    sums, differs = packed.on_host()
    assert sums["pair"] == [6, 60]
    assert sums["touched"] == [3, 3, 0]
    assert not differs


@pytest.mark.parametrize("limit", [0.5, 0.25, float("nan")])
def test_what_is_not_alike_is_seen(limit):
    """In one value of several, on any rank."""
    packed = summed([of(0), of(1), of(2, limit)])
    assert packed.differ("window", "limit", "divisor").item() is (limit != 0.5)
    assert packed.differ().item() is (limit != 0.5)
    assert not packed.differ("window", "divisor")
    assert packed.on_host().differs == (["limit"] if limit != 0.5 else [])


def _bits(number):
    return struct.unpack("<d", struct.pack("<Q", number))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 1024, 16384, 200_000])
def test_one_bit_on_one_rank_of_many(size):
    """Any bit of any float, whatever the others are; and all ranks alike never differ."""
    chosen = random.Random(size)
    for bit in range(64):
        value = chosen.getrandbits(64)
        mine, other = _bits(value), _bits(value ^ (1 << bit))
        assert not summed([(size, {}, {"a": mine})]).differ()
        if size > 1:
            packed = summed([(size - 1, {}, {"a": mine, "b": 1.0}), (1, {}, {"a": other, "b": 1.0})])
            assert packed.differ("a") and not packed.differ("b")


@pytest.mark.parametrize("bits", [0x7FFF7FFF7FFF7FFF, 0x8000800080008000, 0x400921FB54442D18])
def test_the_largest_parts_are_alike(bits):
    """Rounding finds no difference where there is none, for as many ranks as promised."""
    for size in (*range(1, 50), 16384, 199_999, 200_000):
        assert not summed([(size, {}, {"a": _bits(bits)})]).differ()
        if size > 1:
            assert summed([(size - 1, {}, {"a": _bits(bits)}), (1, {}, {"a": _bits(bits ^ 1)})]).differ()


def test_signs_of_zero_are_alike():
    """And numbers are what tensors with the same value are."""
    packed = summed([(1, {}, {"a": 0.0, "b": 3}), (1, {}, {"a": -0.0, "b": torch.tensor(3.0, dtype=torch.float64)})])
    assert not packed.differ()


def test_a_device_compares_as_the_host():
    """The bits of a tensor that the host may not read are taken by ops."""
    value = torch.tensor(0.1, dtype=torch.float64)
    vectors = []
    packer = Packer(0, 1, CPU)
    packer.add_alike(limit=value)
    packer.reduce(lambda vector: vectors.append(vector.clone()))
    packer = Packer(0, 1, CPU)
    packer._alike["limit"] = value + 0.0
    packer.reduce(lambda vector: vectors.append(vector.clone()))
    assert torch.equal(*vectors)


def test_the_vector_has_the_size_of_its_fields():
    """Whatever the number of ranks: here 1 + 2 + 3 + 1 + 1 numbers, and 5 for each of three that are compared."""
    for size in (2, 16384):
        sizes = []
        packer = Packer(0, size, CPU)
        packer.add(**of(0)[1])
        packer.add_alike(**of(0)[2])
        packer.reduce(lambda vector, sizes=sizes: sizes.append(vector.numel()))
        assert sizes == [8 + 5 * 3]


def test_ranks_are_asked_only_if_all_look():
    """Those that do not would not take part; then each says what it has."""
    for looks in (True, False):
        packers = [Packer(rank, 2, CPU, looks or rank == 0) for rank in range(2)]
        vectors = []
        for rank, packer in enumerate(packers):
            packer.add_alike(window=7 + rank)
            packer.reduce(lambda vector, vectors=vectors: vectors.append(vector.clone()))
        tables = []

        def sum_(tensor, vectors=vectors, tables=tables):
            if tensor.dim() == 1:
                tensor.copy_(vectors[0] + vectors[1])
            else:
                tables.append(tensor.clone())
                tensor[:, 1] = 8.0

        packer = Packer(0, 2, CPU)
        packer.add_alike(window=7)
        packed = packer.reduce(sum_)
        text = packed.explain(packed.on_host().differs, lambda found: f"by rank {listed(found['window'])}")
        if looks:
            assert text == "by rank [7.0, 8.0]"
            assert tables[0].tolist() == [[7.0, 0.0]]
        else:
            assert "rank 0 has window=7.0" in text
            assert not tables


def test_values_of_many_ranks_are_counted():
    """A message names who differs, and not sixteen thousand ranks."""
    assert listed([1.5, 2.0]) == "[1.5, 2.0]"
    values = [5] * 16384
    values[77] = 6
    assert listed(values) == "5 on 16383 ranks (the first is 0), 6 on rank 77"
    assert listed(range(16384)).endswith("15 on rank 15 and 16368 more values")
    text = different_limits([1.0] * 16384, [1.0] * 16383 + [2.0])
    assert text.endswith("by rank it is 1.0 on 16383 ranks (the first is 0), 2.0 on rank 16383")
