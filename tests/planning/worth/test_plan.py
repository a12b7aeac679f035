"""plan(): exact products, balanced micro-batches; splitting batches, grouping loaders."""

import random
from collections import OrderedDict, UserDict, namedtuple

import pytest
import torch

import accumkernels as ak
from tests.support.models import batch, big_batch_grads, mlp, relative_error


def test_random_plans():
    """10,000 of them: the product is exact, sizes fit, differ by one at most, and are the fewest."""
    generator = random.Random(0)
    checked = 0
    while checked < 10_000:
        ranks, share = generator.randint(1, 64), generator.randint(1, 10 ** generator.randint(1, 4))
        most = generator.randint(1, 10 ** generator.randint(1, 4))
        if share / most > 2000:  # a long tuple, and nothing new
            continue
        checked += 1
        made = ak.plan(share * ranks, most, world_size=ranks)
        sizes = made.micro_batch_sizes
        assert sum(sizes) * made.world_size == share * ranks
        assert len(sizes) == made.accumulation_steps == -(-share // most)
        assert 1 <= min(sizes) and max(sizes) <= most and max(sizes) - min(sizes) <= 1


def test_examples():
    """The contract's, and one with unequal sizes: larger ones first."""
    assert ak.plan(100, 33).micro_batch_sizes == (25, 25, 25, 25)
    assert ak.plan(512, 12, world_size=4).micro_batch_sizes == (12,) * 7 + (11,) * 4
    assert ak.plan(8, ak.BatchSize(64)).micro_batch_sizes == (8,)


@pytest.mark.parametrize(("target", "ranks", "nearest"), [(510, 4, "508 and 512"), (3, 4, "possible: 4")])
def test_impossible(target, ranks, nearest):
    """A target that ranks cannot share names the nearest that they can."""
    with pytest.raises(ValueError, match=f"target_batch_size {target} .* world_size {ranks} .*{nearest}"):
        ak.plan(target, 8, world_size=ranks)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, 1), ValueError, "target_batch_size must be at least 1, got 0"),
        ((8, -1), ValueError, "max_micro_batch_size must be at least 1, got -1"),
        ((8.0, 1), TypeError, "target_batch_size must be an int, got 8.0"),
        ((True, 1), TypeError, "target_batch_size must be an int, got True"),
        ((8, "2"), TypeError, "max_micro_batch_size must be an int, got '2'"),
    ],
)
def test_wrong_numbers(arguments, error, match):
    """Named with their value."""
    with pytest.raises(error, match=match):
        ak.plan(*arguments)
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        ak.plan(8, 2, world_size=0)


def test_table():
    """All that one wants to know, and the sum."""
    text = str(ak.plan(512, 12, world_size=4))
    for part in ("target batch size", "512", "7 x 12 + 4 x 11", "accumulation steps", "at most 12", "x 4 ranks = 512"):
        assert part in text
    assert "ranks = " not in str(ak.plan(100, 33)).splitlines()[-1]


Pair = namedtuple("Pair", "x y")


def test_split_trees():
    """Tensors, tuples, named tuples, lists, mappings; what is not per sample goes along; tensors are views."""
    x, y = torch.arange(20).reshape(10, 2), torch.arange(10)
    made = ak.plan(10, 4)
    assert [len(piece) for piece in made.split(x)] == [4, 3, 3]
    assert made.split(x)[1].data_ptr() == x[4:].data_ptr()
    nested = {"pair": Pair(x, [y]), "names": [str(i) for i in range(10)], "scale": torch.tensor(2.0), "flag": None}
    nested["row"] = torch.ones(1, 3)
    pieces = made.split(nested)
    assert torch.equal(torch.cat([piece["pair"].x for piece in pieces]), x)
    assert torch.equal(torch.cat([piece["pair"].y[0] for piece in pieces]), y)
    assert [piece["names"] for piece in pieces] == [list("0123"), list("456"), list("789")]
    assert all(piece["scale"] is nested["scale"] and piece["flag"] is None for piece in pieces)
    assert all(piece["row"] is nested["row"] for piece in pieces)
    for kind in (OrderedDict, UserDict):
        assert type(made.split(kind(a=x))[0]) is kind


