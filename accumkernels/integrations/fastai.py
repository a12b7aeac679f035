"""A fastai callback that lets FusedAccumulator accumulate, in place of GradientAccumulation.

from accumkernels.integrations.fastai import FusedAccumulation

Learner(dls, model, loss_func=loss, cbs=[FusedAccumulation(n_acc=64), GradientClip(1.0)]).to_fp16().fit_one_cycle(5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..accumulator import FusedAccumulator, parts_of
from ..errors import expect, needs

with needs("fastai", oldest="2.8"):
    from fastai.callback.core import Callback, CancelBatchException, CancelStepException
    from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
    from fastai.callback.training import GradientAccumulation
    from fastai.learner import Learner
    from fastai.torch_core import find_bs, num_distrib


class FusedAccumulation(Callback):
    """Accumulates in place of fastai's `GradientAccumulation`, with any optimizer of fastai's and with torch's.

    A window ends when it has `n_acc` samples or more, or with the last batch of the fit, and its gradient is the mean
    over its samples. MixedPrecision, GradientClip and callbacks that look at `.grad` in `before_step` see the averaged,
    unscaled gradient; before that, `.grad` is None. It runs in one process.

    Args:
        n_acc: The number of samples in a window.
        weight: Maps the Learner to what the current batch's mean loss averages, for instance
            `lambda learn: (learn.y != -100).sum()`. None: the samples of the batch.
        **options: Options of FusedAccumulator, such as `noise_scale=True`; not `master_weights`.
    """

    order = MixedPrecision.order - 4  # as GradientAccumulation: a batch ends before the scaler looks at gradients
    run_valid = False

    def __init__(
        self, n_acc: int = 32, weight: Callable[[Learner], float | Tensor] | None = None, **options: Any
    ) -> None:
        self.n_acc = expect(n_acc, int, "n_acc", "an int")
        self.weight = expect(weight, Callable | None, "weight", "a function of a Learner, or None")
        if options.get("master_weights"):
            raise ValueError("master_weights=True: fastai builds its optimizer over the model's own parameters")
        self.options = options
        self.accumulator: FusedAccumulator | None = None
        self.samples = 0

    def before_fit(self) -> None:
        """Refuse what cannot be right.

        Raises:
            ValueError: Another callback accumulates or scales by itself, or there are several processes.
        """
        self._release()  # after an exception in an earlier fit
        for kind, instead in (
            (GradientAccumulation, "FusedAccumulation takes its place"),
            (NonNativeMixedPrecision, "use to_fp16() or to_bf16()"),
        ):
            if any(isinstance(callback, kind) for callback in self.learn.cbs):
                raise ValueError(f"FusedAccumulation with {kind.__name__}: {instead}")
        if num_distrib() > 1:
            raise ValueError(
                f"FusedAccumulation in fastai runs in one process, and there are {num_distrib()}: use accelerate, "
                "Lightning or a loop of your own"
            )

    def before_batch(self) -> None:
        """Make the accumulator before the first forward, when MixedPrecision has made the scaler."""
        if self.accumulator is None:
            scaler = getattr(self.learn, "scaler", None) if self._precision is not None else None
            self.accumulator = FusedAccumulator(self.learn.model, scaler=scaler, **self.options)

    def before_backward(self) -> None:
        """Let 16-bit gradients be taken as they are: no callback finds a `.grad` inside a window."""
        assert self.accumulator is not None
        parts_of(self.accumulator).runner.plan(self.learn.loss_grad)

    def after_backward(self) -> None:
        """Take the gradients."""
        assert self.accumulator is not None
        parts_of(self.accumulator).runner.take_plan_back()
        samples = find_bs(self.learn.yb)
        weight = samples if self.weight is None else self.weight(self.learn)
        self.accumulator.accumulate(weight, loss=self.learn.loss)
        self.samples += samples

    def before_step(self) -> None:
        """Go on to the next batch inside a window; at its end, set `.grad`."""
        assert self.accumulator is not None
        ends = self.learn.epoch + 1 == self.learn.n_epoch and self.learn.iter + 1 == self.learn.n_iter
        if self.samples < self.n_acc and not ends:
            raise CancelBatchException
        self.samples = 0
        parts, stepped = parts_of(self.accumulator), _Stepped(self.learn.opt.param_lists)
        self.accumulator.finalize(stepped)
        if parts.scaler.scaler is not None:
            verdict = parts.window().verdict
            assert verdict is not None
            parts.scaler.record(self._precision, verdict.skip, verdict.found_inf)  # the scaler steps this callback
        elif self.accumulator.step_was_skipped:
            raise CancelStepException

    def after_step(self) -> None:
        """Open the next window, before fastai writes zeros to `.grad`."""
        assert self.accumulator is not None
        self.accumulator.zero_()

    def after_fit(self) -> None:
        """Let go of the model."""
        self._release()

    @property
    def _precision(self) -> Any:
        return next((callback for callback in self.learn.cbs if isinstance(callback, MixedPrecision)), None)

    def _release(self) -> None:
        if self.accumulator is not None:
            self.accumulator.remove()
        self.accumulator, self.samples = None, 0


class _Stepped(torch.optim.Optimizer):
    """The parameters that fastai's optimizer steps, which is no torch.optim.Optimizer."""

    def __init__(self, groups: Any) -> None:
        super().__init__([{"params": list(group)} for group in groups], {})
