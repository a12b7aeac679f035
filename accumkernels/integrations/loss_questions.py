"""Questions to a loss, each answered by computing it on changed numbers, labels or rows; nothing is left changed."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..snapshots import RandomState, copied, refill

IGNORED = -100  # label of positions that have no loss
SMALL = 1e-4  # of a loss: what other rounding, or atomic additions of a GPU, may change
_ROUNDING = 1e-6  # of a loss in fp32: one label of 100,000 changes a mean by more
# 16-bit rounding changes a loss by less, and the negatives of a contrastive loss by far more.
COUPLED = 0.02
_ROWS = 2  # of a batch that may not fit
_TENSOR = 4096  # elements of a counter at the most

Inputs = Mapping[str, Any]
Compute = Callable[..., Tensor]  # of inputs and a number of items; see LossProbe._compute


def form(inputs: Any) -> tuple[Any, ...]:
    """What inputs have in common that a loss treats alike: their names, types and numbers of dimensions."""
    if not isinstance(inputs, Mapping):
        return (type(inputs),)
    return tuple(
        (name, value.dtype, value.dim()) if isinstance(value, Tensor) else (name, type(value))
        for name, value in sorted(inputs.items())
    )


def rows(inputs: Any) -> tuple[str, int] | None:
    """The first tensor of the inputs, and its length; a list of samples has a row for each of them."""
    if isinstance(inputs, (list, tuple)):
        return "samples", len(inputs)
    if not isinstance(inputs, Mapping):
        return None
    return next(((name, len(v)) for name, v in inputs.items() if isinstance(v, Tensor) and v.dim() > 0), None)


def first_rows(inputs: Any) -> Any:
    """Two rows of the inputs, in which every loss can be told from its mean."""
    found = rows(inputs)
    if isinstance(inputs, (list, tuple)) or found is None:
        return inputs if found is None else inputs[:_ROWS]
    cut = {k: v[:_ROWS] for k, v in inputs.items() if isinstance(v, Tensor) and v.dim() and len(v) == found[1]}
    return {**inputs, **cut}


def divided_part(compute: Compute, inputs: Inputs, items: Any) -> float:
    """The part of the loss that is divided by the number of items; nan if the loss is zero or not finite.

    What a `compute_loss` divides by the number of micro-batches is right as well, and counts as divided.
    """
    loss, of_twice = float(compute(inputs, items)), float(compute(inputs, items * 2, steps=2))
    if loss == 0 or not math.isfinite(loss) or not math.isfinite(of_twice):
        return math.nan
    return 2 * (loss - of_twice) / loss


def multiplied(compute: Compute, inputs: Inputs, items: Any) -> float:
    """Whether `compute_loss` multiplies by the number of ranks, as the Trainer's own does: 1 or 0."""
    loss, plain = float(compute(inputs, items)), float(compute(inputs, items, average=False))
    if loss == 0 or not math.isfinite(loss) or not math.isfinite(plain):
        return math.nan
    return float(abs(loss - plain) > SMALL * abs(loss))


def shifts_labels(compute: Compute, inputs: Inputs, items: Any) -> float:
    """Whether the loss stays as it is when the first label of each row changes: 1 or 0; nan if that is not known."""
    if not has_rows_of_labels(inputs):  # but those of another rank may have them, and wait for this one
        compute(inputs, items), compute(inputs, items)
        return math.nan
    labels = inputs["labels"].clone()
    classes = labels.unique()  # what the loss knows; any other class may end the process on a GPU
    first = labels[:, 0]
    labels[:, 0] = torch.where(first == classes[0], classes[-1], classes[0])
    loss, changed = compute(inputs, items), compute({**inputs, "labels": labels}, items)
    if len(classes) == 1:
        return math.nan
    change = abs(float(changed) - float(loss)) / max(abs(float(loss)), 1e-30)
    if not math.isfinite(change):
        return math.nan
    if change > _ROUNDING:
        return 0.0
    # A loss in 16 bit may hide a label's share.
    return 1.0 if torch.finfo(loss.dtype).eps < _ROUNDING else math.nan


def is_random(compute: Compute, inputs: Inputs, items: Any) -> float:
    """Whether the loss has random numbers in evaluation too, as in diffusion, so that other rows get others: 1 or 0."""
    losses = [float(compute(inputs, items, training=False, seed=seed)) for seed in (1, 2)]
    return float(abs(losses[0] - losses[1]) > SMALL * max(map(abs, losses)))


