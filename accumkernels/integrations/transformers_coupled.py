"""A loss that couples samples in transformers' `Trainer`: a window's micro-batches are the chunks of one batch.

from accumkernels.integrations.transformers_coupled import CoupledAccumulationMixin

class ContrastiveTrainer(CoupledAccumulationMixin, transformers.Trainer):
    def encode(self, model, inputs):  # a micro-batch: one row per sample
        return model(**inputs["query"]).pooler_output, model(**inputs["document"]).pooler_output

    def coupled_loss(self, queries, documents):  # of all micro-batches of the window
        return cross_entropy(20 * queries @ documents.T, torch.arange(len(queries), device=queries.device))

args = TrainingArguments(per_device_train_batch_size=64, gradient_accumulation_steps=16, ...)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..window.coupled import Encodings
from .transformers import FusedAccumulationMixin


class CoupledAccumulationMixin(FusedAccumulationMixin):
    """`FusedAccumulationMixin` for a loss whose samples depend on each other, such as a contrastive loss.

    A window has the gradient of the loss of all of its samples, as if they were one batch of the model, with the
    activations of one micro-batch in memory. See `FusedAccumulator.backward_coupled`. A subclass defines `encode` and
    `coupled_loss`; training does not call `compute_loss`. On several ranks, a rank's samples are coupled with each
    other, or with those of all ranks if `coupled_loss` gathers them by differentiable collectives.

    Args:
        *args: Of `FusedAccumulationMixin` and the Trainer.
        **kwargs: Of `FusedAccumulationMixin` and the Trainer.

    Raises:
        TypeError: The subclass does not define both methods.
        ValueError: There is a `split`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        for method in ("encode", "coupled_loss"):
            if getattr(kind, method) is getattr(CoupledAccumulationMixin, method):
                raise TypeError(f"{kind.__name__} must define {method}(), which CoupledAccumulationMixin calls")
        if kwargs.get("split") is not None:
            raise ValueError(
                f"split with {kind.__name__}, whose windows are one batch already: its micro-batches are the parts"
            )
        self._waiting: list[Any] = []  # the open window's micro-batches so far
        super().__init__(*args, **kwargs)

    def encode(self, model: nn.Module, inputs: Any) -> Encodings:
        """Encode a micro-batch; called twice for each, and must do the same both times.

        Args:
            model: The model, wrapped as the Trainer wraps it.
            inputs: The micro-batch on the model's device; a dict may be changed.

        Returns:
            A tensor, or a tuple or dict of tensors, with one row per sample: embeddings, and labels if the loss needs
            them.
        """
        raise NotImplementedError

    def coupled_loss(self, *encodings: Any, **named: Any) -> Tensor:
        """Compute the loss of all samples of the window.

        Args:
            *encodings: What `encode` returned, concatenated over micro-batches.
            **named: The same, if it returned a dict.
        """
        raise NotImplementedError

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """As in the Trainer: what a loss of one micro-batch would average does not matter."""
        return super(FusedAccumulationMixin, self).get_batch_samples(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `FusedAccumulationMixin`."""
        self._waiting.clear()  # of a `train` that an exception has ended
        return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Keep the micro-batch; run all of them at the last one of the window.

        Returns:
            The loss of the window at its last micro-batch, and 0 before, so that the Trainer logs the loss once.
        """
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        chunks, self._waiting = [self._prepare_inputs(waiting) for waiting in self._waiting], []
        self.accelerator.reads_gradients = self._somebody_reads_gradients()
        model.train()
        self.optimizer.train()  # for schedule-free ones

        encode = self._as_forward(lambda inputs: self.encode(model, copy.copy(inputs)))
        return self.accelerator.backward_coupled(chunks, encode, self._as_forward(self.coupled_loss), weight=1.0)

    def _as_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in the contexts of `compute_loss`, with its signature."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.compute_loss_context_manager():
                return function(*args, **kwargs)

        return call
