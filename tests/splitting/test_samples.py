"""A batch as samples: what counts, what each costs, and parts of every kind of tree."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accumkernels as ak
from accumkernels.splitting.batches import ListSamples, TreeSamples, costs_of, samples_of, tree_leaves


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
    "read-only": types.MappingProxyType({"x": X, "y": Y}),
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
    """Neither tensor nor list, no dimension, or one row or item, wherever it stands."""
    tree = {"mask": torch.ones(1, 7), "x": X, "scale": torch.tensor(3.0), "prompt": ["a"], "text": "sixsix", "n": 6}
    part = TreeSamples(tree).part([0, 2])
    for name in ("mask", "scale", "prompt", "text", "n"):
        assert part[name] is tree[name]
    sample = TreeSamples(tree).sample(3)
    assert sample["x"].equal(X[3]) and sample["mask"] is tree["mask"]


def test_lists_in_trees():
    """Items are samples, in lists and in tuples, of any kind but tensors; lists of several lists are containers."""
    texts = list("abcdef")
    tree = {
        "x": X,
        "texts": texts,
        "names": tuple(texts),
        "spans": [[i, -i] for i in range(6)],
        "both": [texts, {"texts": texts}],
        "entries": [{"name": name} for name in texts],
    }
    for indices in ([1, 2], [5, 0, 3]):
        part = TreeSamples(tree).part(indices)
        chosen = [texts[i] for i in indices]
        assert part["texts"] == chosen and part["names"] == tuple(chosen)
        assert part["spans"] == [[i, -i] for i in indices]
        assert part["both"] == [chosen, {"texts": chosen}]
        assert part["entries"] == [{"name": name} for name in chosen]
    sample = TreeSamples(tree).sample(4)
    assert (sample["texts"], sample["spans"]) == ("e", [4, -4])


KINDS = {
    "rows": lambda n: lambda at: torch.arange(2.0 * n).reshape(n, 2)[torch.tensor(at)],
    "texts": lambda n: lambda at: [f"text {i}" for i in at],
    "names": lambda n: lambda at: tuple(str(i) for i in at),
    "row": lambda n: lambda at: torch.ones(1, n),
    "prompt": lambda n: lambda at: ["prompt"],
    "scalar": lambda n: lambda at: torch.tensor(2.0),
    "object": lambda n: lambda at: None,
}
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda values: dict(enumerate(values)),
    "user dict": lambda values: collections.UserDict(enumerate(values)),
    "record": lambda values: Record(list(values), values[0]),
}


def _made(spec, n):
    """A function that makes the tree, as these samples of a batch of `n` have to be."""
    if isinstance(spec, str):
        return KINDS[spec](n)
    kind, specs = spec
    children = [_made(child, n) for child in ["rows", *specs]]  # every container leads to a tensor
    return lambda at: CONTAINERS[kind]([child(at) for child in children])


def _same(one, other):
    """Whether two trees are equal, in their containers too."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.equal(other)
    if isinstance(one, Record):
        return isinstance(other, Record) and _same([one.x, one.y], [other.x, other.y])
    if isinstance(one, (dict, collections.UserDict)):
        return type(one) is type(other) and _same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


SPECS = st.recursive(
    st.sampled_from(sorted(KINDS)),
    lambda specs: st.tuples(st.sampled_from(sorted(CONTAINERS)), st.lists(specs, max_size=3)),
    max_leaves=8,
)


