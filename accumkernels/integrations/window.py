"""What the adapters share: a window between the calls of a trainer that divides its losses and steps when it likes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator
from ..window.optimizers import check_no_closure, check_optimizer


def missing(package: str) -> ImportError:
    """The error of an adapter whose package is not installed."""
    return ImportError(
        f"accumkernels.integrations.{package} needs {package}: pip install 'accumkernels[{package}]'", name=package
    )


class TrainerWindow:
    """The windows of one model and one optimizer, driven by a trainer.

    The trainer divides each loss by a number of steps before it scales it. That is left so, since then 16-bit
    intermediates, overflows and the loss scale are those of the trainer's own accumulation; `finalize` undoes it for
    the micro-batches that really ran: the gradient is `sum_i w_i g_i / sum_i w_i` of the undivided losses.

    Args:
        model: Of one process.
        optimizer: Steps all trainable parameters of the model. With `master_weights=True` it gets the masters in place
            of 16-bit parameters, and its state goes with them.
        scaler: The trainer's.
        **options: Of FusedAccumulator.

    Attributes:
        accumulator: Made here.
        divided_by: What the losses of this window were divided by.
        finalized: Whether `.grad` holds the averaged gradient.
        stepped: Whether the optimizer was stepped with it.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler | None, **options: Any
    ) -> None:
        check_optimizer(optimizer, "accumkernels.integrations")
        check_no_closure(optimizer)
        self.accumulator = FusedAccumulator(model, scaler=scaler, **options)
        self.model = model
        self.optimizer = optimizer
        self.divided_by: float | Tensor = 1
        self.finalized = False
        self.stepped = False
        self._scaler = scaler
        translated = self.accumulator.param_groups(optimizer.param_groups)
        self._before = [list(group["params"]) for group in optimizer.param_groups]
        self._set_params([group["params"] for group in translated])

    def _set_params(self, params: list[list[Tensor]]) -> None:
        """Let the optimizer step other tensors, with the state that it has."""
        for group, new in zip(self.optimizer.param_groups, params, strict=False):
            for old, target in zip(group["params"], new, strict=False):
                if old is not target and old in self.optimizer.state:
                    self.optimizer.state[target] = self.optimizer.state.pop(old)
            group["params"] = [*new, *group["params"][len(new) :]]

    def targets(self, params: list[Tensor]) -> list[Tensor]:
        """What the optimizer steps for some of the model's parameters."""
        return self.accumulator.param_groups([{"params": params}])[0]["params"]

    def open(self) -> None:
        """Before a forward or a backward: begin the next window where the last one has ended.

        Raises:
            RuntimeError: the last one was neither stepped nor dropped.
        """
        if not self.finalized:
            return
        if not self.stepped and any(p.grad is not None for p in self.accumulator.parameters()):
            raise RuntimeError(
                "backward after the last one of its window: step the optimizer before, or drop the window with "
                "optimizer.zero_grad(). A micro-batch has one backward: add up its losses, and let the trainer count "
                "micro-batches (accelerate: `with accelerator.accumulate(model)`)"
            )
        self.close()

    def finalize(self) -> None:
        """Average and hand the result out as `.grad`; nothing where that is done, or nothing was accumulated."""
        if self.finalized or self.accumulator.micro_batches == 0:
            return
        divisor = None
        if isinstance(self.divided_by, Tensor) or self.divided_by != 1:
            weight = self.accumulator.weight
            # A window without weight is skipped, whatever it is divided by; 0 would count as overflow.
            divisor = torch.where(weight > 0, weight / self.divided_by, 1.0)
        self.accumulator.finalize(self.optimizer, divisor=divisor)
        self.finalized = True

    def clip_grad_norm_(self, max_norm: float | Tensor, norm_type: float = 2.0) -> Tensor:
        """Clip the averaged gradient of all parameters; the answer is its norm before."""
        self.finalize()
        if not self.finalized:
            return torch.zeros(())
        return self.accumulator.clip_grad_norm_(max_norm, norm_type)

    def step(self, **kwargs: Any) -> None:
        """Step the optimizer and update the scale, as GradScaler does; a window with an overflow is skipped.

        `.grad` stays until the next window, as after any optimizer's step.
        """
        self.finalize()
        if self.stepped:
            raise RuntimeError("optimizer.step() twice for one window: no backward has run since the last step")
        if not self.finalized:
            self.accumulator.step(self.optimizer)  # empty: skips, and says so
            return
        if self._scaler is not None and self._scaler.is_enabled():
            self._scaler.step(self.optimizer, **kwargs)
            self._scaler.update()
        elif not self.accumulator.step_was_skipped:
            self.optimizer.step(**kwargs)
        self.stepped = True

    def close(self) -> None:
        """Drop the window, stepped or not, and open the next."""
        self.accumulator.zero_()
        self.finalized = self.stepped = False

    def release(self) -> None:
        """Give the model and the optimizer back as they were, but trained."""
        self.close()
        self._set_params(self._before)
        self.accumulator.remove()
