"""A batch as samples: counts them, asks what each costs, and takes some of them as a micro-batch."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import wrong_type
from .trees import tree_leaves, tree_map

Cost = Callable[[Any], float] | Iterable[float] | Tensor | None


class Samples(Protocol):
    """The samples of a batch.

    Attributes:
        padded: Whether a micro-batch is padded to its dearest sample, so that it costs that times its samples.
    """

    padded: bool

    def __len__(self) -> int:
        """Number of samples."""

    def sample(self, index: int) -> Any:
        """One sample, for its cost."""

    def default_costs(self) -> list[float]:
        """What each sample costs if nobody says."""

    def part(self, indices: Sequence[int]) -> Any:
        """Some samples as a micro-batch."""


class TreeSamples:
    """A tree of tensors with samples along the first dimension.

    The first tensor that has a dimension says how many there are. Tensors without dimensions, or with one row, and what
    is no tensor go into every micro-batch whole.

    Args:
        batch: Tuples, lists, mappings and dataclasses of tensors.

    Raises:
        ValueError: no tensor has a dimension, or one has another number of rows; names it.
    """

    padded = False

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._count: int | None = None
        first = ""
        for path, leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if self._count is None:
                self._count, first = len(leaf), path
            elif len(leaf) not in (1, self._count):
                raise ValueError(
                    f"{path} has {len(leaf)} samples (its first dimension), {first} has {self._count}; all tensors of "
                    "a batch must have the same number"
                )
        if self._count is None and next(tree_leaves(batch), ("", None))[1] is batch:
            raise wrong_type("batch", "a tree of tensors with samples along the first dimension", batch)
        if self._count is None:
            raise ValueError("batch has no tensor with a dimension along which its samples could be counted")

    def __len__(self) -> int:
        assert self._count is not None
        return self._count

    def _take(self, take: Callable[[Tensor], Tensor]) -> Any:
        return tree_map(lambda leaf: take(leaf) if self._has_samples(leaf) else leaf, self._batch)

    def _has_samples(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self._count

    def sample(self, index: int) -> Any:
        """See `Samples`."""
        return self._take(lambda leaf: leaf[index])

    def default_costs(self) -> list[float]:
        """See `Samples`."""
        return [1.0] * len(self)

    def part(self, indices: Sequence[int]) -> Any:
        """See `Samples`; views, if they are in a row. Containers are new: a loss may take its labels out of them."""
        start, stop = indices[0], indices[-1] + 1
        if list(indices) == list(range(start, stop)):
            return self._take(lambda leaf: leaf[start:stop] if len(indices) < len(leaf) else leaf)
        chosen = torch.tensor(indices)
        return self._take(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)))


class ListSamples:
    """A list of samples, which `collate` makes a micro-batch of.

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
        """See `Samples`."""
        return self._batch[index]

    def default_costs(self) -> list[float]:
        """See `Samples`: the length of a sample, or of the first value of a mapping that has one."""
        return [_length(sample) for sample in self._batch]

    def part(self, indices: Sequence[int]) -> Any:
        """See `Samples`; dicts are copied, since `collate` may take labels out of them."""
        samples = (self._batch[index] for index in indices)
        return self._collate([copy.copy(s) if isinstance(s, dict | UserDict) else s for s in samples])


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
    if not callable(collate):
        raise wrong_type("collate", "a function of a list of samples", collate)
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise wrong_type("batch", "a list of samples, with collate", batch)
    return ListSamples(batch, collate)


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
