"""How many items losses average, as far as their graphs say so for certain, and whether these are unequal in a window.

A loss that is no mean, or none of a kind that is known here, says nothing: a wrong warning would be worse than none.
`is_plain_mean` is asked for a proof instead, so there whatever is not known may be another mean. Nothing is unpacked
that a hook has packed. For a warning, devices are read at most twice.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import is_capturing

Node = Any
_ONE_TO_ONE = frozenset({"AliasBackward0", "CloneBackward0", "NegBackward0", "ToCopyBackward0"})
_RESHAPE = frozenset(
    {"ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0"}
)
_MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
_SUMS = frozenset({"SumBackward0", "SumBackward1"})
_STACKS = frozenset({"StackBackward0", "CatBackward0"})  # of losses, whose number says nothing about samples
_ELEMENTWISE = frozenset(
    {
        "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
        "HuberLossBackward0",
        "MseLossBackward0",
        "SmoothL1LossBackward0",
        "SoftMarginLossBackward0",
    }
)
_LABELS = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_OF_TENSORS_ALONE = (  # ops whose result depends on the tensors that are their inputs in the graph, if all of these are
    _ONE_TO_ONE | _RESHAPE | _MEANS | _SUMS | _STACKS
    | {"AbsBackward0", "AddBackward0", "DotBackward0", "ExpBackward0", "LinalgVectorNormBackward0", "MulBackward0"}
    | {"PowBackward0", "SqrtBackward0", "SubBackward0"}
)  # fmt: skip
_OF_WEIGHTS = frozenset({"TBackward0", "ToCopyBackward0", "TransposeBackward0"})
_TAKES_OUT = frozenset({"IndexBackward0", "MaskedSelectBackward0", "PdistBackward0"})
_MOVES = frozenset({"FlipBackward0", "RollBackward0"})
_PAIRS = frozenset({"CdistBackward0", "EuclideanDistBackward0", "MmBackward0"})  # of a shape that says nothing
_MEAN, _SUM = 1, 2  # of `reduction`
_WEIGHTS = "weight", "pos_weight"
_MOST_NODES = 24


class Items(NamedTuple):
    """What one loss averages.

    Attributes:
        kind: Losses are compared only with those of the same kind: nodes on the way to the mean, and factors.
        shape: Of the tensor that is averaged, as far as it says how many samples there are; may be empty.
        number: How many items there are; a tensor if only the device knows.
    """

    kind: tuple[object, ...]
    shape: tuple[int, ...]
    number: float | Tensor


def items_of(node: Node, nodes_left: list[int], start: tuple[object, ...] = ()) -> Items | None:
    """Follow the graph from a loss of one element to its mean.

    Args:
        node: The last node of the loss's graph.
        nodes_left: How many may be looked at, in one entry that is counted down; a loss that is a sum of many has more.
        start: What the kind begins with.

    Returns:
        What it averages; None if the way is not known.
    """
    way = list(start)
    divisor: float | Tensor | None = None  # the last one, which may be the number of items of a sum
    while node is not None and nodes_left[0] > 0 and node.next_functions:
        nodes_left[0] -= 1
        name = node.name()
        way.append(name)
        inner = node.next_functions[0][0]
        if name in _MEANS or name in _SUMS:
            if inner is None or inner.name() in _STACKS:
                return None
            shape = tuple(node._saved_self_sym_sizes)
            if name in _MEANS:
                return None if isinstance(divisor, Tensor) else Items((*way, divisor), shape, float(math.prod(shape)))
            masked = inner.name() == "MulBackward0" and None in (child for child, _ in inner.next_functions)
            return _of_sum(way, shape, divisor, math.prod(shape) if masked else 0)
        if name in _ELEMENTWISE or name in _LABELS:
            return _of_loss(node, way, divisor)
        if name in ("AddBackward0", "SubBackward0") and node.next_functions[1][0] is not None:
            first, second = (items_of(child, nodes_left) for child, _ in node.next_functions)
            return None if isinstance(divisor, Tensor) else _of_both(first, second, [*way, divisor])
        if name in ("DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1"):
            factor = _constant(node, name)
            if factor is None:
                return None
            if name[:3] == "Div":
                factor, divisor = divisor, factor
            if isinstance(factor, Tensor):
                return None
            way.append(factor)  # a loss that the loop has weighted itself is of a kind of its own
        elif name not in _ONE_TO_ONE and name not in _RESHAPE:
            return None
        node = inner
    return None


def is_divided_sum(node: Node) -> bool:
    """Whether the last node of a loss's graph divides a sum by the number of its items, which makes it a mean."""
    inner = node.next_functions[0][0]
    sums = inner is not None and (inner.name() in _SUMS or getattr(inner, "_saved_reduction", 0) == _SUM)
    return sums and items_of(node, [2]) is not None


