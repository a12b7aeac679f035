"""Finds out what a Trainer's loss averages, by computing it with another number of items, other labels and more rows.

transformers' Trainer believes that a loss which is given `num_items_in_batch` is divided by it. Many are not
(https://github.com/huggingface/transformers/issues/47688): they are means over a micro-batch, and the Trainer adds them
up, so that the gradient is as many times too large as the window has micro-batches. And it goes by the name of the
model's class to count labels, though only the loss itself knows whether it leaves out the first label of each row.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..snapshots import RandomState, copied, refill

IGNORED = -100  # label of positions that have no loss
# Of a loss's relative change, which is rounding in fp32: one label of 100,000 changes the mean by more.
_ROUNDING = 1e-6
# Of a loss's change: 16-bit rounding changes it by less, and the negatives of a contrastive loss by far more.
_COUPLED = 0.02

ISSUE = "https://github.com/huggingface/transformers/issues/47688"

_log = logging.getLogger(__name__)

Inputs = Mapping[str, Any]
Compute = Callable[..., Tensor]  # of inputs, the number of items, and whether in training mode


class LossFacts(NamedTuple):
    """What was found out about a loss.

    Attributes:
        mean: Whether no part of it is divided by the number of items, so that it is the mean over a micro-batch.
        shifts: Whether it leaves out the first label of each row; None if that could not be found out.
    """

    mean: bool
    shifts: bool | None = None


class LossProbe:
    """Computes a Trainer's losses to find out what they average, once for each form of inputs.

    Several ranks find out together, about the first form, since a forward may communicate.

    Args:
        trainer: A `FusedAccumulationMixin`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._facts: dict[Any, LossFacts] = {}
        self._warned: set[str] = set()

    def facts(self, inputs: Any) -> LossFacts | None:
        """What is known about the loss of these inputs."""
        return self._facts.get(self._form(inputs))

    def shifts(self, inputs: Any) -> bool:
        """Whether the loss leaves out the first label of each row; as the model's class says, if nothing else does."""
        facts = self.facts(inputs)
        if facts is None or facts.shifts is None:
            return self._trainer._loss_shifts_labels
        return facts.shifts

    def warn(self, message: str, *values: Any) -> None:
        """Log a warning, once."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message, *values)

    def look_at(self, window: list[Any], items: Tensor | int | None) -> None:
        """Find out what the losses of a window's micro-batches average, for forms of inputs that are new.

        Args:
            window: The inputs of each micro-batch.
            items: The `num_items_in_batch` of the window.
        """
        forms: dict[Any, list[Any]] = {}
        for inputs in window:
            forms.setdefault(self._form(inputs), []).append(inputs)
        for kind, alike in forms.items():
            if kind not in self._facts:
                facts = self._find_out(alike, items)
                if facts is not None:
                    self._facts[kind] = facts

    def _form(self, inputs: Any) -> Any:
        return form(inputs) if self._trainer.args.world_size == 1 else None

    def _find_out(self, alike: list[Any], items: Tensor | int | None) -> LossFacts | None:
        """None if the losses of these micro-batches do not tell."""
        trainer = self._trainer
        adds_up = trainer.adds_up(items)
        told = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
        if adds_up and not told and items is None and callable(trainer.compute_loss_func):
            self.warn(
                "compute_loss_func gets no num_items_in_batch, since inputs have no 'labels', and the Trainer adds its "
                "losses up as they are: set loss_is_scaled_for_ga = False in the Trainer if they are means"
            )
        shifts = None
        divided = float(adds_up)
        if adds_up and not told and items is not None:
            divided = self._agreed(divided_part, alike, items)
            if math.isnan(divided):
                return None
            self._report(divided)
        mean = divided < _ROUNDING
        accumulates = trainer.args.gradient_accumulation_steps > 1
        if mean and accumulates and isinstance(alike[0], Mapping) and self._agreed(couples_rows, alike, items):
            self.warn(
                "the loss of %s is not a mean over rows: the same rows twice change it. If it couples the samples of a "
                "batch, as contrastive losses do, no weight makes micro-batches one batch: use "
                "accumkernels.integrations.transformers_coupled.CoupledAccumulationMixin",
                type(trainer.model).__name__,
            )
        if mean and trainer.counts_labels and isinstance(alike[0], Mapping) and has_rows_of_labels(alike[0]):
            answer = self._agreed(shifts_labels, alike, items)
            shifts = None if math.isnan(answer) else bool(answer)
            if shifts is None:
                self.warn(
                    "cannot find out whether the loss leaves out the first label of each row, as causal models do; %s "
                    "are counted: override micro_batch_weight if the loss averages others",
                    "all but these" if trainer._loss_shifts_labels else "all labels",
                )
        return LossFacts(mean, shifts)

    def _agreed(self, ask: Callable[[Compute, Inputs, Any], float], alike: list[Inputs], items: Any) -> float:
        """The answer for the first micro-batch that has one on any rank."""
        answer = math.nan
        for index in range(self._trainer.args.gradient_accumulation_steps):  # as often on all ranks
            found = torch.tensor(
                [ask(self._compute, alike[index % len(alike)], items)], device=self._trainer.args.device
            )
            answers = [a for a in self._trainer.accelerator.gather(found).tolist() if not math.isnan(a)]
            if answers:
                answer = answers[0]
                break
        return answer

    def _compute(self, inputs: Inputs, items: Any, training: bool = True) -> Tensor:
        """The loss, as `training_step` computes it, with the same random numbers each time; or without dropout."""
        trainer = self._trainer
        without = trainer.train_dataset, trainer.eval_dataset
        with untouched(trainer.model, trainer, without=without), trainer.compute_loss_context_manager():
            trainer.model.train(training)
            inputs = trainer._prepare_inputs(copy.copy(inputs))
            return trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=items)

    def _report(self, divided: float) -> None:
        """Warn of what the Trainer makes of a loss that is not, or not wholly, divided by the number of items."""
        trainer = self._trainer
        ranks = trainer.args.world_size if trainer.args.average_tokens_across_devices else 1
        times = trainer.args.gradient_accumulation_steps * ranks
        if divided < _ROUNDING:
            self.warn(
                "the loss of %s ignores num_items_in_batch: transformers.Trainer would add up means over "
                "micro-batches, up to %d times too much (%s). Here each is weighted by micro_batch_weight, which "
                "you may override",
                type(trainer.model).__name__,
                times,
                ISSUE,
            )
        elif abs(divided - 1) > _ROUNDING:
            self.warn(
                "a part of the loss of %s (%s of it) is not divided by num_items_in_batch, as a router's auxiliary "
                "loss may be, and is added up over a window, up to %d times, as in transformers.Trainer: divide it in "
                "compute_loss, or return a mean there and set loss_is_scaled_for_ga = False",
                type(trainer.model).__name__,
                f"{abs(1 - divided):.2g}",
                times,
            )


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


def divided_part(compute: Compute, inputs: Inputs, items: Any) -> float:
    """The part of the loss that is divided by the number of items; nan if the loss is zero or not finite."""
    loss, of_twice = float(compute(inputs, items)), float(compute(inputs, items * 2))
    if loss == 0 or not math.isfinite(loss) or not math.isfinite(of_twice):
        return math.nan
    return 2 * (loss - of_twice) / loss


def shifts_labels(compute: Compute, inputs: Inputs, items: Any) -> float:
    """Whether the loss stays as it is when the first label of each row changes: 1 or 0; nan if that is not known."""
    labels = inputs["labels"].clone()
    first = labels[..., 0]
    labels[..., 0] = torch.where(first > 0, first - 1, torch.ones_like(first))  # classes that every loss has
    loss = compute(inputs, items)
    try:
        changed = compute({**inputs, "labels": labels}, items)
    except (IndexError, RuntimeError, ValueError):
        return math.nan
    change = abs(float(changed) - float(loss)) / max(abs(float(loss)), 1e-30)
    if not math.isfinite(change):
        return math.nan
    if change > _ROUNDING:
        return 0.0
    # A loss in 16 bit may hide a label's share.
    return 1.0 if torch.finfo(loss.dtype).eps < _ROUNDING else math.nan


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
    return float(all(abs(loss - losses[0]) > _COUPLED * size for loss in losses[1:]))


def has_rows_of_labels(inputs: Inputs) -> bool:
    """Whether labels are classes along rows of positions, which a loss may shift."""
    labels = inputs.get("labels")
    return (
        isinstance(labels, Tensor)
        and labels.dim() > 1
        and labels.shape[-1] > 1
        and not labels.is_floating_point()
        and "shift_labels" not in inputs
    )


@contextlib.contextmanager
def untouched(model: nn.Module, owner: object, *, without: Iterable[object] = ()) -> Iterator[None]:
    """Run forwards that leave no trace: random state, the model's buffers and the counters of `owner` are restored.

    Args:
        model: Whose buffers are restored.
        owner: Its attributes are restored, with the contents of lists and dicts, since a subclass may
            count in `compute_loss`.
        without: Values of attributes that are left out, such as datasets.
    """
    random_state = RandomState()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    attributes = dict(vars(owner))
    containers: dict[int, tuple[Any, Any]] = {}
    queue = [value for value in attributes.values() if not any(value is other for other in without)]
    while queue:
        value = queue.pop()
        if isinstance(value, (dict, list, deque)) and id(value) not in containers:
            containers[id(value)] = value, copied(value)
            queue.extend(value.values() if isinstance(value, dict) else value)
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
        for name in vars(owner).keys() - attributes.keys():
            delattr(owner, name)
        vars(owner).update(attributes)
        for container, content in containers.values():
            refill(container, content)
        random_state.restore()