@given(kind=st.sampled_from(sorted(CONTAINERS)), specs=st.lists(SPECS, max_size=4), data=st.data())
@settings(deadline=None, max_examples=60)
def test_one_meaning_everywhere(kind, specs, data):
    """A batch's parts, the pieces of a plan and what backward_batch runs are the trees of the same samples."""
    n = data.draw(st.integers(2, 7))
    most = data.draw(st.integers(1, n))
    tree_of = _made((kind, specs), n)
    batch = tree_of(range(n))
    indices = data.draw(st.permutations(range(n)))[:most]
    assert _same(TreeSamples(batch).part(indices), tree_of(indices))

    made, bounds = ak.plan(n, most), [0]
    for size in made.micro_batch_sizes:
        bounds.append(bounds[-1] + size)
    expected = [tree_of(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
    assert _same(made.split(batch), expected)

    weight, ran = torch.nn.Parameter(torch.ones(())), []
    with ak.FusedAccumulator([weight]) as acc:

        def loss_fn(part):
            ran.append(part)
            return weight.square(), 1

        sizes = acc.backward_batch(batch, loss_fn, micro_batch=most).sizes
        acc.zero_()
    bounds = list(itertools.accumulate(sizes, initial=0))
    assert _same(ran, [tree_of(range(start, stop)) for start, stop in itertools.pairwise(bounds)])


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
    with pytest.raises(ValueError, match=r"batch\['y'\]\[1\] has 5 items, batch\['x'\] has 6 samples; a list"):
        TreeSamples({"x": X, "y": [Y, ["a"] * 5]})
    with pytest.raises(ValueError, match=r"batch\[1\]\[0\] has 2 items, batch\[0\] has 6 samples"):
        TreeSamples((X, [[1, 2], [3, 4, 5]]))
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


ROWS = torch.arange(24.0).view(12, 2)
PER_SAMPLE = {
    "numbers": [torch.tensor(float(i)) for i in range(12)],
    "rows": [torch.tensor([float(i)]) for i in range(12)],
    "boxes": [torch.full((i % 3, 4), float(i)) for i in range(12)],
    "dicts": [{"boxes": torch.full((i % 3 + 1, 4), float(i))} for i in range(12)],
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_lists_of_tensors_with_an_item_per_sample(name, first):
    """They are split like tensors, as other lists of the batch's length are, wherever they are."""
    items = PER_SAMPLE[name]
    batch = {"items": items, "x": ROWS} if first else {"x": ROWS, "items": items}
    part = TreeSamples(batch).part(range(3, 5))
    assert torch.equal(part["x"], ROWS[3:5])
    assert part["items"] == items[3:5] if name == "dicts" else all(map(torch.equal, part["items"], items[3:5]))
    assert len(part["items"]) == 2


@pytest.mark.parametrize("rows", [(12, 3, 1), (2, 0, 12), (1, 5, 7)], ids=str)
@pytest.mark.parametrize("record", [lambda boxes: boxes, lambda boxes: {"boxes": boxes, "id": torch.ones(1)}])
def test_an_item_with_as_many_rows_as_samples(rows, record):
    """By chance, as an image has as many boxes as the batch has images, among others that have not."""
    items = [record(torch.full((rows[i % 3], 4), float(i))) for i in range(12)]
    part = TreeSamples({"x": ROWS, "items": items}).part(range(3, 5))
    boxes = [item["boxes"] if isinstance(item, dict) else item for item in part["items"]]
    assert [len(found) for found in boxes] == [rows[0], rows[1]]
    assert all((found == index).all() for index, found in enumerate(boxes, 3))


@pytest.mark.parametrize("rows", [(2, 2), (2, 1)])
def test_records_that_may_be_samples_or_fields(rows):
    """Two images with at most two boxes each: cut along the boxes, each part would have those of both images."""
    records = [{"boxes": torch.ones(n, 4), "labels": torch.ones(n)} for n in rows]
    with pytest.raises(ValueError, match=r"batch\['y'\] is a list of 2 records of 2 rows each"):
        TreeSamples({"x": ROWS[:2], "y": records})
    assert len(TreeSamples({"x": ROWS[:2], "y": tuple(records)})) == 2
    assert len(TreeSamples([{"x": ROWS[:2]}, {"x": ROWS[:2]}])) == 2


@pytest.mark.parametrize("boxes", [0, 1, 2, 5])
@pytest.mark.parametrize("record", [lambda boxes: boxes, lambda boxes: {"boxes": boxes, "id": torch.ones(1)}])
def test_one_sample(boxes, record):
    """A loader's last image: its boxes are no samples."""
    batch = {"items": [record(torch.ones(boxes, 4))], "x": ROWS[:1], "y": ROWS[:1]}
    samples = TreeSamples(batch)
    part = samples.part([0])
    assert len(samples) == 1 and len(part["items"]) == 1 and torch.equal(part["x"], ROWS[:1])
    found = part["items"][0]
    assert len(found["boxes"] if isinstance(found, dict) else found) == boxes
    assert len(TreeSamples({"fields": [ROWS]})) == len(TreeSamples([[ROWS], torch.tensor(1.0)])) == 12


def test_a_list_with_the_number_of_samples_has_fields():
    """One that is as long as its tensors: another length in it is an error, and no list of samples."""
    for batch in ([ROWS[:2], ROWS[:3]], ([ROWS[:2], ROWS[:3]],), {"x": [ROWS[:2], ROWS[:3]]}):
        with pytest.raises(ValueError, match=r"has 3 samples \(its first dimension\), batch\S* has 2"):
            TreeSamples(batch)


def test_lists_of_fields_are_containers():
    """A loader's [x, y], and other tensors in a tuple or a list, are no samples, however many rows there are."""
    for fields in ([ROWS, ROWS[:, 0]], [ROWS[:2], ROWS[2:4]], (torch.tensor(1.0), ROWS[:2])):
        part = TreeSamples(fields).part([1])
        assert all(torch.equal(a, b[1:2] if b.dim() else b) for a, b in zip(part, fields, strict=True))


def test_arrays_are_split_like_tensors():
    """Those of the batch's length; others are errors that name them."""
    array = numpy.arange(24).reshape(12, 2)
    for indices in (range(3, 5), [1, 7]):
        part = TreeSamples({"x": ROWS, "y": array}).part(indices)
        assert (part["y"] == array[list(indices)]).all()
    with pytest.raises(ValueError, match=r"batch\['y'\] has 5 samples"):
        TreeSamples({"x": ROWS, "y": array[:5]})
    alone = TreeSamples((array, array[:, 0]))
    assert len(alone) == 12
    assert (alone.part([1, 7])[1] == array[[1, 7], 0]).all()


@pytest.mark.parametrize("wrap", [lambda items: items, lambda items: {"x": items}, lambda items: (items, ROWS)])
def test_samples_that_were_not_collated(wrap):
    """A list of as long sequences, or of images, would be cut inside of each."""
    with pytest.raises(ValueError, match="list of 12 tensors of 12 rows each: if they are samples, stack them"):
        TreeSamples(wrap([torch.ones(12, 3) for _ in range(12)]))


@pytest.mark.parametrize(
    "sample",
    [
        {"ids": torch.ones(32), "labels": torch.ones(32)},
        (torch.ones(32), torch.tensor(1)),
        (torch.ones(32), 1),
    ],
    ids=["a dict", "a pair", "a class"],
)
@pytest.mark.parametrize("wrap", [lambda items: items, lambda items: {"x": items}])
def test_records_that_were_not_collated(sample, wrap):
    """As a loss of one's own may collate them; a tuple of batches, as of several loaders, is a container."""
    with pytest.raises(ValueError, match="list of 5 records of 32 rows each: if they are samples, stack them"):
        TreeSamples(wrap([sample] * 5))
    assert len(TreeSamples(wrap((sample,) * 5))) == 32
    assert len(TreeSamples(wrap([sample] * 4))) == 32
