"""transformers' `Trainer`, with FusedAccumulator in it: change the import, keep the arguments.

    from accumkernels.integrations.transformers import Trainer

    args = TrainingArguments(gradient_accumulation_steps=8, bf16=True, ...)
    Trainer(model=model, args=args, train_dataset=dataset).train()

A subclass of `transformers.Trainer`, from any package, lists `FusedAccumulationMixin` before it among its bases.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accumulator import FusedAccumulator
from ..arguments import Split
from ..errors import expect, needs
from ..ranks.base import is_distributed, store
from ..window.checkpoint import without_window
from .loss_probe import DIVIDED, IGNORED, MEAN, SUM, LossProbe, may_shift, rows
from .window import split_options

with needs("transformers", oldest="5.19"):
    import accelerate  # noqa: F401  (the extra brings it; whether it is too old says the adapter of its own)
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .accelerate import fuse

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

ACCUMULATOR_NAME = "accumulator.pt"  # in a checkpoint's folder
_LOSS_IS = ("tokens", "rows", "sum")


class FusedAccumulationMixin(Base):
    """Lets FusedAccumulator accumulate in a `transformers.Trainer`.

    If the loss is divided by `num_items_in_batch`, or is a sum, the gradient is the Trainer's own. If it is a mean over
    the micro-batch, this class weights each micro-batch by the number of labels, or without labels of rows, that its
    mean was taken over (`micro_batch_weight`), on all ranks, and logs so. The Trainer averages such means, and adds
    them up if the model or the loss function gets the number and does not use it. To find out, this class computes the
    loss with another number and with more rows, without gradients, at the first window and for each new form of inputs.

    It needs one GPU per process, with DistributedDataParallel or FSDP2 if there are several.

    Args:
        *args: Of the Trainer.
        accumulator_options: Options of FusedAccumulator, such as `{"release": "backward"}`.
        log_windows: Whether the Trainer's logs include the accumulator's metrics of the last window, such as
            `accumulator/weight`.
        split: Splits each batch of `per_device_train_batch_size` rows into parts that fit in memory, which together
            are as the batch is at once. "auto": as large as fit. A number: the most rows of a part, or tokens with
            padding if inputs have `input_ids`. A dict: `micro_batch`, `budget`, `cost` and `multiple_of` of
            `FusedAccumulator.backward_batch`. None (default): batches are not split.
        loss_is: What the loss of a micro-batch is, where this is not found out right. "tokens": a mean over the labels
            that are not -100. "rows": a mean over rows. "sum": a sum. A function of the inputs: a mean over as much as
            it returns. None (default): found out.
        **kwargs: Of the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        accumulator_options: Mapping[str, Any] | None = None,
        log_windows: bool = False,
        split: str | float | Mapping[str, Any] | None = None,
        loss_is: str | Callable[[Any], float | Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        expect(accumulator_options, Mapping | None, "accumulator_options", "a dict of options")
        self._accumulator_options = dict(accumulator_options or {})
        self._log_windows = log_windows
        self._split = split_options(split)
        if isinstance(loss_is, str) and loss_is not in _LOSS_IS:
            raise ValueError(f"loss_is must be one of {', '.join(map(repr, _LOSS_IS))} or a function, got {loss_is!r}")
        accepted = f"one of {', '.join(map(repr, _LOSS_IS))}, a function, or None"
        self._loss_is = expect(loss_is, str | Callable | None, "loss_is", accepted)
        self._probe = LossProbe(self)
        self._endings: Endings  # of the current `train`
        self._calls = 0  # of `training_step`, for the micro-batches that the Trainer has taken at once
        self._adds_means = False  # whether the Trainer adds up the means of a window, and takes that for its loss
        self._losses: Tensor | None = None  # sums in a window: of what `training_step`s returned, of their backwards'
        self._logged: Tensor | None = None  # losses that the Trainer had added up before the window, if any
        self._items: Tensor | int | None = None
        self._read_elsewhere = False  # whether code on another rank looks at `.grad`
        super().__init__(*args, **kwargs)

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator, while `train()` runs."""
        return self.accelerator.accumulator

    def create_accelerator_and_postprocess(self) -> None:
        """As in the Trainer; the accelerator gets an accumulator when the model and the optimizer are prepared."""
        super().create_accelerator_and_postprocess()
        fuse(self.accelerator, **self._accumulator_options).counts_micro_batches = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; afterwards the model is free for another accumulator.

        Raises:
            ValueError: There are several GPUs in one process (`torch.nn.DataParallel`).
            RuntimeError: Ranks have unequal numbers of windows.
        """
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process, where the Trainer uses DataParallel: show it one, with "
                "CUDA_VISIBLE_DEVICES"
            )
        self._probe = LossProbe(self)
        self._endings = Endings()
        self._read_elsewhere = False
        try:
            return super().train(*args, **kwargs)
        except RuntimeError as error:
            rank, windows = self._endings.first() or (None, 0)
            if rank is None or not windows <= self.state.global_step < self.state.max_steps:
                raise
            raise RuntimeError(
                f"rank {rank} ended its training after {windows} windows, while another rank waited for it in the next "
                "one: ranks end their windows together. A callback that stops the training "
                "(control.should_training_stop) has to decide the same on all ranks"
            ) from error
        finally:
            self.accelerator.release_accumulator()

    def micro_batch_weight(self, inputs: Any) -> float | Tensor:
        """How many samples or tokens a mean loss averages; override it if the mean is over anything else.

        Args:
            inputs: The model's inputs, a micro-batch; for trainers whose collator collates nothing, a list of samples.

        Returns:
            As `loss_is` says. By default the number of labels that are not -100, without the first of each row where
            the loss shifts labels, as `train` finds out, and otherwise by the names of causal models; without labels,
            and for CTC losses that are means, which divide each row by its own labels, the number of rows, by the first
            tensor. Nothing is read back from the device.
        """
        return self.default_weight(inputs)[1]

    def default_weight(self, inputs: Any) -> tuple[str, float | Tensor]:
        """What `micro_batch_weight` counts unless it is overridden, in words, and how many of them there are."""
        if callable(self._loss_is):
            return "loss_is", self._loss_is(inputs)
        if (labels := self.counted_labels(inputs)) is not None:
            words = "its labels that are not -100"
            if may_shift(inputs, labels):
                found = self._probe.shifts(inputs)
                if self._is_causal() if found is None else found:
                    labels, words = labels[:, 1:], f"{words}, without the first of each row"
            ignored = getattr(getattr(self.model, "config", None), "semantic_loss_ignore_index", IGNORED)
            return words, (labels.ne(IGNORED) & labels.ne(ignored)).sum()
        if (found_rows := rows(inputs)) is None:
            return "1, since it has neither labels nor rows", 1.0
        return f"its rows, the length of {found_rows[0]!r}", float(found_rows[1])

    def counted_labels(self, inputs: Any) -> Tensor | None:
        """The labels that `default_weight` counts; None if it counts rows, or what `loss_is` returns."""
        if not isinstance(inputs, Mapping) or callable(self._loss_is) or self._loss_is == "rows":
            return None
        if self._loss_is is None and getattr(getattr(self.model, "config", None), "ctc_loss_reduction", None) == "mean":
            return None
        labels = inputs.get("shift_labels", inputs.get("labels"))
        return labels if isinstance(labels, Tensor) else None

    def _is_causal(self) -> bool:
        """Whether the model shifts labels, by its names, as the Trainer's count or its label smoothing takes them."""
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # PEFT's
        return self._loss_shifts_labels or type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # ---- how the loss is normalized

    @property
    def splits(self) -> bool:
        """Whether batches are split into parts."""
        return self._split is not None

    @property
    def takes_one(self) -> bool:
        """Whether a window is one micro-batch of one rank, for which weights do not matter."""
        return self.args.gradient_accumulation_steps == 1 and self.args.world_size == 1 and not self.splits

    @property
    def weighs_by_default(self) -> bool:
        """Whether the user has not said what a mean is taken over."""
        return self._loss_is is None and type(self).micro_batch_weight is FusedAccumulationMixin.micro_batch_weight

    @property
    def declared_normalization(self) -> str | None:
        """How the user says that losses are normalized."""
        if self._loss_is is not None:
            return SUM if self._loss_is == "sum" else MEAN
        return {None: None, True: DIVIDED, False: MEAN}[getattr(self, "loss_is_scaled_for_ga", None)]

    @property
    def most_added_up(self) -> int:
        """How many losses the Trainer adds up at the most."""
        return self.args.gradient_accumulation_steps * (
            self.args.world_size if self.args.average_tokens_across_devices else 1
        )

    def adds_up(self, items: Tensor | int | None) -> bool:
        """Whether the Trainer adds losses up as they are: it believes that they are divided by this number of items."""
        declared = getattr(self, "loss_is_scaled_for_ga", None)
        if declared is not None:
            return declared
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """As in the Trainer, which takes a window's micro-batches at once; find out what their losses average."""
        samples, items = super().get_batch_samples(*args, **kwargs)
        self.current_gradient_accumulation_steps = len(samples)  # as the Trainer is about to
        self._calls = 0
        if not self.takes_one:
            self._probe.ask(samples, items)
        self._items = items
        return samples, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in the Trainer; means are weighted, whether the Trainer has divided them by their number or not.

        Raises:
            RuntimeError: It has run more than one backward of a mean for a micro-batch.
        """
        accelerator = self.accelerator
        accelerator.open_window()
        before = sum(one.micro_batches for one in accelerator.accumulators)
        self._calls = self._calls + 1 if before else 1  # a subclass may call it twice for a micro-batch
        accelerator.reads_gradients = self._somebody_reads_gradients()
        adds_up = self.adds_up(num_items_in_batch)
        found = self._probe.normalization(inputs)
        means = not self.takes_one and (not adds_up if found is None else found == MEAN)
        steps = 1 if adds_up else self.current_gradient_accumulation_steps
        if self._split is None:
            accelerator.micro_batch_weight = self.micro_batch_weight(inputs) if means else None
            accelerator.loss_divided_by = steps
        else:
            accelerator.micro_batch_weight = 1.0 if means else None
            accelerator.loss_divided_by = 1
        averages, accelerator.last_loss = self.args.average_tokens_across_devices, None
        if means:
            self.args.average_tokens_across_devices = False  # or compute_loss would multiply by the number of ranks
        try:
            if self._split is None:
                loss = super().training_step(model, inputs, num_items_in_batch)
            else:
                with _deferred_loss(self, lambda compute, whole: self._backward_batch(compute, whole, means, steps)):
                    loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.args.average_tokens_across_devices = averages
        ran = sum(one.micro_batches for one in accelerator.accumulators) - before
        if means and (self._calls > self.current_gradient_accumulation_steps or (self._split is None and ran > 1)):
            raise RuntimeError(
                "training_step has run several backwards of losses that are means for one micro-batch, and each counts "
                "as one: the gradient would be their mean, where transformers adds them up. Add up the losses, and run "
                "one backward (override compute_loss)"
            )
        if before == 0:
            self._losses = None
        if means and accelerator.last_loss is not None:  # a subclass's own may divide it afterwards
            both = torch.stack([loss.detach().double().sum(), accelerator.last_loss.double().sum()])
            both = torch.where(both.isfinite().all(), both * accelerator.micro_batch_weight, 0.0)
            self._losses = both if self._losses is None else self._losses + both
        self._adds_means |= means and ran > 0  # else it has run a backward of its own, whose loss the Trainer's is
        return loss

    def _backward_batch(self, compute: Callable[[Any], Tensor], inputs: Any, means: bool, steps: int) -> Tensor:
        """Run prepared inputs in parts; returns the loss that `training_step` would return of all."""
        assert self._split is not None
        options = {"cost": _costs(inputs), **self._split}
        if means:
            options["weight"] = self.micro_batch_weight
        may_gather = (
            type(self).compute_loss is not transformers.Trainer.compute_loss or self.compute_loss_func is not None
        )
        self.accelerator.splits_together = may_gather and not Split(**self._split).is_automatic
        if means:
            return self.accelerator.backward_batch(inputs, compute, **options).loss / steps
        report = self.accelerator.backward_batch(inputs, lambda part: compute(part) / steps, **options)
        return report.loss * len(report.sizes)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer, which calls it after a step. Of means it has added up the loss that it takes them for."""
        if self._adds_means:
            loss = torch.zeros_like(tr_loss) if self._logged is None else self._logged
            if not self.accelerator.inside_a_window:  # else an epoch ends inside of it, and its loss comes with its end
                mean = self.accelerator.accumulator.metrics()["loss"]
                if self._losses is not None:  # in what proportion it was returned
                    mean = mean * (self._losses[0] / self._losses[1]).nan_to_num(1.0, 1.0, 1.0)
                loss = loss + mean
            tr_loss.copy_(torch.where(loss.isfinite(), loss, tr_loss))
            self._adds_means = False
        result = super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self._logged = tr_loss.clone()
        return result

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._adds_means, self._logged = False, None
        self._compare_ranks()
        if self.model_wrapped is not self.model:  # by an earlier train(), and the Trainer does not prepare it again
            self.accelerator.adopt(self.model_wrapped)
        elif self.is_distributed_loading_by_transformers:
            self.accelerator.adopt(self.model)
        return super()._prepare_for_training(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._endings.note(self.state.global_step)  # before the Trainer communicates
        return super()._finalize_training(*args, **kwargs)

    def _compare_ranks(self) -> None:
        """Refuse data of which ranks make unequal numbers of windows: one would wait for those that have ended.

        Where code of any rank looks at `.grad`, as a callback of rank 0 alone may, all ranks end their windows for it.
        """
        own = torch.tensor([[self.state.max_steps, self._somebody_reads_gradients()]], device=self.args.device)
        of_ranks, reads = self.accelerator.gather(own).T.tolist()
        self._read_elsewhere = any(reads)
        if len(set(of_ranks)) > 1:
            first, last = of_ranks.index(min(of_ranks)), of_ranks.index(max(of_ranks))
            raise RuntimeError(
                f"rank {first} would end after {of_ranks[first]} windows, and rank {last} after {of_ranks[last]}: "
                "ranks end their windows together. Give all of them equally many: even_batches=True in "
                "TrainingArguments(accelerator_config=...), a sampler or dataset of equal length on all ranks, or "
                "max_steps"
            )

    def _somebody_reads_gradients(self) -> bool:
        """Whether any code of the user's runs between the last backward of a window and `zero_grad`."""
        if self._read_elsewhere:
            return True
        base = transformers.TrainerCallback
        return any(
            getattr(type(callback), hook) is not getattr(base, hook)
            for callback in self.callback_handler.callbacks
            for hook in ("on_pre_optimizer_step", "on_optimizer_step")
        ) or any(
            getattr(type(self), method) is not getattr(transformers.Trainer, method)
            for method in ("_clip_grad_norm", "_get_grad_norm", "_run_epoch")
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in the Trainer; `log_windows` adds the accumulator's metrics."""
        if self._probe.runs:  # of a loss that is computed once more
            return
        if self._log_windows and "loss" in logs:
            logs = {**logs, **self.accelerator.window_metrics()}
            if self.accelerator.micro_batch_weight is None and self._items is not None:
                logs["accumulator/weight"] = float(self._items)
        super().log(logs, *args, **kwargs)

    # ---- checkpoints: only masters outlive a window

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.accelerator.saving():
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self._accumulator_options.get("master_weights"):
            # A callback may save inside a window, also before its step: the run that is resumed begins it anew.
            state = without_window(self.accumulator.state_dict())
            torch.save(state, os.path.join(output_dir, ACCUMULATOR_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._accumulator_options.get("master_weights"):
            return
        path = os.path.join(checkpoint, ACCUMULATOR_NAME)
        if os.path.isfile(path):  # else it is another Trainer's, and masters have the model's values
            self.accumulator.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class Trainer(FusedAccumulationMixin, transformers.Trainer):
    """`transformers.Trainer` in which FusedAccumulator accumulates."""


# ---- Which rank ended a run first, for ranks that wait for it in vain; kept in torch.distributed's store

_runs = itertools.count()


class Endings:
    """The ends of one run on several ranks, each of which makes these objects in the same order."""

    def __init__(self) -> None:
        self._key = f"accumkernels/ended/{next(_runs)}"

    def note(self, windows: int) -> None:
        """Note that this rank ended after so many windows, unless another has noted its own end before."""
        if is_distributed():
            store().compare_set(self._key, "", f"{torch.distributed.get_rank()} {windows}")

    def first(self) -> tuple[int, int] | None:
        """The rank that ended first, and after how many windows; None if no rank did, or the store ended with it."""
        if not is_distributed():
            return None
        try:
            if not store().check([self._key]):
                return None
            rank, windows = map(int, store().get(self._key).split())
        except RuntimeError:
            return None
        return rank, windows


# ---- `training_step` on a whole batch, whose loss and backward are those of as many parts as it takes


def _costs(inputs: Any) -> list[float] | None:
    """What each row of a Trainer's inputs costs: its tokens, padding included; None: 1, without tokens."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() < 2:
        return None
    found = rows(inputs)
    assert found is not None
    return [float(ids[0].numel())] * found[1] if len(ids) else []


@contextlib.contextmanager
def _deferred_loss(trainer: Any, run: Callable[[Callable[[Any], Tensor], Any], Tensor]) -> Iterator[None]:
    """Let `training_step` compute its loss in `accelerator.backward`, where `run` may do so in parts.

    Everything else in a `training_step`, of whatever class, sees the batch once, and the loss that `run` returns.

    Args:
        trainer: A Trainer.
        run: Called with a function that computes the loss of inputs, in the contexts of `compute_loss`, and with the
            prepared inputs of the whole batch. It runs backward, and returns the loss that `training_step` returns.
    """
    compute_loss = trainer.compute_loss
    calls: list[Callable[[], Tensor]] = []

    def defer(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        def compute(part: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                return compute_loss(model, copy.copy(part), *args, **kwargs)  # it may take labels out

        calls.append(lambda: run(compute, inputs))
        return torch.zeros((), device=trainer.args.device)

    def backward(loss: Tensor, **kwargs: Any) -> None:
        loss.copy_(calls.pop()())

    instance, accelerator = vars(trainer), trainer.accelerator
    own = instance.get("compute_loss")
    instance["compute_loss"], vars(accelerator)["backward"] = defer, backward
    try:
        yield
    finally:
        del instance["compute_loss"], vars(accelerator)["backward"]
        if own is not None:
            instance["compute_loss"] = own
