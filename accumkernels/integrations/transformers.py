"""transformers' `Trainer`, with FusedAccumulator in it: change the import, keep the arguments.

    from accumkernels.integrations.transformers import Trainer

    args = TrainingArguments(gradient_accumulation_steps=8, bf16=True, ...)
    Trainer(model=model, args=args, train_dataset=dataset).train()

A subclass of `transformers.Trainer`, from any package, lists `FusedAccumulationMixin` before it among its bases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accumulator import FusedAccumulator
from ..errors import expect, missing

try:
    import transformers
except ImportError as error:
    raise missing("transformers") from error

from .accelerate import fuse

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

ACCUMULATOR_NAME = "accumulator.pt"  # in a checkpoint's folder
IGNORED = -100  # label of positions that have no loss


class FusedAccumulationMixin(Base):
    """Lets FusedAccumulator accumulate in a `transformers.Trainer`.

    If the loss is normalized by `num_items_in_batch`, the gradient is the Trainer's own. If the model or the loss
    function does not take `num_items_in_batch`, the Trainer averages the micro-batches' mean losses; this class weights
    each by the number of labels that its mean was taken over (`micro_batch_weight`), on all ranks. It needs one GPU per
    process, with DistributedDataParallel or FSDP2 if there are several.

    Args:
        *args: Of the Trainer.
        accumulator_options: Options of FusedAccumulator, such as `{"release": "backward"}`.
        log_windows: Whether the Trainer's logs include the accumulator's metrics of the last window, such as
            `accumulator/weight`.
        **kwargs: Of the Trainer.
    """

    def __init__(
        self,
        *args: Any,
        accumulator_options: Mapping[str, Any] | None = None,
        log_windows: bool = False,
        **kwargs: Any,
    ) -> None:
        expect(accumulator_options, Mapping | None, "accumulator_options", "a dict of options")
        self._accumulator_options = dict(accumulator_options or {})
        self._log_windows = log_windows
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
        """
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process, where the Trainer uses DataParallel: show it one, with "
                "CUDA_VISIBLE_DEVICES"
            )
        try:
            return super().train(*args, **kwargs)
        finally:
            self.accelerator.release_accumulator()

    def micro_batch_weight(self, inputs: Mapping[str, Any]) -> float | Tensor:
        """How many samples or tokens a mean loss averages; override it if the mean is not over the labels.

        Args:
            inputs: The model's inputs, a micro-batch.

        Returns:
            The number of labels that are not -100 (of those that a causal model predicts, if `labels` are shifted); 1
            without labels. Nothing is read back from the device.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return 1.0
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As in the Trainer, which divides the loss by the number of micro-batches unless it is already scaled."""
        self.accelerator.open_window()
        self.accelerator.reads_gradients = self._somebody_reads_gradients()
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        # Scaled losses add up to the window's loss. Means are weighted, and the Trainer's division is undone.
        self.accelerator.micro_batch_weight = None if scaled else self.micro_batch_weight(inputs)
        self.accelerator.loss_divided_by = self.current_gradient_accumulation_steps
        takes_number = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.args.average_tokens_across_devices and takes_number and num_items_in_batch is not None:
            # compute_loss has multiplied by the number of ranks, for scaled losses and means alike.
            self.accelerator.loss_divided_by /= self.accelerator.num_processes // self.get_tp_size()
        return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.model_wrapped is not self.model:  # by an earlier train(), and the Trainer does not prepare it again
            self.accelerator.adopt(self.model_wrapped)
        elif self.is_distributed_loading_by_transformers:
            self.accelerator.adopt(self.model)
        return super()._prepare_for_training(*args, **kwargs)

    def _somebody_reads_gradients(self) -> bool:
        """Whether any code of the user's runs between the last backward of a window and `zero_grad`."""
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
        if self._log_windows and "loss" in logs:
            logs = {**logs, **self.accelerator.window_metrics()}
        super().log(logs, *args, **kwargs)

    # ---- checkpoints: only masters outlive a window

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self._accumulator_options.get("master_weights"):
            self.accelerator.open_window()
            torch.save(self.accumulator.state_dict(), os.path.join(output_dir, ACCUMULATOR_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self._accumulator_options.get("master_weights"):
            return
        path = os.path.join(checkpoint, ACCUMULATOR_NAME)
        if os.path.isfile(path):  # else it is another Trainer's, and masters have the model's values
            self.accumulator.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class Trainer(FusedAccumulationMixin, transformers.Trainer):
    """`transformers.Trainer` in which FusedAccumulator accumulates."""
