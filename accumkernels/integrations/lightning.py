"""A Lightning callback that lets FusedAccumulator accumulate: one argument of the Trainer.

from accumkernels.integrations.lightning import FusedAccumulation

trainer = Trainer(accumulate_grad_batches=8, precision="bf16-mixed", gradient_clip_val=1.0, strategy="ddp",
                  callbacks=[FusedAccumulation(weight=lambda batch: len(batch[0]))])
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator
from ..errors import expect, logger, needs
from ..splitting.run import BatchReport
from .lightning_readers import is_users, reader_of_grad, reads_grad
from .several import backward_coupled_of_all, driven, run_for_all, take_all
from .window import NOT_RUN, TrainerWindow, split_options

with needs("lightning", oldest="2.4"):
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer, do_nothing_closure
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities import GradClipAlgorithmType

_log = logger(__name__)

_COMMUNICATE = ("reduce", "all_gather")  # methods of strategies that training_step may call


class FusedAccumulation(pl.Callback):
    """Accumulates in place of Lightning, in automatic and in manual optimization.

    `accumulate_grad_batches`, `precision`, `gradient_clip_val` and the hooks of LightningModule mean what they do in
    Lightning: on one device, with `strategy="ddp"` and its variants, where a window communicates once, and with
    ModelParallelStrategy (FSDP2). `.grad` is the averaged, unscaled gradient from `on_before_optimizer_step` on (in a
    module's own `optimizer_step`, when the closure has run), and None before. With `release="microbatch"`, after each
    backward it is the micro-batch's, scaled and divided as in Lightning, until the next backward, the step or the
    batch's end; code may read and change it there. Fused optimizers can be clipped in fp16 too; averaging and clipping
    are folded into their pass if no hook of the user's could look at `.grad`.

    In manual optimization each `manual_backward` is a micro-batch of the optimizers whose parameters it reaches, and
    `optimizer.step()` ends the optimizer's window. Do not divide by the number of micro-batches, and do not call
    `zero_grad`, which drops the optimizer's window.

    Args:
        weight: Maps a batch to the number of samples or tokens that its loss averages. None: every batch counts 1. The
            mean is over the batches of all ranks.
        split: Splits each batch of automatic optimization into parts that fit in memory, for each of which
            `training_step` is called. "auto": as large as fit. A number: the most samples of a part. A dict:
            `micro_batch`, `budget`, `cost` and `multiple_of` of `FusedAccumulator.backward_batch`. Batches then count
            by their samples, or by `weight`. None (default): batches are not split.
        metrics: Whether to log the accumulator's metrics of each window, as `accumulator/grad_norm`.
        **options: Options of FusedAccumulator, such as `release="backward"`.
    """

    def __init__(
        self,
        weight: Callable[[Any], float | Tensor] | None = None,
        *,
        split: str | float | Mapping[str, Any] | None = None,
        metrics: bool = False,
        **options: Any,
    ) -> None:
        self.weight = expect(weight, Callable | None, "weight", "a function of a batch, or None")
        self.metrics = metrics
        self._options = options
        self._split = split_options(split)
        self._replaced: list[tuple[Any, str]] = []  # methods of Lightning's objects, by these
        self._read_elsewhere = False  # whether code on another rank looks at `.grad`
        self._batch_weight: float | Tensor = 1.0
        self._windows: list[TrainerWindow] = []
        self._optimizers: list[Optimizer] = []  # the Trainer's
        self._loss: Tensor | None = None  # of the last backward, not scaled
        self._stepped: list[int] = []  # indices of windows that this batch has stepped
        self._before: list[int] = []  # micro-batches of each window that are not this batch's
        self._begins = False  # whether Lightning is about to clear gradients, and has not yet
        self._precision: Any = None  # whose methods are replaced while `fit()` runs
        self._progress: Any = None  # Lightning's count of batches
        self._manual = False
        self._saved: dict[str, Any] | None = None
        self._left_out: list[str] = []  # what checkpoints after `fit` lack
        # Whether `.grad` is there after backward.
        self._leaves = split is None and options.get("release") == "microbatch"
        self._edited = False  # whether the module's own `backward` looks for it
        self._once: set[str] = set()  # what was said, and is not again

    @classmethod
    def of(cls, trainer: pl.Trainer) -> FusedAccumulation:
        """The callback of a Trainer: in a LightningModule, `FusedAccumulation.of(self.trainer)`.

        Raises:
            RuntimeError: The Trainer has none.
        """
        for callback in trainer.callbacks:
            if isinstance(callback, cls):
                return callback
        raise RuntimeError(f"this Trainer has no {cls.__name__}: pass Trainer(callbacks=[{cls.__name__}()])")

    @property
    def accumulators(self) -> list[FusedAccumulator]:
        """The accumulators of the optimizers, in the same order, while `fit()` runs."""
        return [window.accumulator for window in self._windows]

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator, while `fit()` runs.

        Raises:
            RuntimeError: `fit()` does not run, or there are several optimizers, each with an accumulator.
        """
        if len(self._windows) != 1:
            raise RuntimeError(
                "several optimizers have an accumulator each: see accumulators"
                if self._windows
                else "FusedAccumulation has an accumulator only while trainer.fit() runs"
            )
        return self._windows[0].accumulator

    # ---- from the beginning to the end of fit()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the accumulators.

        Raises:
            TypeError: The Trainer is pytorch_lightning's, whose classes are others.
            ValueError: The strategy shards or accumulates by itself; batches are to be split in manual optimization; or
                there is a weight of batches that training_step takes from an iterator.
        """
        if not isinstance(trainer, pl.Trainer):  # else its strategies would be taken for some that shard
            raise TypeError(
                f"FusedAccumulation needs the Trainer of lightning.pytorch, got {type(trainer).__module__}."
                f"{type(trainer).__qualname__}: import lightning.pytorch where you import pytorch_lightning (a "
                "library that makes its Trainer of that package has no adapter)"
            )
        strategy = trainer.strategy
        ddp = type(strategy) is DDPStrategy  # by type: DeepSpeedStrategy is one
        if not ddp and not isinstance(strategy, (SingleDeviceStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"FusedAccumulation with {type(strategy).__name__}: use strategy='ddp', or ModelParallelStrategy to "
                "shard the model (FSDP2)"
            )
        if self.weight is not None and "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError(
                "FusedAccumulation(weight=...) with training_step(dataloader_iter): the callback does not see which "
                "batch a loss is of. Let training_step take a batch, as training_step(batch, batch_idx)"
            )
        saved = self._saved
        self._release()
        self._saved, self._left_out = saved, []
        precision = strategy.precision_plugin
        scaler = getattr(precision, "scaler", None)
        model = strategy.model if strategy.model is not None else pl_module
        exclusive = len(trainer.optimizers) == 1
        for optimizer in driven(trainer.optimizers):
            self._windows.append(
                TrainerWindow([model], optimizer, scaler, exclusive=exclusive, closures=True, **self._options)
            )
        self._before, self._stepped = [0] * len(self._windows), []
        self._optimizers = list(trainer.optimizers)
        if hasattr(strategy, "_pl_static_graph_delay_done"):
            strategy._pl_static_graph_delay_done = True  # or manual optimization reduces a first static graph by hand
        self._load()
        # Methods rather than a plugin of our own: what other code has set (class, scaler, checkpoints) stays.
        self._precision, self._progress = precision, trainer.fit_loop.epoch_loop.batch_progress
        self._set(precision, "optimizer_step", self._optimizer_step)
        self._set(precision, "clip_gradients", self._clip_gradients)
        self._set(precision, "clip_grad_by_norm", self._clip_grad_by_norm)
        if self._windows:
            self._set(precision, "backward", self._backward)
        if isinstance(strategy, ModelParallelStrategy):
            self._set(strategy, "optimizer_state", functools.partial(self._optimizer_state, strategy))
        self._manual = not pl_module.automatic_optimization
        if self._split is not None:
            if self._manual or not self._windows:
                raise ValueError(
                    "FusedAccumulation(split=...) needs automatic optimization, where the callback runs training_step "
                    "for each part of a batch. In manual optimization, leave it out and call "
                    "FusedAccumulation.of(self.trainer).backward_batch(batch, loss_fn) in training_step"
                )
            self._set(strategy, "training_step", functools.partial(self._training_step, strategy))
            for name in _COMMUNICATE:
                self._set(strategy, name, self._communicating(getattr(strategy, name)))
        else:
            self._set(precision, "pre_backward", self._pre_backward)
            for optimizer in strategy._lightning_optimizers:
                if (window := self._window_of(optimizer)) is not None:
                    zero_grad = functools.partial(_zero_grad, window, self._drops)
                    self._set(optimizer, "zero_grad", zero_grad)
                    self._set(optimizer.optimizer, "zero_grad", zero_grad)
        if self._windows:
            self._find_readers(trainer, pl_module)

    def _set(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Give one of Lightning's objects a method of ours until `_release`."""
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def _find_readers(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find code that looks at `.grad` before `on_before_optimizer_step`; serve it, or say that it finds None."""
        for owner in (pl_module, *trainer.callbacks):
            if is_users(owner, "on_after_backward"):
                self._say_taken(f"{type(owner).__name__}.on_after_backward()")
        methods = {"training_step" if self._manual else "optimizer_step"}
        if not self._manual and self._split is None and not is_users(pl_module, "optimizer_zero_grad"):
            methods = set()  # windows are Lightning's, and can end before `optimizer_step` goes on
            if is_users(pl_module, "optimizer_step"):
                self._set(trainer.precision_plugin, "post_backward", self._post_backward)
        if self._split is not None or self._options.get("release") == "backward":
            methods.add("backward")
        else:
            self._edited = reader_of_grad(pl_module, (), {"backward"}) is not None
        if reader := reader_of_grad(pl_module, trainer.optimizers, methods):
            self._say_taken(f"{reader}(), which reads .grad,")

    def _say_taken(self, who: str) -> None:
        """Say once that gradients are not where FGM, textual inversion and their like look for them."""
        if "taken" in self._once or self._leaves:
            return
        self._once.add("taken")
        _log.warning(
            "%s finds no .grad right after a backward, since the accumulator has taken the gradients: code that reads "
            "or changes them there, such as FGM or textual inversion, needs FusedAccumulation(release='microbatch'), "
            "without split, which leaves a micro-batch's gradients in .grad. The averaged ones are there from "
            "on_before_optimizer_step on",
            who,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the model's values into masters: Lightning may have loaded or reset them since `on_fit_start`.

        Where code of any rank looks at `.grad`, as a callback of rank 0 alone may, all ranks end their windows for it.
        """
        reads = not self._nobody_reads_gradients(pl_module)
        self._read_elsewhere = trainer.strategy.reduce_boolean_decision(reads, all=False)
        self._load_over()

    def _follow(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the accumulators anew if a hook has given the Trainer other optimizers.

        Raises:
            RuntimeError: That was inside a window.
        """
        if trainer.optimizers == self._optimizers or self._precision is None:
            return
        if done := max((0 if w.spent else w.accumulator.micro_batches for w in self._windows), default=0):
            raise RuntimeError(
                f"the Trainer got other optimizers after {done} micro-batches of a window, which they will not see: "
                "set them between windows, as in on_train_epoch_start, or drop the window before, with "
                "FusedAccumulation.of(trainer).accumulator.zero_()"
            )
        self._release()
        self.on_fit_start(trainer, pl_module)
        self.on_train_start(trainer, pl_module)

    def _load_over(self) -> None:
        """Load the state over what was trained or loaded since `on_fit_start`."""
        for window in self._windows:
            window.close()
            window.accumulator.refresh_masters()
        self._load()

    def _load(self) -> None:
        if self._saved is None:
            return
        states = self._saved.get("windows", [self._saved])
        for window, state in zip(self._windows, states, strict=True):
            window.accumulator.load_state_dict(state)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go of the model."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let go of the model; say where gradients are to code that may have found None in their place."""
        looked = isinstance(exception, (AttributeError, TypeError)) and "NoneType" in str(exception)
        looked = looked and "not callable" not in str(exception)
        if looked and any(window.accumulator.micro_batches for window in self._windows):
            self._say_taken("where this exception is of a None found in place of a gradient: code")
        self._release()

    def _release(self) -> None:
        self._saved = None
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced, self._precision = [], None
        self._read_elsewhere = False
        if self._windows:
            open_ = max(0 if window.finalized else window.accumulator.micro_batches for window in self._windows)
            masters = any(window.engine.store.masters is not None for window in self._windows)
            self._left_out = ["the fp32 masters"] * masters + [f"{open_} micro-batches of a window"] * bool(open_)
        for window in self._windows:
            window.release()
        self._windows = []

    # ---- a micro-batch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the next window after a step, unless hooks may look at its gradients, and ask for the batch's weight."""
        self._follow(trainer, pl_module)
        for window in self._windows:
            if self._manual or window.folds or window.current.outgrown:
                window.open()
        self._stepped, self._begins = [], False
        self._before = [window.accumulator.micro_batches for window in self._windows]
        self._batch_weight = 1.0 if self.weight is None else self.weight(batch)

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Lightning begins a window, in automatic optimization: its `zero_grad` drops what no step has used.

        That is there if `optimizer_step` has left out the step, or `on_train_batch_start` has ended an epoch.
        """
        self._begins = not self._manual

    def _drops(self) -> bool:
        """Whether the `zero_grad` of an optimizer drops its window now, rather than somewhere inside it."""
        begins, self._begins = self._begins, False
        return begins or self._manual

    def _pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        """Open the next window after a step, which manual optimization may take inside a batch.

        Not a hook of ours, since Lightning's finders train without callbacks.
        """
        self._follow(module.trainer, module)  # `on_train_batch_start` of a module comes after ours
        if self._begins:
            self._say_not_cleared(module)
        scaled = getattr(self._precision, "scaler", None) is not None
        if module.automatic_optimization:  # where Lightning divides, even by 1
            ends = not module.trainer.fit_loop._should_accumulate()
            self._begin(module.trainer.accumulate_grad_batches, 1 + scaled, ends)
        else:  # we cannot know which backward is the last
            self._begin(1, int(scaled))
        return type(self._precision).pre_backward(self._precision, tensor, module)

    def _say_not_cleared(self, pl_module: pl.LightningModule) -> None:
        """Say once that the module's `optimizer_zero_grad` has left gradients, if there are any."""
        left = any(
            window.accumulator.micro_batches
            and (not window.finalized or any(p.grad is not None for p in window.accumulator.parameters()))
            for window in self._windows
        )
        if left and "optimizer_zero_grad" not in self._once:
            self._once.add("optimizer_zero_grad")
            _log.warning(
                "%s.optimizer_zero_grad() has not called optimizer.zero_grad(): gradients that were stepped are "
                "dropped all the same, and others are averaged with those of the next window, where Lightning adds "
                "them up. Let the Trainer count micro-batches: accumulate_grad_batches",
                type(pl_module).__name__,
            )

    def _begin(self, divided_by: int, divisions: int = 0, ends: bool = False) -> None:
        self._take()
        for window in self._windows:
            window.open()
            window.begin(divided_by, divisions, ends=ends)

    def _backward(self, tensor: Tensor, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Run the precision plugin's backward, and take its gradients while it runs or after it."""
        if self._split is not None:  # `_training_step` has run it
            return
        own = functools.partial(type(self._precision).backward, self._precision)
        run = lambda loss: own(loss, model, *args, **kwargs)  # noqa: E731
        windows, leaves = self._windows, self._leaves or self._edited
        scaler = getattr(self._precision, "scaler", None)
        self._loss = tensor.detach() if scaler is None else tensor.detach() / scaler.scale(torch.ones_like(tensor))
        alone = len(windows) == 1 and windows[0].exclusive
        caller = None if self.weight is not None else _caller(self._manual)
        run_for_all(windows, tensor, self._batch_weight, run, caller=caller, alone=alone, leaves=leaves)

    def _post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        """Call the hooks; average, since the module's `optimizer_step` may look at gradients before it steps."""
        loss = type(self._precision).post_backward(self._precision, tensor, module)
        if not module.trainer.fit_loop._should_accumulate():
            self._take()
            self._windows[0].finalize()
        return loss

    def backward_coupled(
        self,
        chunks: Iterable[Any],
        encode: Callable[[Any], Any],
        loss_fn: Callable[..., Tensor],
        *,
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """`FusedAccumulator.backward_coupled`, in place of a `manual_backward`: a loss that couples samples.

            loss = FusedAccumulation.of(self.trainer).backward_coupled(chunks, self.encode, self.loss)

        The hooks `on_before_backward` and `on_after_backward` are not called.

        Args:
            chunks: The parts of the micro-batch.
            encode: Called with each chunk, twice; returns a tensor, or a tuple or dict of tensors, with one row per
                sample.
            loss_fn: Returns the plain loss of all encodings.
            weight: What the micro-batch counts; by default what the callback's `weight` says of the batch.

        Returns:
            The loss, detached.

        Raises:
            TypeError, ValueError: As `FusedAccumulator.backward_coupled`.
            RuntimeError: As `FusedAccumulator.backward_coupled`; or optimization is automatic, or `fit()` does not run.
        """
        if not self._windows:
            raise RuntimeError(
                "backward_coupled(): the callback has no accumulator. It makes them in trainer.fit(), for optimizers "
                "that share no parameters"
            )
        if not self._manual:
            raise RuntimeError(
                "backward_coupled() in automatic optimization, where Lightning runs the backward of the loss that "
                "training_step returns: set self.automatic_optimization = False in the module, and step the optimizer "
                "in training_step"
            )
        self._begin(1, int(len(self._windows) > 1))  # of one window, the loss is looked at before we divide it
        weight = self._batch_weight if weight is None else weight
        loss, _ = backward_coupled_of_all(self._windows, chunks, encode, loss_fn, weight)
        return loss

    def backward_batch(self, batch: Any, loss_fn: Callable[[Any], Any], **options: Any) -> BatchReport:
        """`FusedAccumulator.backward_batch`, in place of `manual_backward`: as many micro-batches as it takes to fit.

            FusedAccumulation.of(self.trainer).backward_batch(batch, self.loss)

        The hooks `on_before_backward` and `on_after_backward` are not called.

        Args:
            batch: See `FusedAccumulator.backward_batch`, as the following.
            loss_fn: Called with a part of the batch; returns its mean loss, or that and its weight (and more). On
                several ranks it must not communicate.
            **options: `micro_batch`, `budget`, `cost`, `collate`, `weight` (default: the callback's), `multiple_of`.

        Returns:
            A `BatchReport`: what ran, how often memory ran out, the peak, the loss, and the extras.

        Raises:
            TypeError, ValueError, torch.OutOfMemoryError: As `FusedAccumulator.backward_batch`.
            RuntimeError: As `FusedAccumulator.backward_batch`; or optimization is automatic, `fit()` does not run, or
                there are several optimizers.
        """
        if not self._manual or len(self._windows) != 1:
            raise RuntimeError(
                f"FusedAccumulation.backward_batch() with {len(self._windows)} optimizers in "
                f"{'manual' if self._manual else 'automatic'} optimization: it needs trainer.fit(), manual "
                "optimization and one optimizer. In automatic optimization pass FusedAccumulation(split='auto'); with "
                "several optimizers split the batch yourself, with a manual_backward for each part"
            )
        self._begin(1)
        return self._windows[0].backward_batch(batch, loss_fn, **{"weight": self.weight, **options})

    def _training_step(self, strategy: Any, batch: Any, *args: Any) -> Tensor | None:
        """Run the strategy's training step and backward for each part of the batch; returns the loss of all parts."""
        window = self._windows[0]
        trainer = strategy.lightning_module.trainer
        results = vars(trainer._results)
        losses: list[Tensor] = []

        def loss_fn(part: Any) -> Any:
            results.update(batch=part, batch_size=None)  # what it logs counts by its samples
            output = type(strategy).training_step(strategy, part, *args)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:  # skipped
                return torch.zeros((), device=strategy.root_device), 0.0
            losses[:] = [loss.detach()]
            return loss if self.weight is None else (loss, self.weight(part))

        window.open()
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            window.close()  # as Lightning's zero_grad, which comes after the parts' backwards
        self._begin(1, ends=not trainer.fit_loop._should_accumulate())
        try:
            report = window.backward_batch(batch, loss_fn, **(self._split or {}))
        finally:
            results.update(batch=batch, batch_size=None)
        return report.loss.to(losses[0].dtype) if losses else None

    def _communicating(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A strategy's method that is an error while parts run; a function, since Lightning copies what it keeps."""

        def communicate(*args: Any, **kwargs: Any) -> Any:
            if any(window.splits_differ for window in self._windows):
                raise RuntimeError(
                    "training_step communicates, while ranks may have split their batches into different numbers of "
                    "parts, and would wait for each other: log with on_step=False or without sync_dist=True, and "
                    "gather in on_train_batch_end"
                )
            return method(*args, **kwargs)

        return communicate

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the gradients, unless other code is to find them."""
        if not self._leaves:
            self._take()

    def _take(self) -> None:
        """Take the gradients of the last backward, each for the optimizer that steps its parameter."""
        waiting = [one for one in self._windows if one.notes.running is not None and (one.exclusive or one.reached)]
        take_all(waiting, self._loss)

    # ---- the end of a window, in place of the precision plugin's

    def _window_of(self, optimizer: Any) -> TrainerWindow | None:
        """The optimizer's window; None if the optimizer is left to Lightning."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return next((window for window in self._windows if window.optimizer is optimizer), None)

    def _optimizer_step(
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        window = self._window_of(optimizer)
        if window is None:
            kind = type(self._precision)
            return kind.optimizer_step(self._precision, optimizer, model=model, closure=closure, **kwargs)
        self._take()
        index = self._windows.index(window)
        again = None
        if self._manual and window.evaluates and closure is not do_nothing_closure:
            again = functools.partial(self._evaluate, window, optimizer, model, closure)
        ran = window.reached or window.accumulator.micro_batches > self._before[index]  # a backward of this batch
        result = NOT_RUN if again is not None and ran and not window.finalized else closure()
        self._take()
        if window.notes.stepped and not self._manual:
            window.open()  # in an epoch without backwards: StochasticWeightAveraging's for BatchNorm
        if self._manual:
            self._say_averaged(window.accumulator.micro_batches - self._before[index])
            self._before[index] = 0
        window.folds = again is None and self._nobody_reads_gradients(model)
        if not window.folds:
            window.finalize()
        if result is not NOT_RUN:
            self._precision._after_closure(model, optimizer)  # on_before_optimizer_step, and the Trainer's clipping
        window.step(result, again=again, **kwargs)
        self._stepped.append(index)
        return None if result is NOT_RUN else result

    def _evaluate(
        self, window: TrainerWindow, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any]
    ) -> Any:
        """Run a closure of manual optimization where the optimizer evaluates it: SAM, at weights that it has moved."""
        result = closure()
        self._take()
        window.finalize()
        self._precision._after_closure(model, optimizer)
        return result

    def _say_averaged(self, backwards: int) -> None:
        """Say once that losses of one batch, such as a GAN's, are averaged, if a window has several of them."""
        if backwards < 2 or self.weight is not None or "averaged" in self._once:
            return
        self._once.add("averaged")
        _log.warning(
            "training_step has called manual_backward %d times before optimizer.step(): each is a micro-batch, and "
            "their gradients are averaged, where Lightning adds them up. Right for parts of a batch; where losses add "
            "up, such as a GAN's for real and for generated samples, call manual_backward of their sum",
            backwards,
        )

    def _nobody_reads_gradients(self, model: pl.LightningModule) -> bool:
        return not self._read_elsewhere and not reads_grad((model, *model.trainer.callbacks))

    def _clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        window = self._window_of(optimizer)
        if window is None:
            type(self._precision).clip_gradients(self._precision, optimizer, clip_val, gradient_clip_algorithm)
            return
        self._take()
        if not window.folds or gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            window.finalize()
        Precision.clip_gradients(self._precision, optimizer, clip_val, gradient_clip_algorithm)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        window = self._window_of(optimizer)
        if window is None:
            Precision.clip_grad_by_norm(self._precision, optimizer, clip_val)
        elif window.folds and not window.finalized:
            window.clip_in_step(clip_val)
        else:
            window.clip_grad_norm_(clip_val)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics of windows that this batch has ended; nothing is read back from the device."""
        self._take()
        for index in self._stepped if self.metrics else ():
            name = "accumulator/" if len(self._windows) == 1 else f"accumulator/{index}/"
            values = self._windows[index].metrics()
            pl_module.log_dict({f"{name}{key}": value for key, value in values.items()})

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The accumulators' states: masters, and an open window between batches; empty with FSDP2."""
        if not self._windows:
            if self._left_out:
                _log.warning(
                    "a checkpoint after trainer.fit() has ended, by an exception or not, leaves out %s: a run that "
                    "resumes from it goes on without. Let ModelCheckpoint save while it runs (every_n_train_steps=..., "
                    "save_last=True)",
                    " and ".join(self._left_out),
                )
            return {}
        sharded = any(window.engine.store.sharded for window in self._windows)
        whole = self._progress.current.processed >= self._progress.current.started
        if whole:
            self._take()
        if sharded or not whole:  # inside of a batch, which a run that resumes runs again
            if lost := max(0 if window.spent else window.accumulator.micro_batches for window in self._windows):
                _log.warning(
                    "a checkpoint after %d micro-batches of a window %s leaves them out, as Lightning does: in a run "
                    "that resumes from it, that window has only the rest. Save after the optimizer's step "
                    "(ModelCheckpoint(every_n_train_steps=...))",
                    lost,
                    "of a sharded model" if sharded else "and inside of a batch",
                )
        if sharded:
            return {}
        states = [window.state_dict(whole) for window in self._windows]
        return states[0] if len(states) == 1 else {"windows": states}

    def _optimizer_state(self, strategy: Any, optimizer: Optimizer) -> dict[str, Any]:
        """The strategy's, which may make the state first."""
        window = self._window_of(optimizer)
        with contextlib.nullcontext() if window is None else window.saving():
            return type(strategy).optimizer_state(strategy, optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until `fit` makes the accumulators."""
        self._saved = dict(state_dict) or None
        if self._windows:  # a finder of Lightning's restores what it has trained
            self._load_over()


def _zero_grad(window: TrainerWindow, drops: Callable[[], bool], set_to_none: bool = True) -> None:
    """`zero_grad` of an optimizer: as in Lightning, it drops what was accumulated; an open window, if it `drops` it."""
    if drops() and not (window.finalized and not window.notes.stepped):
        window.close()
    window.drop_grads(set_to_none)  # also of parameters that were added to the optimizer since


def _caller(manual: bool) -> FrameType | None:
    """The frame that has called `manual_backward`; where Lightning calls backward itself, it does so in one place."""
    frame: FrameType | None = sys._getframe()
    while manual and frame is not None and frame.f_code.co_name != "manual_backward":
        frame = frame.f_back
    return frame.f_back if manual and frame is not None else frame
