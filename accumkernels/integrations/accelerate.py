"""accelerate's `Accelerator`, with FusedAccumulator in it: change the import, keep the loop.

from accumkernels.integrations.accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=8, mixed_precision="bf16")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(batch["x"]), batch["y"])
        accelerator.backward(loss, weight=len(batch["x"]))  # `weight` is new; without it every micro-batch counts 1
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..accumulator import FusedAccumulator
from ..window.optimizers import owned
from .window import TrainerWindow, missing

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing("accelerate") from error


class FusedOptimizer(AcceleratedOptimizer):
    """What `Accelerator.prepare` returns for an optimizer: steps windows of the accumulator."""

    window: TrainerWindow | None = None

    def step(self, closure: None = None) -> None:
        """Step at the end of a window; nothing inside one.

        Raises:
            TypeError: a closure was given.
        """
        if closure is not None:
            raise TypeError("optimizer.step(closure): FusedAccumulator cannot drive optimizers that take a closure")
        if self.gradient_state.sync_gradients:
            _require(self.window).step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the window that has ended, stepped or not; one that is open is kept."""
        if self.window is not None and self.window.finalized:
            self.window.close()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped: for overflow, of fused optimizers too, or because nothing was there."""
        return self.window is not None and self.window.accumulator.step_was_skipped


def _require(window: TrainerWindow | None) -> TrainerWindow:
    if window is None:
        raise RuntimeError(
            "nothing to accumulate into: pass the model and its optimizer to accelerator.prepare(...) first"
        )
    return window


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, where FusedAccumulator accumulates.

    `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `sync_gradients`, `optimizer_step_was_skipped` and the
    prepared optimizer and scheduler mean what they do in accelerate. After the last backward of a window `.grad` is
    the averaged, unscaled gradient; before, it is None. One model with one optimizer, in one process.

    Args:
        *args: Of `accelerate.Accelerator`.
        accumulator_options: Of FusedAccumulator, as `{"release": "backward"}`.
        **kwargs: Of `accelerate.Accelerator`.

    Attributes:
        micro_batch_weight: Weight of micro-batches whose `backward` gives none; 1 unless set.
        loss_divided_by: What the losses given to `backward` were divided by before, by whoever calls it; 1 unless set.

    Raises:
        ValueError: accelerate runs several processes, or sharded.
    """

    def __init__(self, *args: Any, accumulator_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fuse(accumulator_options or {})

    def _fuse(self, options: Mapping[str, Any]) -> None:
        if self.distributed_type != accelerate.DistributedType.NO:
            raise ValueError(
                f"accelerate runs as {self.distributed_type.value}, and this adapter drives one process: run one, or "
                "accumulate with accumkernels.FusedAccumulator itself"
            )
        self.micro_batch_weight: float | Tensor = 1.0
        self.loss_divided_by: float | Tensor = 1
        self._accumulator_options = dict(options)
        self._window: TrainerWindow | None = None
        self._backwards: int | None = None  # inside accumulate()

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator of the model that was prepared, with its metrics and its `state_dict`.

        Raises:
            RuntimeError: none was.
        """
        return _require(self._window).accumulator

    # ---- preparing

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate; once a model and its optimizer are prepared, together or not, there is an accumulator."""
        prepared = super().prepare(*args, **kwargs)
        if self._window is None and self._models and self._optimizers:
            self._make_window()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As in accelerate."""
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared.__class__ = FusedOptimizer  # accelerate has no place to say which class wraps optimizers
        return prepared

    def _make_window(self) -> None:
        if len(self._optimizers) > 1:
            raise ValueError(
                f"{len(self._optimizers)} optimizers were prepared; the adapter drives one. Accumulate with "
                "accumkernels.FusedAccumulator itself: acc.finalize(*optimizers)"
            )
        (optimizer,) = self._optimizers
        stepped = {id(p) for p in owned((optimizer,))}
        models = [model for model in self._models if any(id(p) in stepped for p in model.parameters())]
        if not models:
            return  # the one that the optimizer steps comes later
        if len(models) > 1:
            raise ValueError(
                f"the optimizer steps parameters of {len(models)} prepared models; the adapter drives one. Put them "
                "into one module, or accumulate with accumkernels.FusedAccumulator itself"
            )
        window = TrainerWindow(models[0], optimizer.optimizer, self.scaler, **self._accumulator_options)
        optimizer.window = self._window = window

    def free_memory(self, *objects: Any) -> Any:
        """As in accelerate; the accumulator lets go of the model too."""
        self.release_accumulator()
        return super().free_memory(*objects)

    def release_accumulator(self) -> None:
        """Let go of model and optimizer, so that another accumulator may take them; `prepare` makes a new one."""
        for optimizer in self._optimizers:
            optimizer.window = None
        if self._window is not None:
            self._window.release()
            self._window = None

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate. Registered for checkpointing, `accumulator` saves windows that are open, and masters."""
        if self._window is not None and self._window.stepped:
            self._window.close()
        return super().save_state(*args, **kwargs)

    # ---- a window

    def open_window(self) -> None:
        """Begin the next window where the last one was stepped; `accumulate` and `backward` do so by themselves.

        Raises:
            RuntimeError: the last one was neither stepped nor dropped; nothing is prepared.
        """
        _require(self._window).open()

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As in accelerate."""
        self._backwards = 0
        self.open_window()
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._backwards = None

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """`FusedAccumulator.backward`; with the last micro-batch of a window `.grad` becomes the averaged gradient.

        Args:
            loss: As in accelerate: the plain loss of a micro-batch.
            weight: What it counts: the number of samples or tokens that the loss is the mean of.
            **kwargs: Of `Tensor.backward`.

        Raises:
            RuntimeError: a second backward of one micro-batch, or one after the end of a window; nothing is prepared.
        """
        window = _require(self._window)
        if self._backwards is not None:
            self._backwards += 1
            if self._backwards > 1:
                raise RuntimeError(
                    "accelerator.backward() twice inside one accelerator.accumulate(): it would count as two "
                    "micro-batches. Add up the losses and call it once"
                )
        self.open_window()
        steps = self.gradient_accumulation_steps
        window.divided_by = steps * self.loss_divided_by
        weight = self.micro_batch_weight if weight is None else weight
        window.accumulator.backward(loss / steps, weight, **kwargs)
        if self.sync_gradients:
            window.finalize()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: gradients are unscaled while they are accumulated."""

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """As in accelerate. All of the model's parameters are clipped in flat fp32 buffers, some of them by torch."""
        window, params = _require(self._window), _listed(parameters)
        given = {id(p) for p in params}
        if all(id(p) in given for p in window.model.parameters() if p.requires_grad) and self.sync_gradients:
            return window.clip_grad_norm_(max_norm, norm_type)
        if not window.finalized:  # inside a window there is no .grad, and nothing to clip
            return torch.zeros(())
        return torch.nn.utils.clip_grad_norm_(window.targets(params), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """As in accelerate."""
        window = _require(self._window)
        if window.finalized:
            torch.nn.utils.clip_grad_value_(window.targets(_listed(parameters)), clip_value)


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def fuse(accelerator: accelerate.Accelerator, **options: Any) -> Accelerator:
    """Turn an accelerator that somebody else has made, and that has prepared nothing yet, into ours.

    Args:
        accelerator: Is changed, and returned.
        **options: Of FusedAccumulator.

    Raises:
        TypeError: it is of a subclass of `accelerate.Accelerator`.
        RuntimeError: it has prepared a model or an optimizer.
        ValueError: as `Accelerator`.
    """
    if type(accelerator) is not accelerate.Accelerator:
        raise TypeError(f"fuse: expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    if accelerator._models or accelerator._optimizers:
        raise RuntimeError("fuse: this accelerator has prepared models or optimizers; call fuse(accelerator) before")
    accelerator.__class__ = Accelerator
    accelerator._fuse(options)
    return accelerator
