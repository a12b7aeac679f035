"""Finds out what a Trainer's loss averages, by computing it with another number of items, other labels and more rows.

transformers' Trainer believes that a loss which is given `num_items_in_batch` is divided by it. Many are not
(https://github.com/huggingface/transformers/issues/47688): they are means over a micro-batch, and the Trainer adds them
up, so that the gradient is as many times too large as the window has micro-batches. And it goes by the name of the
model's class to count labels, though only the loss itself knows whether it leaves out the first label of each row.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss_questions import (
    COUPLED,
    SMALL,
    Compute,
    Inputs,
    couples_rows,
    divided_part,
    first_rows,
    form,
    has_rows_of_labels,
    is_random,
    multiplied,
    shifts_labels,
    untouched,
    weighs_otherwise,
)

ISSUE = "https://github.com/huggingface/transformers/issues/47688"
_MEAN = 0.1  # parts of a loss that is divided below which it is a mean: noise may look like a small part

_HALVED = 4  # micro-batches at the most; those whose rows weigh the same give no answer

_log = logging.getLogger(__name__)


class LossFacts(NamedTuple):
    """What was found out about a loss.

    Attributes:
        mean: Whether no part of it is divided by the number of items, so that it is the mean over a micro-batch.
        shifts: Whether it leaves out the first label of each row; None if that could not be found out.
        multiplied: Whether `compute_loss` has multiplied it by the number of ranks.
    """

    mean: bool
    shifts: bool | None = None
    multiplied: bool = True


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
        if self._trainer.takes_one:
            return
        forms: dict[Any, list[Any]] = {}
        for inputs in window:
            forms.setdefault(self._form(inputs), []).append(inputs)
        for kind, alike in forms.items():
            if kind not in self._facts:
                if self._trainer.splits:  # the whole batch may not fit
                    alike = [first_rows(inputs) for inputs in alike]
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
        if trainer.splits and adds_up and not told and items is None:
            raise ValueError(
                f"split: the losses of {type(trainer).__name__} get no num_items_in_batch, since inputs have no "
                "'labels', and it is not known whether those of a batch's parts add up: set loss_is_scaled_for_ga in "
                "the Trainer, to True if they do, to False if they are means"
            )
        if adds_up and not told and items is None and callable(trainer.compute_loss_func):
            self.warn(
                "compute_loss_func gets no num_items_in_batch, since inputs have no 'labels', and the Trainer adds its "
                "losses up as they are: set loss_is_scaled_for_ga = False in the Trainer if they are means"
            )
        divided = float(adds_up)
        if adds_up and not told and items is not None:
            divided = self._agreed(divided_part, alike, items)
            if math.isnan(divided):
                return None
        times = True
        if trainer.args.world_size > 1 and trainer.args.average_tokens_across_devices and items is not None:
            times = self._agreed(multiplied, alike, items) != 0
        mean = divided < _MEAN
        self._report(divided, times, items)
        if mean and isinstance(alike[0], Mapping):
            return LossFacts(mean, self._look_at_mean(alike, items), times)
        return LossFacts(mean, None, times)

    def _look_at_mean(self, alike: list[Inputs], items: Any) -> bool | None:
        """Whether a mean loss shifts labels; warn of what weights cannot make right, or other weights could."""
        trainer, name = self._trainer, type(self._trainer.model).__name__
        shifts = None
        asks = trainer.counts_labels
        if asks and not math.isnan(
            self._agreed(lambda _, i, __: 1 if has_rows_of_labels(i) else math.nan, alike, items)
        ):
            answer = self._agreed(shifts_labels, alike, items)
            shifts = None if math.isnan(answer) else bool(answer)
            if shifts is None:
                self.warn(
                    "cannot find out whether the loss leaves out the first label of each row, as causal models do; %s "
                    "are counted: override micro_batch_weight if the loss averages others",
                    "all but these" if trainer._loss_shifts_labels else "all labels",
                )
                return None
        if self._agreed(is_random, alike, items):
            return shifts
        if self._agreed(couples_rows, alike, items):
            self.warn(
                "the loss of %s is not a mean over rows: the same rows twice change it. If it couples the samples of a "
                "batch, as contrastive losses do, no weight makes micro-batches one batch: use "
                "accumkernels.integrations.transformers_coupled.CoupledAccumulationMixin. If it is a sum, "
                "return a mean",
                name,
            )
            return shifts
        precise = (
            not (trainer.args.bf16 or trainer.args.fp16) and next(trainer.model.parameters()).dtype == torch.float32
        )
        weighs = functools.partial(
            weighs_otherwise, weight=self._weight(shifts), tolerance=SMALL if precise else COUPLED
        )
        if trainer.counts_labels and self._agreed(weighs, alike, items, _HALVED) == 1:
            self.warn(
                "the loss of %s is not the mean over what micro_batch_weight counts, since the means of two halves of "
                "a micro-batch do not add up to it: override micro_batch_weight, to count what the loss averages",
                name,
            )
        return shifts

    def _weight(self, shifts: bool | None) -> Callable[[Inputs], Any]:
        """`micro_batch_weight` as it will be once it is known whether labels are shifted."""

        def weight(inputs: Inputs) -> Any:
            kind = self._form(inputs)
            self._facts[kind] = LossFacts(True, shifts)
            try:
                return self._trainer.micro_batch_weight(inputs)
            finally:
                del self._facts[kind]

        return weight

    def _agreed(
        self, ask: Callable[[Compute, Inputs, Any], float], alike: list[Inputs], items: Any, most: int | None = None
    ) -> float:
        """The answer for the first micro-batch that has one on any rank, of as many of them as `most`."""
        answer, steps = math.nan, self._trainer.args.gradient_accumulation_steps
        for index in range(steps if most is None else min(most, steps)):  # as often on all ranks
            own = float(ask(self._compute, alike[index % len(alike)], items))
            all_ranks = self._trainer.accelerator.gather(torch.tensor([own], device=self._trainer.args.device))
            answers = [a for a in all_ranks.tolist() if not math.isnan(a)]
            if answers:
                answer = answers[0]
                break
        return answer

    def _compute(
        self,
        inputs: Inputs,
        items: Any,
        training: bool = True,
        steps: int = 1,
        average: bool | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """The loss, as `training_step` computes it, with the same random numbers each time.

        Args:
            inputs: Of the micro-batch.
            items: The number of items.
            training: The mode of the model.
            steps: A factor of the number of micro-batches.
            average: In place of `average_tokens_across_devices`.
            seed: Of other random numbers.
        """
        trainer, args = self._trainer, self._trainer.args
        averages = args.average_tokens_across_devices
        without = trainer.train_dataset, trainer.eval_dataset
        eager = torch.compiler.set_stance("force_eager")  # or more would be compiled, for sizes that never come again
        with eager, untouched(trainer.model, trainer, without=without), trainer.compute_loss_context_manager():
            trainer.model.train(training)
            if seed is not None:
                torch.manual_seed(seed)
            trainer.current_gradient_accumulation_steps *= steps
            inputs = copy.copy(inputs)  # which a loss of the user's may change in place
            for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
                inputs[name] = value.clone() if isinstance(value, Tensor) else value  # type: ignore[index]
            try:
                args.average_tokens_across_devices = averages if average is None else average
                inputs = trainer._prepare_inputs(inputs)
                return trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=items).detach()
            finally:
                args.average_tokens_across_devices = averages

    def _report(self, divided: float, times: bool, items: Any) -> None:
        """Warn of what the Trainer makes of a loss that is not, or not wholly, divided by the number of items."""
        trainer, name = self._trainer, type(self._trainer.model).__name__
        ranks = trainer.args.world_size if trainer.args.average_tokens_across_devices and times else 1
        most = trainer.args.gradient_accumulation_steps * ranks
        if divided < _MEAN and trainer.adds_up(items):
            self.warn(
                "the loss of %s ignores num_items_in_batch: transformers.Trainer would add up means over "
                "micro-batches, up to %d times too much (%s). Here each is weighted by micro_batch_weight, which "
                "you may override",
                name,
                most,
                ISSUE,
            )
        elif divided >= _MEAN and abs(divided - 1) > SMALL:
            if trainer.splits:
                raise ValueError(
                    f"split: a part of the loss of {type(trainer.model).__name__} ({abs(1 - divided):.2g} of it) is "
                    "not divided by num_items_in_batch, as a router's auxiliary loss may be, and would be added once "
                    "for each part of a batch: divide it in compute_loss, or return a mean there and set "
                    "loss_is_scaled_for_ga = False"
                )
            self.warn(
                "a part of the loss of %s (%s of it) is not divided by num_items_in_batch, as a router's auxiliary "
                "loss may be, and is added up over a window, up to %d times, as in transformers.Trainer: divide it in "
                "compute_loss, or return a mean there and set loss_is_scaled_for_ga = False",
                name,
                f"{abs(1 - divided):.2g}",
                most,
            )
        if divided >= _MEAN and not times:
            self.warn(
                "compute_loss divides by the items of all ranks, which are then averaged, as in transformers.Trainer: "
                "the gradient is %d times too small. Multiply the loss by accelerator.num_processes, as the Trainer's "
                "compute_loss does, or set average_tokens_across_devices=False",
                trainer.args.world_size,
            )
