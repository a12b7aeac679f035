"""Packer: every sample once, within the limits, as few and as even micro-batches as they allow, always the same."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accumkernels.splitting.packing import Packer

COSTS = st.one_of(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.lists(st.floats(0.0, 3.0), min_size=1, max_size=40),
)


def cost(part, costs, padded):
    """What a micro-batch costs, by definition."""
    return max(costs[i] for i in part) * len(part) if padded else math.fsum(costs[i] for i in part)


def first_fit(costs, padded, most, budget):
    """How many micro-batches it takes to fill one after another, sample by sample."""
    parts = [[]]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        more = [*parts[-1], index]
        if parts[-1] and (len(more) > (most or math.inf) or cost(more, costs, padded) > budget):
            parts.append([index])
        else:
            parts[-1] = more
    return len(parts)


@given(COSTS, st.booleans(), st.none() | st.integers(1, 9), st.floats(0.1, 100), st.integers(1, 5), st.integers(1, 4))
@example([0.1, 0.1, 0.1], False, None, 0.3, 1, 1)  # whose sum rounds
@example([100, 1, 1, 1], False, None, 100.0, 3, 1)
@example([0.0, 0.0, 2.0], False, None, 1.0, 1, 1)
@settings(max_examples=100, deadline=None)
def test_packs(costs, padded, most, budget, at_least, multiple_of):
    """What holds for all costs and limits."""
    packer = Packer(costs, padded=padded, most=most, multiple_of=multiple_of)
    parts = packer.pack(budget, at_least)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    for part in parts:
        assert len(part) == 1 or cost(part, costs, padded) <= budget
        assert len(part) <= (most or math.inf)
        assert packer.cost(part) == pytest.approx(cost(part, costs, padded), rel=1e-12)
    assert len(parts) >= min(at_least, len(costs))
    assert parts == Packer(costs, padded=padded, most=most, multiple_of=multiple_of).pack(budget, at_least)
    if multiple_of == 1 and at_least == 1:
        assert len(parts) <= first_fit(costs, padded, most, budget)


@given(st.integers(1, 60), st.integers(1, 70), st.booleans())
def test_equal_costs(count, most, padded):
    """Sizes differ by at most one, samples stay in order, and there are no more than it takes."""
    parts = Packer([3.0] * count, padded=padded, most=most).pack()
    assert [i for part in parts for i in part] == list(range(count))
    assert len(parts) == -(-count // most)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 60), st.integers(2, 20), st.integers(2, 8))
def test_multiple_of(count, most, multiple_of):
    """All sizes but the last are multiples, where the limit has room for one."""
    sizes = [len(part) for part in Packer([1.0] * count, most=most, multiple_of=multiple_of).pack()]
    if most >= multiple_of:
        assert [size % multiple_of for size in sizes[:-1]] == [0] * (len(sizes) - 1)


@given(COSTS.filter(lambda costs: len(costs) > 1), st.booleans(), st.integers(1, 4))
def test_split(costs, padded, multiple_of):
    """Two micro-batches, neither empty; of equal costs about the same number."""
    packer = Packer(costs, padded=padded, multiple_of=multiple_of)
    first, second = packer.split(list(range(len(costs))))
    assert first and second
    assert first + second == list(range(len(costs)))
    if len(set(costs)) == 1 and costs[0] and multiple_of == 1:
        assert abs(len(first) - len(second)) <= 1


def test_split_without_costs():
    """Samples that cost nothing are halved, or each would be a try of its own that runs out of memory."""
    assert [len(part) for part in Packer([0.0] * 64).split(range(64))] == [32, 32]


def test_about_as_dear():
    """The dearest come first, and no micro-batch is much cheaper than others."""
    costs = [7, 1, 30, 9, 31, 2, 8, 29, 1, 2]
    sums = [sum(costs[i] for i in part) for part in Packer(costs).pack(70)]
    assert sums == [61, 59]
    padded = Packer(costs, padded=True).pack(93)
    assert [sorted(costs[i] for i in part) for part in padded] == [[29, 30, 31], [1, 1, 2, 2, 7, 8, 9]]


def test_many_samples_take_few_steps(monkeypatch):
    """The search cuts a batch a few times, by sums: not sample by sample."""
    calls = []
    cut = Packer._cut
    monkeypatch.setattr(Packer, "_cut", lambda self, budget: calls.append(1) or cut(self, budget))
    reached = []
    reach = Packer._reach
    monkeypatch.setattr(Packer, "_reach", lambda self, *args: reached.append(1) or reach(self, *args))
    costs = [1 + i * 7919 % 2000 for i in range(100_000)]
    for padded in (False, True):
        calls.clear(), reached.clear()
        parts = Packer(costs, padded=padded).pack(16_384)
        assert len(calls) <= 10
        assert len(reached) <= 2 * len(calls) * len(parts)