def is_plain_mean(loss: Tensor, samples: int, marked: float) -> bool | None:
    """Whether a loss's graph proves that it is a mean over its samples, as of all their items or as many of each.

    Args:
        loss: The loss; the device is read for the labels that it ignores, and for what it is divided by.
        samples: Their number.
        marked: The number of their items that count, where the samples have the same number of them.

    Returns:
        None if it looks like one, but could not show if it were none: of one sample, which has no other to be paired
        with and any number of items, or with factors from outside of the graph, which may be of all samples.
    """
    if not all(_is_plain_summand(node, divisor, samples, marked) for node, divisor in _summands(loss)):
        return False
    return None if samples == 1 or _has_factors(loss) else True


def _is_plain_summand(node: Node, divisor: float | Tensor | None, samples: int, marked: float) -> bool:
    if _is_penalty(node):
        return True
    name, inner = node.name(), node.next_functions[0][0]
    if inner is None or inner.name() in _STACKS or _mixes_samples(node, samples):
        return False
    if name in _MEANS or name in _SUMS:
        shape, is_sum = tuple(node._saved_self_sym_sizes), name in _SUMS
    elif (name in _ELEMENTWISE or name in _LABELS) and node._saved_reduction:
        shape, is_sum = _shape_of(node), node._saved_reduction == _SUM
        if name in _LABELS:
            shape = shape[:1] + shape[2:] if len(shape) > 1 else ()  # without classes
    else:
        return False
    if is_sum:  # one that is divided by samples, or by all items of each, is a mean over samples
        items = itertools.accumulate(shape, operator.mul) if shape and shape[0] % samples == 0 else ()
        return divisor is not None and float(divisor) in (samples, marked, *items)
    number: float | Tensor | None = math.prod(shape)
    if name in _LABELS and node._saved_weight is None and _is_plain(node, "total_weight"):
        number = _known(node._saved_total_weight)
    if number is None or (labels := float(number)) in (samples, marked):
        return True
    # Else of as many items of each sample, which come along the first dimension.
    return labels >= math.prod(shape) and labels % samples == 0 == shape[0] % samples


def _is_penalty(node: Node) -> bool:
    """Whether a node computes something of weights and nothing else, which is the same for any samples."""
    nodes = [node]
    for _ in range(_MOST_NODES):
        if not nodes:
            return True
        node = nodes.pop()
        if node.next_functions:
            children = [child for child, _ in node.next_functions]
            if node.name() not in _OF_TENSORS_ALONE or None in children:
                return False
            nodes += children
    return False


def _mixes_samples(node: Node, samples: int) -> bool:
    """Whether a step on one of the ways to the node combines samples, takes some items, or compares each with each."""
    nodes: deque[tuple[Node, tuple[int, ...]]] = deque([(node, ())])
    for _ in range(_MOST_NODES):
        if not nodes:
            break
        node, made = nodes.popleft()
        name = node.name()
        if name in _TAKES_OUT:
            return True
        dims = getattr(node, "_saved_dim", None)  # unsigned: -1 is 2**64 - 1
        along = dims if isinstance(dims, tuple) else () if dims is None else (dims,)
        if name in _MOVES:
            along = node._saved_dims or (0,)
        is_new, of_weight = True, False
        for child, output in node.next_functions:
            if child is None:
                continue
            meta = child._input_metadata[output]
            if meta.is_nested_tensor:  # of samples with unequal numbers of items
                return True
            shape = tuple(meta.shape)
            if 0 in along or 2**64 - len(shape) in along:
                return True
            is_new = is_new and (shape != made or name in _PAIRS)
            if _is_weight(child):
                of_weight = True
                continue
            nodes.append((child, shape))
            # A number of all samples, or one of them, meets each.
            one = not shape or (len(shape) == len(made) and shape[0] == 1 < made[0])
            if made and one and not _is_penalty(child):
                return True
        if len(made) > 1 and 1 < made[0] == made[1] and made[0] % samples == 0 and is_new and not of_weight:
            return True
    return False


