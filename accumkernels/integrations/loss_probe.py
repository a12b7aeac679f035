"""Finds out whether a Trainer's loss is divided by the number of items, a sum or a mean, by computing it again.

transformers' Trainer believes that a loss which is given `num_items_in_batch` is divided by it. Many are not
(https://github.com/huggingface/transformers/issues/47688): they are means over a micro-batch, and the Trainer adds them
up, so that the gradient is as many times too large as the window has micro-batches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import logger
from ..hooks import eagerly
from ..snapshots import Snapshot
from ..splitting.batches import form

DIVIDED, SUM, MEAN = "divided", "sum", "mean"
IGNORED = -100  # label of positions that have no loss
ISSUE = "https://github.com/huggingface/transformers/issues/47688"

_FOLLOWS = 0.1  # part of a loss that the number divides, from which on it follows the number: noise may look like less
_ROUNDING = 1e-4  # of a loss: what other rounding, or atomic additions of a GPU, may change
_SUM = 0.02  # of a sum: more than 16-bit rounding changes
_ROWS = 2  # of a batch that may not fit
_TIMES = 3  # not twice: a contrastive loss of two rows goes from log 2 to log 4

_log = logger(__name__)


class LossProbe:
    """Computes a Trainer's losses to find out how they are normalized, once for each form of inputs.

    Several ranks find out together, about the first form, since a forward may communicate.

    Args:
        trainer: A `FusedAccumulationMixin`.

    Attributes:
        runs: Whether a loss is computed to find out, of which nothing is to be logged.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._answers: dict[Any, str | None] = {}
        self._shifts: dict[Any, bool | None] = {}
        self._warn = functools.cache(_log.warning)  # each message once
        self.runs = False

    def normalization(self, inputs: Any) -> str | None:
        """`DIVIDED`, `SUM` or `MEAN`; None if the loss of these inputs is not known."""
        return self._answers.get(self._form(inputs))

    def shifts(self, inputs: Any) -> bool | None:
        """Whether the mean of these inputs leaves out the first label of each row; None if that is not known."""
        return self._shifts.get(self._form(inputs))

    def ask(self, window: list[Any], items: Tensor | int | None) -> None:
        """Find out about forms of inputs that are new.

        Args:
            window: The inputs of each micro-batch.
            items: The `num_items_in_batch` of the window.
        """
        forms: dict[Any, list[Any]] = {}
        for inputs in window:
            if self.normalization(inputs) is None:
                forms.setdefault(self._form(inputs), []).append(inputs)
        for kind, alike in forms.items():
            self._answers[kind] = answer = self._trainer.declared_normalization or self._find_out(alike, items)
            if answer == MEAN:
                self._shifts[kind] = self._find_shift(alike, items)
                if self._trainer.weighs_by_default:
                    self._report_mean(alike[0], items)

    def _form(self, inputs: Any) -> Any:
        """What inputs that a loss treats alike have in common."""
        return form(inputs) if self._trainer.args.world_size == 1 and isinstance(inputs, Mapping) else None

    def _find_out(self, alike: list[Any], items: Tensor | int | None) -> str | None:
        if self._trainer.adds_up(items):
            divided = self._on_all_ranks(self._divided_part, alike, items)
            if math.isnan(divided):
                return None
            if divided >= _FOLLOWS:
                self._check_rest(abs(1 - divided))
                return DIVIDED
        growth = self._on_all_ranks(self._growth, alike, items)
        return SUM if abs(growth - _TIMES) < _SUM * _TIMES else MEAN

    def _divided_part(self, inputs: Any, items: Any) -> float:
        """The part of the loss that twice the number halves; nan if the loss is zero or not finite.

        What a `compute_loss` divides by the number of micro-batches is right as well, and counts as divided.
        """
        if self._trainer.splits:  # the whole batch may not fit
            inputs = repeated(inputs)
        loss = self._compute(inputs, items)
        return 2 * (loss - self._compute(inputs, items, times=2)) / loss if loss else math.nan

    def _growth(self, inputs: Any, items: Any) -> float:
        """How many times the loss of rows is that of each row three times, without dropout."""
        try:
            loss, grown = (self._compute(repeated(inputs, n), items, training=False) for n in (1, _TIMES))
        except Exception:  # of code that the user has for batches of its own
            return 1.0
        return grown / loss if loss else math.nan

    def _find_shift(self, alike: list[Any], items: Any) -> bool | None:
        """Whether a mean leaves out the first label of each row, as losses that shift labels; None if unknown.

        Names do not tell: among those of causal models are some that shift no labels (BART's, TrOCR's, XLNet's), and
        loss functions of the user's may shift them or not.
        """
        able = torch.tensor([float(any(map(self._tells_shift, alike)))], device=self._trainer.args.device)
        if not bool(self._trainer.accelerator.gather(able).any()):
            return None
        counts = self._on_all_ranks(self._counts_first, alike, items)
        return None if math.isnan(counts) else counts == 0

    def _tells_shift(self, inputs: Any) -> bool:
        """Whether some first labels count or not, and the loss knows that others do not.

        No label gets a value that there is not yet: of one that its loss does not know, a GPU makes an error for good.
        """
        labels = self._trainer.counted_labels(inputs)
        if labels is None or not may_shift(inputs, labels):
            return False
        return bool(labels.eq(IGNORED).any()) and bool(labels[:, 0].ne(IGNORED).any())

    def _counts_first(self, inputs: Any, items: Any) -> float:
        """1 if the loss of the first labels alone differs from that of no labels, 0 if not; nan if unknown."""
        if self._trainer.splits:
            inputs = repeated(inputs)
        tells = self._tells_shift(inputs)
        if not tells and self._trainer.args.world_size == 1:
            return math.nan  # on several ranks another may tell, and a forward may communicate
        losses = []
        try:
            for kept in (1, 0):
                changed = inputs
                if tells:
                    labels = inputs["labels"].clone()
                    labels[:, kept:] = IGNORED
                    changed = {**inputs, "labels": labels}
                losses.append(self._compute(changed, items, training=False))
        except Exception:  # of code that the user has for labels of its own
            return math.nan
        first, none = losses
        same = math.isclose(first, none, rel_tol=_ROUNDING) or (math.isnan(first) and math.isnan(none))
        return float(not same) if tells else math.nan

    def _on_all_ranks(self, ask: Callable[[Any, Any], float], alike: list[Any], items: Any) -> float:
        """The answer for the first micro-batch that has one on any rank; nan if none has."""
        for index in range(self._trainer.args.gradient_accumulation_steps):  # as often on all ranks
            own = torch.tensor([ask(alike[index % len(alike)], items)], device=self._trainer.args.device)
            for answer in self._trainer.accelerator.gather(own).tolist():
                if math.isfinite(answer):
                    return answer
        return math.nan

    def _compute(self, inputs: Any, items: Any, times: int = 1, training: bool = True) -> float:
        """The loss, as `training_step` computes it, with the same random numbers each time.

        Args:
            inputs: Of the micro-batch.
            items: The number of items.
            times: How many times as many items and micro-batches the window has.
            training: The mode of the model.
        """
        trainer, args = self._trainer, self._trainer.args
        steps = args.gradient_accumulation_steps
        with eagerly(), untouched(trainer), trainer.compute_loss_context_manager():
            trainer.model.train(training)
            trainer.current_gradient_accumulation_steps *= times
            args.gradient_accumulation_steps *= times
            inputs = copy.copy(inputs)  # which a loss of the user's may change in place
            for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
                inputs[name] = value.clone() if isinstance(value, Tensor) else value
            number = None if items is None else items * times
            self.runs = True
            try:
                inputs = trainer._prepare_inputs(inputs)
                return float(trainer.compute_loss(trainer.model_wrapped, inputs, num_items_in_batch=number))
            finally:
                self.runs = False
                args.gradient_accumulation_steps = steps

    # ---- what is logged

    def _check_rest(self, rest: float) -> None:
        """Warn if a part of the loss is not divided; refuse to split its batches."""
        trainer, name = self._trainer, type(self._trainer.model).__name__
        if rest <= _ROUNDING:
            return
        if trainer.splits:
            raise ValueError(
                f"split: a part of the loss of {name} ({rest:.2g} of it) is not divided by num_items_in_batch, as a "
                "router's auxiliary loss may be, and would be added once for each part of a batch: divide it in "
                "compute_loss, or return a mean there and set loss_is_scaled_for_ga = False"
            )
        self._warn(
            "a part of the loss of %s (%s of it) is not divided by num_items_in_batch, as a router's auxiliary loss "
            "may be, and is added up over a window, up to %d times, as in transformers.Trainer: divide it in "
            "compute_loss, or return a mean there and set loss_is_scaled_for_ga = False (AK37)",
            name,
            f"{rest:.2g}",
            trainer.most_added_up,
        )

    def _report_mean(self, inputs: Any, items: Any) -> None:
        """Say what a mean is taken over."""
        trainer = self._trainer
        added = (
            f", while transformers.Trainer would add up to {trainer.most_added_up} of them, since the loss ignores "
            f"num_items_in_batch ({ISSUE})"
        )
        self._warn(
            "the loss of %s is taken for a mean, in which a micro-batch counts by %s%s: if it has class weights or any "
            "other normalization of its own, pass loss_is or override micro_batch_weight. If it couples the samples of "
            "a batch, as contrastive losses do, use CoupledAccumulationMixin (AK36)",
            type(trainer.model).__name__,
            trainer.default_weight(inputs)[0],
            added if trainer.adds_up(items) else "",
        )


