"""Batches as trees of tensors, and their samples."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import expect, wrong_type

# ---- Handles batches as trees: tensors in containers of any kind, with samples along the first dimension


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def tree_map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda tree: False) -> Any:
    """Apply `function` to the leaves of a tree, whose containers keep their class and what else they hold.

    Args:
        function: Gets what is no container, and containers that `is_leaf` takes for leaves.
        tree: The tree.
        is_leaf: Whether a container is a leaf.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = tree_map(function, value, is_leaf)
        return mapped
    if isinstance(tree, Mapping):
        return type(tree)({key: tree_map(function, value, is_leaf) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value, is_leaf) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(function, value, is_leaf) for value in tree)
    if _is_record(tree):
        record = copy.copy(tree)
        for field in dataclasses.fields(tree):  # also where they are frozen, or no arguments of the constructor
            object.__setattr__(record, field.name, tree_map(function, getattr(tree, field.name), is_leaf))
        return record
    return function(tree)


def _children(tree: Any, path: str) -> list[tuple[str, Any]] | None:
    """What a container holds, each with its place, such as `batch['inputs'][0]`; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple | list):
        return [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    if _is_record(tree):
        return [(f"{path}.{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def tree_leaves(
    tree: Any, path: str = "batch", is_leaf: Callable[[Any], bool] = lambda tree: False
) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its place; see `tree_map`."""
    children = None if is_leaf(tree) else _children(tree, path)
    if children is None:
        yield path, tree
    for where, child in children or ():
        yield from tree_leaves(child, where, is_leaf)


def form(tree: Any) -> Any:
    """What trees of one kind have in common: names, types, and dtypes and numbers of dimensions of tensors."""
    if isinstance(tree, Tensor):
        return tree.dtype, tree.dim()
    if isinstance(tree, list):  # of any length
        return list, form(tree[0]) if tree else None
    children = _children(tree, "")
    return type(tree) if children is None else (type(tree), *((where, form(child)) for where, child in children))