def _has_factors(loss: Tensor) -> bool:
    """Whether anything on the way to a loss is multiplied by what has no graph and is no number of Python's."""
    nodes: deque[Node] = deque([loss.grad_fn])
    for _ in range(_MOST_NODES):
        if not nodes:
            break
        node = nodes.popleft()
        factors = [name for name in _WEIGHTS if node.name() in _ELEMENTWISE and hasattr(node, "_raw_saved_" + name)]
        for index, (child, _) in enumerate(node.next_functions):
            if child is not None:
                nodes.append(child)
            elif node.name() in ("DivBackward0", "MulBackward0"):
                factors.append(("self", "other")[index])
        if not all(_is_plain(node, name) and _is_python_number(getattr(node, "_saved_" + name)) for name in factors):
            return True
    return False


def _is_python_number(factor: Tensor | None) -> bool:
    """Whether a factor was a number of Python's, which promotes no tensor of its kind, or is none."""
    if factor is None:
        return True
    kind = {torch.float64: torch.float16, torch.int64: torch.int8}.get(factor.dtype)
    return kind is not None and factor.dim() == 0 and torch.result_type(factor, torch.zeros((), dtype=kind)) == kind


def _is_weight(node: Node) -> bool:
    """Whether a node is a parameter, or one that is cast or transposed."""
    while node.next_functions:
        if node.name() not in _OF_WEIGHTS or node.next_functions[0][0] is None:
            return False
        node = node.next_functions[0][0]
    return True


def has_class_weights(loss: Tensor) -> bool:
    """Whether a loss, or a summand of it, is a mean with class weights that differ; reads the device."""
    for node, _ in _summands(loss):
        if node.name() in _LABELS and node._saved_reduction == _MEAN and _is_plain(node, "weight"):
            weight = node._saved_weight
            if type(weight) is Tensor and weight.numel() and bool((weight != weight[0]).any()):
                return True
    return False


def _summands(loss: Tensor) -> Iterator[tuple[Node, float | Tensor | None]]:
    """Yield the nodes whose results a loss is the sum of, up to constants, and what divides them, if anything does."""
    nodes: list[tuple[Node, float | Tensor | None]] = [(loss.grad_fn, None)]
    for _ in range(_MOST_NODES):
        if not nodes:
            return
        node, divisor = nodes.pop()
        if node is None or not node.next_functions:
            continue
        name = node.name()
        if name in ("AddBackward0", "SubBackward0"):
            nodes += [(child, divisor) for child, _ in node.next_functions]
        elif name in ("DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1"):
            factor = _constant(node, name)
            if factor is None:
                yield node, divisor
                continue
            if name[:3] == "Div":
                divisor = factor if divisor is None else divisor * factor
            nodes.append((node.next_functions[0][0], divisor))
        elif name in _ONE_TO_ONE or name in _RESHAPE:
            nodes.append((node.next_functions[0][0], divisor))
        else:
            yield node, divisor


def _of_loss(node: Node, way: list[object], divisor: float | Tensor | None) -> Items | None:
    """Read one of torch's own losses."""
    if node.next_functions[0][0] is None or node._saved_reduction == 0:
        return None
    mean = node._saved_reduction == _MEAN
    shape = _shape_of(node)
    labels: float | Tensor | None = None
    if way[-1] in _LABELS:
        if len(shape) < 2 or not _is_plain(node, "weight") or not _is_plain(node, "total_weight"):
            return None
        way.append(shape[1])  # classes
        shape = (shape[0], *shape[2:])
        if node._saved_weight is None:
            labels = _known(node._saved_total_weight)  # those that are not ignored
            if labels is None:
                return None
            if len(shape) > 1 and shape[1] == 1:  # torch's view of [rows, classes, length], whose items are tokens
                shape = shape[:1]
    if mean:
        number = float(math.prod(shape)) if labels is None else labels
        return None if isinstance(divisor, Tensor) else Items((*way, divisor), shape, number)
    return _of_sum(way, shape, divisor, labels=labels)


def _shape_of(node: Node) -> tuple[int, ...]:
    """The shape of what one of torch's own losses gets."""
    inner, output = node.next_functions[0]
    return tuple([int(size) for size in inner._input_metadata[output].shape])