def may_shift(inputs: Any, labels: Tensor | None) -> bool:
    """Whether a loss may leave out the first label of each row of these labels."""
    return labels is not None and "shift_labels" not in inputs and labels.dim() == 2 and labels.shape[1] > 1


def rows(inputs: Any) -> tuple[str, int] | None:
    """The first tensor of the inputs, and its length; a list of samples has a row for each of them."""
    if isinstance(inputs, (list, tuple)):
        return "samples", len(inputs)
    if not isinstance(inputs, Mapping):
        return None
    return next(((name, len(v)) for name, v in inputs.items() if isinstance(v, Tensor) and v.dim() > 0), None)


def repeated(inputs: Any, times: int = 1) -> Any:
    """The first two rows of the inputs, in which a sum can be told from a mean, so many times."""
    found = rows(inputs)
    if isinstance(inputs, (list, tuple)) or found is None:
        return inputs if found is None else inputs[:_ROWS] * times
    cut = {
        name: torch.cat([value[:_ROWS]] * times)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == found[1]
    }
    return {**inputs, **cut}


@contextlib.contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Run a forward without gradients that leaves no trace where code is known to leave some.

    Random state, the model's buffers, and the attributes of the Trainer and of the model's modules are restored, with
    numbers, generators, small tensors and arrays, lists, dicts and sets among them: a subclass may count in
    `compute_loss`, a module in its forward.
    """
    snapshot = Snapshot(trainer.model, parameters=False)
    snapshot.include(trainer, without=(trainer.train_dataset, trainer.eval_dataset))
    try:
        with torch.no_grad():
            yield
    finally:
        snapshot.restore()