def to_device(tree: Any, device: torch.device) -> Any:
    """Move the tensors of a tree to `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


# ---- A batch as samples: counts them, asks what each costs, and takes some of them as a micro-batch

_IGNORED = -100  # torch's `ignore_index` of losses that average
# In a list; fields of a batch are fewer, and so are batches of several loaders.
_MANY_TENSORS, _MANY_RECORDS = 8, 4
Cost = Callable[[Any], float] | Iterable[float] | Tensor | None


class TreeSamples:
    """A tree of tensors or NumPy arrays with samples along the first dimension, and of lists with one item per sample.

    The number of samples is that of the first tensor with more than one row, those inside of inner lists last, or of
    the first array if there is no tensor. It is one if a list of one item is all that has more rows beside tensors of
    one row, as of one image with its boxes. What has no dimension, one item or one row goes into every micro-batch
    whole, and so does what is no tensor, array or list. A list that leads to tensors has one item per sample if it is
    as long as the batch and no container of fields: none of its tensors is as long as the batch, or some of them have
    neither as many rows nor one, as boxes of images. Else it is a container, and so is a list of other lists that has
    another length than the batch.

    Args:
        batch: Tuples, lists, mappings and dataclasses of tensors.

    Attributes:
        padded: Whether a micro-batch is padded to its dearest sample, so that it costs that times its samples.

    Raises:
        TypeError: `batch` is neither a tensor nor a container.
        ValueError: No tensor has a dimension, a tensor, array or list has another length, or a list has many tensors of
            one kind, as samples have that were not collated; names it.
    """

    padded = False

    def __init__(self, batch: Any) -> None:
        sized = [(path, leaf) for path, leaf in tree_leaves(batch) if _is_sized(leaf)]
        tensors = [found for found in sized if isinstance(found[1], Tensor)] or sized
        if not tensors and _children(batch, "batch") is None:
            raise wrong_type("batch", "a tree of tensors with samples along the first dimension", batch)
        if not tensors:
            raise ValueError("batch has no tensor with a dimension along which its samples could be counted")
        shallow = list(tree_leaves(batch, is_leaf=lambda t: isinstance(t, list) and t is not batch))
        outside = {path for path, _ in shallow}
        ordered = sorted(tensors, key=lambda found: found[0] not in outside)
        first, counted = next(((path, leaf) for path, leaf in ordered if len(leaf) != 1), ordered[0])
        if first not in outside and ordered[0][0] in outside and _is_of_one(first, shallow):
            first, counted = ordered[0]  # a batch of one image, with its boxes in a list of one item
        self._batch = batch
        self._count = len(counted)
        self._counted_outside = first in outside  # of inner lists
        for path, leaf in tree_leaves(batch, is_leaf=self._is_list):
            if not _is_sized(leaf) or len(leaf) in (1, self._count):
                continue
            if not isinstance(leaf, tuple | list):
                raise ValueError(
                    f"{path} has {len(leaf)} samples (its first dimension), {first} has {self._count}; all tensors of "
                    "a batch must have the same number"
                )
            raise ValueError(
                f"{path} has {len(leaf)} items, {first} has {self._count} samples; a list in a batch must have an item "
                "per sample, or one item"
            )
        self._check_collated(batch, "batch")

    def _check_collated(self, tree: Any, path: str) -> None:
        """Refuse lists of samples that were not made a tensor, and would be cut along a dimension of each."""
        if self._is_list(tree):
            return
        if isinstance(tree, list) and len(set(map(form, tree))) == 1 and _leads_to_tensors(tree):
            bare = isinstance(tree[0], Tensor)
            many = len(tree) > (_MANY_TENSORS if bare else _MANY_RECORDS) and not (bare and tree[0].dim() == 0)
            # As many records as samples: each may be of an image, and by chance have as many boxes as there are images.
            if many or (not bare and len(tree) > 1 and self._is_as_long(tree)):
                raise ValueError(
                    f"{path} is a list of {len(tree)} {'tensors' if bare else 'records'} of {self._count} rows each: "
                    "if they are samples, stack them, or pass a list of samples with collate; if each has a row per "
                    "sample, make it a tuple"
                )
        for where, child in _children(tree, path) or ():
            self._check_collated(child, where)

    def _is_list(self, tree: Any) -> bool:
        """Whether a tree is a list of samples' items, and no container."""
        if not isinstance(tree, tuple | list) or hasattr(tree, "_fields"):
            return False
        if _leads_to_tensors(tree):
            rows = {len(leaf) for _, leaf in tree_leaves(tree) if _is_sized(leaf)}
            if self._count in rows and (rows <= {1, self._count} or not self._is_as_long(tree)):
                return False
            return isinstance(tree, list) and len(tree) == self._count
        return len(tree) == self._count or all(_children(value, "") is None for value in tree)

    def _is_as_long(self, tree: Any) -> bool:
        """Whether a list has an item per sample, of samples that are counted elsewhere: not a loader's [x, y]."""
        return tree is not self._batch and self._counted_outside and len(tree) == self._count

    def __len__(self) -> int:
        return self._count

    def _take(self, take: Callable[[Any], Any]) -> Any:
        def of(leaf: Any) -> Any:
            return take(leaf) if _is_sized(leaf) and len(leaf) == self._count else leaf

        return tree_map(of, self._batch, self._is_list)

    def sample(self, index: int) -> Any:
        """One sample, for its cost."""
        return self._take(lambda leaf: leaf[index])

    def default_costs(self) -> list[float]:
        """What each sample costs if nobody says."""
        return [1.0] * len(self)

    def items(self) -> list[float] | None:
        """How many items of each sample a loss may average, where the samples say so.

        Those are, in each row, the labels that are not -100, or what a mask of zeros and ones keeps. The first tensor
        or array whose rows differ tells; else any that has such a mark.
        """
        alike: list[float] | None = None
        for _, leaf in tree_leaves(self._batch, is_leaf=self._is_list):
            marks = self._marks(leaf)
            if marks is not None:
                counts: list[float] = marks.sum(1).tolist()
                if len(set(counts)) > 1:
                    return counts
                alike = counts
        return alike

    def _marks(self, leaf: Any) -> Any:
        """Which items of each row count, `[samples, items]`; None if a leaf does not say."""
        if not _is_sized(leaf) or isinstance(leaf, tuple | list) or len(leaf) != self._count:
            return None
        if isinstance(leaf, Tensor) and (type(leaf) is not Tensor or leaf.layout is not torch.strided):
            return None
        rows = leaf.reshape(self._count, -1)
        if not _has_fractions(leaf):
            kept = rows != _IGNORED
            if not bool(kept.all()):
                return kept
        return rows != 0 if leaf.ndim > 1 and _is_mask(rows[:1]) and _is_mask(rows) else None

    def part(self, indices: Sequence[int]) -> Any:
        """Some samples as a micro-batch; views, if they are in a row.

        Containers are new: a loss may take its labels out of them.
        """
        start, stop = indices[0], indices[-1] + 1
        chosen = None if list(indices) == list(range(start, stop)) else torch.tensor(indices)

        def take(leaf: Any) -> Any:
            if isinstance(leaf, tuple | list):
                return type(leaf)(leaf[index] for index in indices)
            if not isinstance(leaf, Tensor):
                return leaf[list(indices)]
            if chosen is not None:
                return leaf.index_select(0, chosen.to(leaf.device))
            return leaf[start:stop] if len(indices) < len(leaf) else leaf

        return self._take(take)