def couples_rows(compute: Compute, inputs: Inputs, items: Any) -> float:
    """Whether the loss changes if each row is there twice: 1 or 0, which is also the answer if that fails.

    A mean over rows stays as it is. The rows of a pair may be neighbours, or a half of the batch apart, so that a loss
    of pairs stays as it is for one of two orders.
    """
    found = rows(inputs)
    if found is None:
        return 0.0
    orders: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: torch.cat([t, t]),
        lambda t: t.repeat_interleave(2, dim=0),
    ]
    losses = []
    for order in orders:
        repeated = {
            name: order(value) if isinstance(value, Tensor) and value.dim() and len(value) == found[1] else value
            for name, value in inputs.items()
        }
        try:
            losses.append(float(compute(repeated, items, training=False)))
        except Exception:  # of code that the user has for batches of its own
            return 0.0
    size = max(map(abs, losses))
    return float(all(abs(loss - losses[0]) > COUPLED * size for loss in losses[1:]))


def weighs_otherwise(
    compute: Compute, inputs: Inputs, items: Any, weight: Callable[[Inputs], Any], tolerance: float
) -> float:
    """Whether the loss is another mean than `weight` says, so that those of two halves do not add up to it: 1 or 0.

    The answer is nan if the inputs cannot be halved, or if they add up and have the same weight in each row.
    """
    labels = inputs.get("labels")
    count = len(labels) if isinstance(labels, Tensor) and labels.dim() else 0
    of_rows = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    if count < 2 or any(len(value) != count for value in of_rows):
        halves = [inputs, inputs]
    else:
        halves = [
            {k: v[part] if isinstance(v, Tensor) and v.dim() else v for k, v in inputs.items()}
            for part in (slice(0, count // 2), slice(count // 2, count))
        ]
    try:
        whole, first, second = (float(compute(part, items, training=False)) for part in (inputs, *halves))
        w, v = (float(weight(half)) for half in halves)
    except Exception:  # of code that the user has for batches of its own
        return math.nan
    if halves[0] is inputs or w + v == 0 or whole == 0:
        return math.nan
    off = abs((w * first + v * second) / (w + v) - whole) / abs(whole)
    if off <= tolerance and w * (count - count // 2) != v * (count // 2):
        return 0.0
    return 1.0 if tolerance < off < math.inf else math.nan


def has_rows_of_labels(inputs: Inputs) -> bool:
    """Whether labels are classes along rows of positions, which a loss may shift."""
    labels = inputs.get("labels")
    return (
        isinstance(labels, Tensor)
        and labels.dim() == 2
        and labels.shape[1] > 1
        and not labels.is_floating_point()
        and "shift_labels" not in inputs
    )


@contextlib.contextmanager
def untouched(model: nn.Module, owner: object, *, without: Iterable[object] = ()) -> Iterator[None]:
    """Run forwards that leave no trace where code is known to leave some.

    Random state, the model's buffers, and the numbers, generators, small tensors, lists, dicts and sets among the
    attributes of `owner` and of the model's modules are restored: a subclass may count in `compute_loss`, a module in
    its forward.

    Args:
        model: The model.
        owner: The Trainer.
        without: Values of attributes that are left out, such as datasets.
    """
    random_state = RandomState()
    left_out = [id(value) for value in without]
    attributes = dict(vars(owner))
    # Not a module's parameters, buffers and parts, which FSDP2 replaces while it runs.
    of_modules = [
        (vars(m), {k: v for k, v in vars(m).items() if k not in _SLOTS and isinstance(v, _VALUES)}, set(vars(m)))
        for m in model.modules()
    ]
    generators = []
    tensors = [(buffer, buffer.clone()) for buffer in model.buffers()]
    containers: dict[int, tuple[Any, Any]] = {}
    queue = [v for found in (attributes, *(values for _, values, _ in of_modules)) for v in found.values()]
    while queue:
        value = queue.pop()
        if isinstance(value, Tensor) and value.numel() <= _TENSOR and not isinstance(value, nn.Parameter):
            tensors.append((value, value.clone()))
        elif isinstance(value, torch.Generator):
            generators.append((value, value.get_state()))
        elif isinstance(value, (dict, list, deque, set)) and id(value) not in containers and id(value) not in left_out:
            containers[id(value)] = value, copied(value)
            queue.extend(value.values() if isinstance(value, dict) else value)
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for tensor, content in tensors:
                tensor.copy_(content)
        for name in vars(owner).keys() - attributes.keys():
            delattr(owner, name)
        vars(owner).update(attributes)
        for current, before, names in of_modules:
            for name in [k for k in current.keys() - names if isinstance(current[k], (bool, int, float))]:
                del current[name]
            current.update(before)
        for generator, state in generators:
            generator.set_state(state)
        for container, content in containers.values():
            refill(container, content)
        random_state.restore()


_SLOTS = ("_parameters", "_buffers", "_modules")
_VALUES = (bool, int, float, torch.Generator, Tensor, dict, list, deque, set)