def test_split_partial():
    """The last batch of an epoch: the fewest equal pieces that fit."""
    made = ak.plan(10, 4)
    assert [len(piece) for piece in made.split(torch.zeros(5))] == [3, 2]
    assert [len(piece) for piece in made.split(torch.zeros(1))] == [1]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (torch.zeros(11), "batch has 11 samples; this plan splits batches of 1 to 10"),
        (torch.zeros(0), "batch has 0 samples"),
        ({"a": torch.zeros(10), "b": (torch.zeros(9),)}, r"batch\['b'\]\[0\] has 9 samples .* batch\['a'\] has 10"),
        ({"a": torch.zeros(10), "b": ["text"] * 9}, r"batch\['b'\] has 9 items, batch\['a'\] has 10 samples"),
        ([1, 2], "no tensor with a dimension"),
    ],
    ids=["large", "empty", "unequal", "unequal list", "none"],
)
def test_split_wrong(wrong, match):
    """Named by its place in the batch."""
    with pytest.raises(ValueError, match=match):
        ak.plan(10, 4).split(wrong)


def test_split_is_the_big_batch():
    """Accumulated with their sizes as weights, unequal micro-batches are the big batch."""
    model = mlp()
    x, y = batch(10)
    expected = big_batch_grads(model, x, y)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    for inputs, targets in ak.plan(10, 4).split((x, y)):
        acc.backward(torch.nn.functional.mse_loss(model(inputs), targets), weight=len(inputs))
    acc.finalize(optimizer)
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-6  # fp32 sums of 10 samples


def test_windows():
    """Lists of accumulation_steps micro-batches, the last one shorter, lazily."""
    made = ak.plan(12, 4)
    assert list(made.windows(range(7))) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(made.windows([])) == []
    read = []
    endless = (read.append(i) or i for i in iter(int, 1))
    next(made.windows(endless))
    assert len(read) == 3


def test_windows_of_a_growing_batch():
    """The schedule is asked at the start of each window, from the first step on, and met as nearly as possible."""
    made = ak.plan(8, 2, world_size=2)  # 2 x 2 per micro-batch over the ranks
    asked = []

    def schedule(step):
        asked.append(step)
        return [4, 8, 9, 1, 100][step - 3]

    windows = made.windows(range(100), schedule, first_step=3)
    assert [len(next(windows)) for _ in range(4)] == [1, 2, 2, 1]
    assert asked == [3, 4, 5, 6]
    assert len(next(windows)) == 25
    with pytest.raises(ValueError, match="first_step must not be negative, got -1"):
        made.windows([], first_step=-1)
    with pytest.raises(ValueError, match="the schedule's batch size must be at least 1, got 0"):
        next(made.windows([1], lambda step: 0))


@pytest.mark.parametrize("times", [1, 10])
def test_windows_of_a_schedule_hold_its_batch(times):
    """Also where few of the plan's micro-batches are full: by full ones it would be 9 of these, or 92."""
    made = ak.plan(101, 11)  # 11 + 9 * 10
    loader = made.batch_sampler(range(4040))
    windows = list(made.windows(loader, lambda step: 101 * times))
    assert [sum(map(len, window)) for window in windows] == [101 * times] * (40 // times)


@pytest.mark.parametrize("count", [0, 1, 4, 9, 10, 24, 25])
def test_batch_sampler(count):
    """A DataLoader that gives exactly the plan's micro-batches."""
    made = ak.plan(10, 4)
    data = torch.arange(count)
    sampler = made.batch_sampler(range(count))
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    sizes = [len(piece) for piece in loader]
    assert sum(sizes) == count
    assert len(sampler) == len(sizes)
    for window in list(made.windows(loader))[: count // 10]:
        assert [len(piece) for piece in window] == [4, 3, 3]


def test_batch_sampler_epochs():
    """set_epoch reaches a DistributedSampler."""
    sampler = torch.utils.data.DistributedSampler(range(20), num_replicas=2, rank=0, shuffle=True)
    batches = ak.plan(20, 3, world_size=2).batch_sampler(sampler)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first
    ak.plan(4, 2).batch_sampler(range(4)).set_epoch(1)  # nothing to tell