def _is_of_one(path: str, shallow: Iterable[tuple[str, Any]]) -> bool:
    """Whether the leaf at a path is inside of an inner list with one item."""
    return any(isinstance(tree, list) and len(tree) == 1 and path.startswith(f"{where}[") for where, tree in shallow)


def _is_sized(leaf: Any) -> bool:
    """Whether a leaf of `TreeSamples` may have samples."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0
    numpy = sys.modules.get("numpy")
    return isinstance(leaf, tuple | list) or (numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.ndim > 0)


def _has_fractions(leaf: Any) -> bool:
    return leaf.is_floating_point() if isinstance(leaf, Tensor) else leaf.dtype.kind not in "biu"


def _is_mask(values: Any) -> bool:
    """Whether these are zeros and ones, or truths."""
    return bool(((values == 0) | (values == 1)).all())


def _leads_to_tensors(tree: Any) -> bool:
    if isinstance(tree, tuple | list):  # maybe of many tokens
        return any(map(_leads_to_tensors, tree))
    found = isinstance(tree, Tensor) or _is_sized(tree)
    return found or any(_leads_to_tensors(child) for _, child in _children(tree, "") or ())


def is_list_of_tensors(tree: Any) -> bool:
    """Whether a tree is a list or tuple that leads to tensors, and no record."""
    return isinstance(tree, tuple | list) and not hasattr(tree, "_fields") and _leads_to_tensors(tree)


class ListSamples:
    """A list of samples, which `collate` makes a micro-batch of; its methods are those of `TreeSamples`.

    Args:
        batch: The samples.
        collate: Called with a list of some of them.
    """

    padded = True

    def __init__(self, batch: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._batch = batch
        self._collate = collate

    def __len__(self) -> int:
        return len(self._batch)

    def sample(self, index: int) -> Any:
        """See `TreeSamples`."""
        return self._batch[index]

    def default_costs(self) -> list[float]:
        """See `TreeSamples`: the length of a sample, or of the first value of a mapping that has one."""
        return [_length(sample) for sample in self._batch]

    def items(self) -> list[float] | None:
        """See `TreeSamples`."""
        return None

    def part(self, indices: Sequence[int]) -> Any:
        """See `TreeSamples`; dicts are copied, since `collate` may take labels out of them."""
        samples = (self._batch[index] for index in indices)
        return self._collate([copy.copy(s) if isinstance(s, dict | UserDict) else s for s in samples])


Samples = TreeSamples | ListSamples


def _length(sample: Any) -> float:
    for value in sample.values() if isinstance(sample, Mapping) else (sample,):
        if not (isinstance(value, Tensor) and value.dim() == 0) and hasattr(value, "__len__"):
            return float(len(value))
    return 1.0


def samples_of(batch: Any, collate: Callable[[list[Any]], Any] | None) -> Samples:
    """The samples of a batch; a list of samples needs `collate`.

    Raises:
        TypeError: `collate` is not callable, or the batch is not a list.
    """
    if collate is None:
        return TreeSamples(batch)
    expect(collate, Callable, "collate", "a function of a list of samples")
    return ListSamples(expect(batch, Sequence, "batch", "a list of samples, with collate", but=str), collate)


def costs_of(samples: Samples, cost: Cost) -> list[float]:
    """What each sample costs.

    Raises:
        TypeError, ValueError: `cost` is neither a function nor one number per sample, or a cost is negative or not
            finite; the message has the sample and its cost.
    """
    count = len(samples)
    if cost is None:
        costs = samples.default_costs()
    elif callable(cost):
        costs = [_number(cost(samples.sample(index)), index) for index in range(count)]
    elif isinstance(cost, Iterable):
        given = cost.tolist() if isinstance(cost, Tensor) else list(cost)
        if not isinstance(given, list) or len(given) != count:
            found = len(given) if isinstance(given, list) else "one"
            raise ValueError(f"cost has {found} numbers, and the batch has {count} samples")
        costs = [_number(value, index) for index, value in enumerate(given)]
    else:
        raise wrong_type("cost", "a function of a sample, or one number per sample", cost)
    for index, value in enumerate(costs):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"cost of sample {index} must be a finite number that is not negative, got {value}")
    return costs


def _number(value: Any, index: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise wrong_type(f"cost of sample {index}", "a number", value) from None
