"""A Lightning callback that lets FusedAccumulator accumulate: one argument of the Trainer.

from accumkernels.integrations.lightning import FusedAccumulation

trainer = Trainer(accumulate_grad_batches=8, precision="bf16-mixed", gradient_clip_val=1.0,
                  callbacks=[FusedAccumulation(weight=lambda batch: len(batch[0]))])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator
from .window import TrainerWindow, missing

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise missing("lightning") from error


class FusedAccumulation(pl.Callback):
    """Accumulates in place of Lightning, in automatic and in manual optimization, with one optimizer in one process.

    `accumulate_grad_batches`, `precision`, `gradient_clip_val` and the hooks of LightningModule mean what they do in
    Lightning. `.grad` is the averaged, unscaled gradient from `on_before_optimizer_step` on, and None before. Fused
    optimizers can be clipped in fp16 too.

    In manual optimization each `manual_backward` is a micro-batch, and `optimizer.step()` ends the window: no division
    by the number of micro-batches, and no `zero_grad`.

    Args:
        weight: From a batch the number of samples or tokens that its loss is the mean of; None: every batch counts 1.
        **options: Of FusedAccumulator, as `release="backward"` (then without `weight`).
    """

    def __init__(self, weight: Callable[[Any], float | Tensor] | None = None, **options: Any) -> None:
        self.weight = weight
        self._options = {"autocast_route": True, **options}  # nobody looks for `.grad` inside a window
        self._batch_weight: float | Tensor = 1.0
        self._window: TrainerWindow | None = None
        self._precision: Precision | None = None
        self._saved: dict[str, Any] | None = None

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator, while `fit()` runs.

        Raises:
            RuntimeError: it does not.
        """
        if self._window is None:
            raise RuntimeError("FusedAccumulation has an accumulator only while trainer.fit() runs")
        return self._window.accumulator

    # ---- from the beginning to the end of fit()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the accumulator.

        Raises:
            ValueError: several processes, a strategy that accumulates itself, or not exactly one optimizer.
        """
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                f"FusedAccumulation with {type(trainer.strategy).__name__}: it drives one device. Use one, or "
                "accumkernels.FusedAccumulator itself in manual optimization"
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"FusedAccumulation with {len(trainer.optimizers)} optimizers: it drives one. Accumulate with "
                "accumkernels.FusedAccumulator itself in manual optimization"
            )
        self._release()
        precision = trainer.strategy.precision_plugin
        scaler = getattr(precision, "scaler", None)
        self._window = TrainerWindow(pl_module, trainer.optimizers[0], scaler, **self._options)
        if self._saved is not None:
            self._window.accumulator.load_state_dict(self._saved)
            self._saved = None
        # The precision plugin would unscale again, refuses to clip what fused optimizers step, and does not skip an
        # overflow in bf16. What was put there by others (its class, its scaler, its checkpoints) stays.
        self._precision = precision
        precision.optimizer_step = self._optimizer_step
        precision.clip_gradients = self._clip_gradients
        precision.clip_grad_by_norm = self._clip_grad_by_norm

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the model."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let go of the model."""
        self._release()

    def _release(self) -> None:
        if self._precision is not None:
            for name in ("optimizer_step", "clip_gradients", "clip_grad_by_norm"):
                delattr(self._precision, name)
            self._precision = None
        if self._window is not None:
            self._window.release()
            self._window = None

    # ---- a micro-batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the next window after a step, and ask for the batch's weight."""
        assert self._window is not None
        self._window.open()
        self._batch_weight = 1.0 if self.weight is None else self.weight(batch)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Open the next window after a step, which manual optimization may take inside a batch."""
        assert self._window is not None
        self._window.open()
        self._window.divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the gradients."""
        self.accumulator.accumulate(self._batch_weight)

    # ---- the end of a window, in place of the precision plugin's

    def _optimizer_step(
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self._precision is not None and self._window is not None
        result = closure()
        self._window.finalize()
        self._precision._after_closure(model, optimizer)  # on_before_optimizer_step, and the Trainer's clipping
        self._window.step(**kwargs)
        return result

    def _clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        assert self._precision is not None and self._window is not None
        self._window.finalize()
        Precision.clip_gradients(self._precision, optimizer, *args, **kwargs)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._window is not None
        self._window.clip_grad_norm_(clip_val)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The accumulator's: masters, and what is in a window that is open."""
        if self._window is None:
            return {}
        if self._window.stepped:
            self._window.close()
        return self._window.accumulator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until `fit` makes the accumulator."""
        self._saved = dict(state_dict) or None
