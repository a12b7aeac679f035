"""Handles batches as trees: tensors in containers of any kind, with samples along the first dimension."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves of a tree, whose containers keep their class and what else they hold."""
    if type(tree) is dict:
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = tree_map(function, value)
        return mapped
    if isinstance(tree, Mapping):
        return type(tree)({key: tree_map(function, value) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(function, value) for value in tree)
    if _is_record(tree):
        record = copy.copy(tree)
        for field in dataclasses.fields(tree):  # also where they are frozen, or no arguments of the constructor
            object.__setattr__(record, field.name, tree_map(function, getattr(tree, field.name)))
        return record
    return function(tree)


def tree_leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its place, such as `batch['inputs'][0]`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tree_leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from tree_leaves(value, f"{path}[{index}]")
    elif _is_record(tree):
        for field in dataclasses.fields(tree):
            yield from tree_leaves(getattr(tree, field.name), f"{path}.{field.name}")
    else:
        yield path, tree


def samples(tree: Any) -> int:
    """Count the samples of a batch: the size of the first dimension, which all its tensors must share.

    Tensors without dimensions and other leaves do not count.

    Raises:
        ValueError: no tensor has a dimension, or they disagree; names both.
    """
    first: tuple[str, int] | None = None
    for path, leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            if first is None:
                first = path, len(leaf)
            elif len(leaf) != first[1]:
                raise ValueError(
                    f"{path} has {len(leaf)} samples (its first dimension), {first[0]} has {first[1]}; all tensors of "
                    "a batch must have the same number"
                )
    if first is None:
        raise ValueError("batch has no tensor with a dimension along which its samples could be counted")
    return first[1]


def slice_samples(tree: Any, start: int, stop: int, count: int) -> Any:
    """Take samples `start` to `stop` of a batch of `count`, as views of its tensors.

    A list or tuple without tensors and with one item per sample (texts, file names) is sliced as well; other leaves go
    unchanged into every slice.
    """
    if isinstance(tree, tuple | list) and len(tree) == count and not hasattr(tree, "_fields"):
        if not any(isinstance(leaf, Tensor) for _, leaf in tree_leaves(tree)):
            return tree[start:stop]
    if isinstance(tree, Mapping):
        cut = {key: slice_samples(value, start, stop, count) for key, value in tree.items()}
        return cut if type(tree) is dict else type(tree)(cut)  # type: ignore[call-arg]
    if isinstance(tree, tuple | list):
        items = [slice_samples(value, start, stop, count) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree[start:stop] if isinstance(tree, Tensor) and tree.dim() > 0 else tree


def to_device(tree: Any, device: torch.device) -> Any:
    """Move the tensors of a tree to `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