def _of_sum(
    way: list[object],
    shape: tuple[int, ...],
    divisor: float | Tensor | None,
    most: int = 0,
    labels: float | Tensor | None = None,
) -> Items | None:
    """Make the items of a sum that was divided by their number.

    Args:
        way: Nodes and factors before it.
        shape: Of what is summed.
        divisor: Maybe the number of items. It is one if the shape says so: a sum may be divided by anything.
        most: The most items that a mask may leave; 0 if there is none.
        labels: How many labels are not ignored.
    """
    if isinstance(divisor, Tensor):
        return Items(tuple(way), (), divisor) if most else None
    known = divisor in (*shape[:1], math.prod(shape), labels if isinstance(labels, float) else None)
    if divisor is None or not (known or (0 < divisor < most and divisor.is_integer() and divisor not in shape)):
        return None
    return Items(tuple(way), (), divisor)


def _of_both(first: Items | None, second: Items | None, way: list[object]) -> Items | None:
    """Join what two summands average, if it is the same: the same items, or all elements of as many samples."""
    if first is None or second is None:
        return None
    fewer, more = first, second
    if isinstance(first.number, Tensor) or isinstance(second.number, Tensor):
        if first.shape != second.shape:
            return None
    elif first.number != second.number:
        whole = all(item.shape and item.number == math.prod(item.shape) for item in (first, second))
        if not whole or first.shape[0] != second.shape[0]:
            return None
        fewer, more = sorted((first, second), key=lambda item: float(item.number))
    return fewer._replace(kind=(*way, *fewer.kind, *more.kind))


def _constant(node: Node, name: str) -> float | Tensor | None:
    """Return the second operand if it is a constant (see `_known`), else None."""
    if name[-1] == "1":
        return float(node._saved_other)
    if node.next_functions[1][0] is not None or not _is_plain(node, "other"):
        return None
    return _known(node._saved_other)


def _is_plain(node: Node, name: str) -> bool:
    """Whether no hook has packed what a node has saved."""
    return getattr(node, f"_raw_saved_{name}").unpack_hook is None


def _known(number: Tensor) -> float | Tensor | None:
    """Return a number's value, or the tensor itself if reading it would wait for a device; None if it is none."""
    if type(number) is not Tensor or number.dim() != 0 or number.is_complex():  # such as a FakeTensor
        return None
    # not item(): tolist() is no op that a dispatch mode would see
    return float(number.tolist()) if number.is_cpu else number  # type: ignore[arg-type]


def items_at(loss: Tensor, node: Node, caller: Any) -> Items | None:
    """What a loss averages; None if that is not known.

    Args:
        loss: The loss.
        node: The last node of its graph that the loop has made.
        caller: The frame that has called backward, if any. A loop that calls it in two places may want it so: a
            discriminator's real and generated samples, new ones and those of a memory.
    """
    if loss.numel() != 1 or caller is None:
        return None
    return items_of(node, [_MOST_NODES], (id(caller.f_code), caller.f_lasti))


def unequal_items(found: Sequence[Items | None], once: set[str]) -> str | None:
    """Return the numbers of items, if they differ in a window of losses that were given without a weight: "8, 8, 3".

    Args:
        found: What the losses average; see `items_at`.
        once: Gets what was read from a device, which is not read again.
    """
    kinds: dict[tuple[object, ...], list[Items]] = {}
    for items in found:
        if items is not None:
            kinds.setdefault(items.kind, []).append(items)
    for alike in kinds.values():
        numbers: list[Any] = list(map(_number, alike))
        if len(alike) > 1 and {*map(type, numbers)} != {float}:
            numbers = _read(alike, once)
        if len(set(numbers)) < 2:
            continue
        # As many samples of another size, such as images of another resolution, may be meant to count the same.
        sizes, samples = ({items.shape[cut] for items in alike} for cut in (slice(1, None), slice(1)))
        if len(sizes) == 1 or len(samples) > 1:
            texts = [f"{number:g}" for number in numbers]
            return ", ".join(texts) if len(texts) < 9 else f"{', '.join(texts[:7])}, ..., {texts[-1]}"
    return None


_number = operator.attrgetter("number")


def _read(alike: list[Items], once: set[str]) -> list[float]:
    """Read numbers from their device, once where shapes differ, and once where they do not; empty if they are none."""
    tensors = [items.number for items in alike if isinstance(items.number, Tensor)]
    several = len({items.shape for items in alike}) > 1
    if ("items of several shapes" if several else "items") in once or is_capturing(tensors[0].device):
        return []
    once.update(("items of several shapes", "items") if several else ("items",))
    if len(tensors) < len(alike):
        return []
    read: list[float] = torch.stack([number.double() for number in tensors]).tolist()
    return read if all(map(float.is_integer, read)) else []
