"""The vector that ranks add up: fields come out by name as they went in, and what is not alike is seen."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from accumkernels.ranks.agreement import ANY, SAME_CLIPPING, SUM, Agreement, Alike, Never, _parts, listed

CPU = torch.device("cpu")


class Group:
    """Ranks whose vectors `sum_` adds up."""

    def __init__(self, sum_, rank=0, size=1):
        self.rank, self.size, self.sum = rank, size, sum_


def alike(*names):
    """A table of values to compare, whose errors are the values by rank."""
    return {name: Alike("by rank {}") for name in names}


def summed(table, groups):
    """What a rank has after the sum, where each of `groups` is how many ranks add which values."""
    size = sum(count for count, _ in groups)
    vectors = []
    for count, values in groups:
        Agreement(table, values, Group(lambda vector, count=count: vectors.append(vector * count), 0, size), CPU)
    return Agreement(table, groups[0][1], Group(lambda v: v.copy_(torch.stack(vectors).sum(0)), 0, size), CPU)


TABLE = {"pair": SUM, "touched": SUM, "dropped": ANY, "squares": SUM, **alike("window", "limit", "divisor")}


def of(rank, limit=0.5):
    """A report of each kind of field: tensors, lists, numbers, bools and nothing."""
    pair = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
    fields = {"pair": pair, "touched": [rank, 1, 0], "dropped": rank == 1, "squares": None}
    return 1, {**fields, "window": 7, "limit": torch.tensor(limit, dtype=torch.float64), "divisor": None}


def test_fields_come_out_by_name():
    """Summed, or whether any rank has set them; the same on the host."""
    found = summed(TABLE, [of(0), of(1), of(2)])
    assert found["pair"].tolist() == [6, 60]
    assert found["touched"].tolist() == [3, 3, 0]
    assert found["dropped"].item() is True
    assert found["squares"].tolist() == [0]
    assert found.sums["pair"] == [6, 60]
    assert found.sums["touched"] == [3, 3, 0]
    assert found.sums["dropped"] == [1]
    assert not found.wrong()


def test_flags_of_any_rank():
    """Those of the state, which are 1 however many ranks have them, or if anything is wrong; nothing else changes."""
    table = {"state": SUM}
    states = [torch.tensor(state, dtype=torch.float64) for state in ([1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0])]
    found = summed(table, [(1, {"state": state}) for state in states])
    assert found.flagged(found["state"], torch.tensor(False)).tolist() == [3, 0, 3, 1]
    assert found.flagged(found["state"], torch.tensor(True)).tolist() == [3, 1, 3, 1]
    assert found["state"].tolist() == [3, 0, 3, 2]


@pytest.mark.parametrize("limit", [0.5, 0.25, float("nan")])
def test_what_is_not_alike_is_seen(limit):
    """In one value of several, on any rank."""
    found = summed(TABLE, [of(0), of(1), of(2, limit)])
    assert found.is_wrong().item() is (limit != 0.5)
    assert found.wrong() == (["limit"] if limit != 0.5 else [])


@pytest.mark.parametrize("nothing", [False, True])
@pytest.mark.parametrize("any_sets", [False, True])
def test_what_may_differ(nothing, any_sets):
    """In a window that comes to nothing, or while no rank has set a flag; the device and the host conclude the same."""
    table = {
        "after": ANY,
        "window": Alike("{}"),
        "divisor": Alike("{}", if_counted=True),
        "weight": Alike("{}", if_any="after"),
    }
    for name, is_wrong in (("window", True), ("divisor", not nothing), ("weight", any_sets)):
        same = dict.fromkeys(table, 1.0)
        found = summed(table, [(1, {**same, "after": False}), (1, {**same, "after": any_sets, name: 2.0})])
        assert found.is_wrong(torch.tensor(nothing)).item() is is_wrong
        assert found.wrong(nothing) == [name] * is_wrong


@pytest.mark.parametrize("window", [7, 8])
def test_a_flag_that_no_rank_may_set(window):
    """Is wrong on the device and for the host, whatever the window comes to; the table says what is said first."""
    table = {"window": Alike("windows {}", int), "error": Never("elsewhere"), "limit": Alike("limits {}")}
    same = {"window": 7, "error": False, "limit": 1.0}
    assert not summed(table, [(1, same), (1, same)]).is_wrong()
    found = summed(table, [(1, same), (1, {"window": window, "error": True, "limit": 2.0})])
    assert found.is_wrong(torch.tensor(True))
    assert found.wrong(nothing=True) == ["window"] * (window != 7) + ["error", "limit"]
    if window == 7:
        assert found.error() == "elsewhere"


def test_what_is_nearly_alike():
    """Sums that were rounded otherwise, in either direction, are alike, and others are not."""
    table = {"weight": Alike("{}", nearly=True)}
    chosen = random.Random(3)
    for _ in range(200):
        weight = chosen.uniform(0.5, 1e6)
        for near, is_wrong in ((chosen.randint(-8, 8), False), (chosen.choice([-1, 1]) * 2**14, True)):
            other = struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", weight))[0] + near))[0]
            both = [torch.tensor(value, dtype=torch.float64) for value in (weight, other)]
            found = summed(table, [(1, {"weight": value}) for value in both])
            assert found.is_wrong().item() is is_wrong
            assert found.wrong() == ["weight"] * is_wrong


def _bits(number):
    return struct.unpack("<d", struct.pack("<Q", number))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 1024, 16384, 200_000])
def test_one_bit_on_one_rank_of_many(size):
    """Any bit of any float, whatever the others are; and all ranks alike never differ."""
    chosen = random.Random(size)
    for bit in range(64):
        value = chosen.getrandbits(64)
        mine, other = _bits(value), _bits(value ^ (1 << bit))
        assert not summed(alike("a"), [(size, {"a": mine})]).is_wrong()
        if size > 1:
            found = summed(alike("a", "b"), [(size - 1, {"a": mine, "b": 1.0}), (1, {"a": other, "b": 1.0})])
            assert found.is_wrong()
            assert found.wrong() == ["a"]


@pytest.mark.parametrize("bits", [0x7FFF7FFF7FFF7FFF, 0x8000800080008000, 0x400921FB54442D18])
def test_the_largest_parts_are_alike(bits):
    """Rounding finds no difference where there is none, for as many ranks as promised."""
    for size in (*range(1, 50), 16384, 199_999, 200_000):
        assert not summed(alike("a"), [(size, {"a": _bits(bits)})]).is_wrong()
        if size > 1:
            assert summed(alike("a"), [(size - 1, {"a": _bits(bits)}), (1, {"a": _bits(bits ^ 1)})]).is_wrong()


def test_signs_of_zero_are_alike():
    """And numbers are what tensors with the same value are."""
    three = torch.tensor(3.0, dtype=torch.float64)
    assert not summed(alike("a", "b"), [(1, {"a": 0.0, "b": 3}), (1, {"a": -0.0, "b": three})]).is_wrong()


def test_a_device_compares_as_the_host():
    """The bits of a tensor that the host may not read are taken by ops."""
    assert _parts(torch.tensor(0.1, dtype=torch.float64)).tolist() == list(_parts(0.1))


def test_the_vector_has_the_size_of_its_fields():
    """Whatever the number of ranks: here 1 + 2 + 3 + 1 + 1 numbers, and 5 for each of three that are compared."""
    for size in (2, 16384):
        vectors = []
        Agreement(TABLE, of(1)[1], Group(vectors.append, 0, size), CPU)
        (vector,) = vectors
        assert vector.tolist()[:8] == [1, 2, 20, 1, 1, 0, 1, 0]
        assert vector.numel() == 8 + 5 * 3


def test_ranks_are_asked_only_if_all_look():
    """Those that do not would not take part; then each says what it has."""
    for looks in (True, False):
        vectors, tables = [], []
        for rank in range(2):
            Agreement(alike("window"), {"window": 7 + rank}, Group(vectors.append, rank, 2), CPU, looks or rank == 0)

        def sum_(tensor, vectors=vectors, tables=tables):
            if tensor.dim() == 1:
                tensor.copy_(vectors[0] + vectors[1])
            else:
                tables.append(tensor.clone())
                tensor[:, 1] = 8.0

        text = Agreement(alike("window"), {"window": 7}, Group(sum_, 0, 2), CPU).error()
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
    shown = SAME_CLIPPING["limit"].shown({"norms": [1.0] * 16384, "limit": [1.0] * 16383 + [2.0]})
    assert shown == "1.0 on 16383 ranks (the first is 0), 2.0 on rank 16383"
