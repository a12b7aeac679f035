"""A batch as samples: what counts, what each costs, and parts of every kind of tree."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from accumkernels.splitting.samples import ListSamples, TreeSamples, costs_of, samples_of
from accumkernels.splitting.trees import tree_leaves


@dataclasses.dataclass(frozen=True)
class Record:
    """Frozen, and with a field that its constructor does not take."""

    x: Any
    y: Any
    name: str = "a"
    made: Any = dataclasses.field(default=None, init=False)


class Encoding(collections.UserDict):
    """Like a tokenizer's: more than the dict, and attributes."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
TREES = {
    "tensor": X,
    "tuple": (X, Y),
    "list": [X, [Y]],
    "dict": {"x": X, "y": {"z": Y}},
    "default": collections.defaultdict(list, x=X, y=Y),
    "named": Pair(X, Y),
    "record": Record(X, {"y": Y}),
    "encoding": Encoding({"x": X, "y": Y}, encodings=["kept"]),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("indices", [[1, 2, 3], [5, 0, 2], [4], [0, 1, 2, 3, 4, 5]], ids=str)
def test_parts(tree, indices):
    """Rows of each tensor, in the same containers."""
    samples = TreeSamples(tree)
    assert len(samples) == 6
    part = samples.part(indices)
    assert type(part) is type(tree)
    whole, taken = dict(tree_leaves(tree)), dict(tree_leaves(part))
    assert whole.keys() == taken.keys()
    for place, leaf in whole.items():
        if isinstance(leaf, torch.Tensor):
            assert taken[place].equal(leaf[torch.tensor(indices)])
        else:
            assert taken[place] == leaf


def test_encoding_keeps_what_it_holds():
    """Attributes work in parts."""
    part = TreeSamples(TREES["encoding"]).part([1, 2])
    assert part.encodings == ["kept"]
    assert part.x.equal(X[1:3])
    assert TREES["encoding"].x is X


def test_what_has_no_samples_passes_whole():
    """No tensor, no dimension, or one row."""
    tree = {"x": X, "mask": torch.ones(1, 7), "scale": torch.tensor(3.0), "names": ["a"] * 6, "n": 6}
    part = TreeSamples(tree).part([0, 2])
    for name in ("mask", "scale", "n"):
        assert part[name] is tree[name]
    assert part["names"] == tree["names"]
    sample = TreeSamples(tree).sample(3)
    assert sample["x"].equal(X[3]) and sample["mask"] is tree["mask"]


def test_rows_in_order_are_views():
    """They take no memory."""
    storage = X.untyped_storage().data_ptr()
    samples = TreeSamples((X, Y))
    assert samples.part([2, 3])[0].untyped_storage().data_ptr() == storage
    assert samples.part([2, 4])[0].untyped_storage().data_ptr() != storage


def test_what_is_taken_out_of_a_part_is_there_for_the_next_try():
    """A loss pops its labels, or collate those of its samples; the batch may run out of memory and be split."""
    for batch, collate in (({"x": X, "y": Y}, None), ([{"y": 1}, Encoding({"y": 2}, [])], lambda part: part)):
        samples = samples_of(batch, collate)
        for _ in range(2):
            part = samples.part(range(len(samples)))
            for popped in [part] if collate is None else part:
                popped.pop("y")
        assert all("y" in held for held in ([batch] if collate is None else batch))
    assert TreeSamples((X, Y)).part(range(6))[0] is X


def test_batches_without_one_size():
    """The tensors are named."""
    with pytest.raises(ValueError, match=r"batch\['y'\] has 5 samples .*, batch\['x'\] has 6"):
        TreeSamples({"x": X, "y": torch.ones(5)})
    with pytest.raises(ValueError, match=r"batch.y has 4 samples .*, batch.x has 6"):
        TreeSamples(Record(X, torch.ones(4)))
    with pytest.raises(ValueError, match="no tensor with a dimension"):
        TreeSamples({"x": torch.tensor(1.0)})
    with pytest.raises(TypeError, match="batch must be a tree of tensors .*, got 'text'"):
        TreeSamples("text")


def test_lists():
    """They need `collate`, which gets some of the samples."""
    samples = samples_of(["a", "bb", "ccc"], "".join)
    assert isinstance(samples, ListSamples) and samples.padded
    assert samples.part([2, 0]) == "ccca"
    assert not samples_of([X, Y], None).padded  # a tree like any other
    with pytest.raises(TypeError, match="batch must be a list of samples, with collate, got"):
        samples_of(iter([1]), "".join)
    with pytest.raises(TypeError, match="collate must be a function"):
        samples_of([1], 3)


@pytest.mark.parametrize(
    ("sample", "cost"),
    [
        ([1, 2, 3], 3),
        ("text", 4),
        (torch.ones(5), 5),
        ({"labels": 1, "ids": [1, 2]}, 2),
        ({"id": torch.tensor(3), "ids": torch.ones(7)}, 7),
        (collections.UserDict(ids=[1] * 6), 6),
        (3, 1),
        (torch.tensor(3), 1),
        ({}, 1),
    ],
    ids=str,
)
def test_default_costs_of_lists(sample, cost):
    """The length of the sample, or of a mapping's first sized value."""
    assert costs_of(samples_of([sample], list), None) == [cost]


def test_costs():
    """1 by default; else a function of one sample, or one number per sample."""
    samples = TreeSamples((X, Y))
    assert costs_of(samples, None) == [1.0] * 6
    assert costs_of(samples, lambda sample: sample[0].sum()) == X.sum(1).tolist()
    assert costs_of(samples, Y) == Y.tolist()
    assert costs_of(samples, (i / 2 for i in range(6))) == [0, 0.5, 1, 1.5, 2, 2.5]


@pytest.mark.parametrize(
    ("cost", "error", "text"),
    [
        (lambda sample: float("nan"), ValueError, "cost of sample 0 must be a finite number .*, got nan"),
        ([1, 1, -2.5, 1, 1, 1], ValueError, "cost of sample 2 must be .* not negative, got -2.5"),
        ([1, float("inf"), 1, 1, 1, 1], ValueError, "cost of sample 1 .* got inf"),
        ([1, 2], ValueError, "cost has 2 numbers, and the batch has 6 samples"),
        (torch.tensor(1.0), ValueError, "cost has one numbers?, and the batch has 6 samples"),
        (lambda sample: "much", TypeError, "cost of sample 0 must be a number, got 'much'"),
        (3, TypeError, "cost must be a function of a sample, or one number per sample, got 3"),
    ],
)
def test_wrong_costs(cost, error, text):
    """The message has the sample and its cost."""
    with pytest.raises(error, match=text):
        costs_of(TreeSamples((X, Y)), cost)
