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
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..accumulator import FusedAccumulator
from ..errors import expect, needs, wrong_type
from ..ranks.ddp import is_silent
from ..splitting.run import BatchReport
from ..window.optimizers import owned
from .several import backward_coupled_of_all, backward_of_all, driven
from .window import NOT_RUN, TrainerWindow

with needs("accelerate", oldest="1.10"):
    from accelerate import Accelerator as Stock
    from accelerate.optimizer import AcceleratedOptimizer

_ONE_PROCESS_A_DEVICE = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
                         "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")  # fmt: skip


class FusedOptimizer(AcceleratedOptimizer):
    """What `Accelerator.prepare` returns for an optimizer. It steps the windows of its accumulator."""

    window: TrainerWindow | None = None  # None while no model is prepared whose parameters it steps

    def step(self, closure: Any = None) -> None:
        """Step at the end of a window; inside one, do nothing.

        Args:
            closure: Called once, before the step; or by an optimizer that is not torch's own, as often as it likes.

        Raises:
            TypeError: The optimizer evaluates its closure a second time, with a GradScaler or masters.
        """
        if self.window is None:
            super().step(closure)
        elif self.gradient_state.sync_gradients:
            window, result, again = self.window, None, None
            window.gets_closure = window.requires_closure or (closure is not None and window.takes_closure)
            if closure is not None:
                closure = torch.enable_grad()(closure)
                again = functools.partial(self._evaluate, closure) if window.evaluates else None
                ran = again is not None and window.finalized and not window.spent
                result = NOT_RUN if ran else closure()
            window.step(result, again=again)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Run a closure where the optimizer evaluates it: SAM, at weights that it has moved."""
        result = closure()
        assert self.window is not None
        self.window.finalize()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the window that has ended, stepped or not.

        Inside `accumulate()`, with more than one step to a window, an open window is kept.
        """
        if self.window is None:
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            window = self.window
            counted = window.inside and self.gradient_state.num_steps > 1
            if window.finalized and not window.notes.stepped:
                window.drop_grads(set_to_none is not False)
            elif window.finalized or not counted:
                window.close()
                super().zero_grad(set_to_none)  # also of parameters that were added to the optimizer since

    def train(self) -> None:
        """As in accelerate; the model gets the weights that a schedule-free optimizer trains at."""
        with self._moving_masters("train"):
            super().train()

    def eval(self) -> None:
        """As in accelerate; the model gets the weights that a schedule-free optimizer evaluates at."""
        with self._moving_masters("eval"):
            super().eval()

    def _moving_masters(self, mode: str) -> AbstractContextManager[None]:
        if self.window is None or not hasattr(self.optimizer, mode):  # Trainers ask any optimizer, at every micro-batch
            return contextlib.nullcontext()
        return self.window.moving_masters()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for overflow (fused optimizers included) or a window without weight."""
        return bool(super().step_was_skipped or (self.window is not None and self.window.step_was_skipped))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "window"}


class Accelerator(Stock):
    """`accelerate.Accelerator` in which FusedAccumulator accumulates.

    `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `sync_gradients`, `no_sync`, `optimizer_step_was_skipped`
    and the prepared optimizers and schedulers mean what they do in accelerate, in one process or in several: under
    DistributedDataParallel, where a window communicates once, and FSDP2. Each optimizer has an accumulator of its own.

    Inside `accumulate()`, a window is the weighted mean over the micro-batches that ran, on all ranks, and `.grad` is
    None before its last backward, then the averaged, unscaled gradient. Outside of it, a loop counts its micro-batches
    and scales its losses itself; losses without weights are added up as in accelerate, and averaged over ranks.

    Args:
        *args: Of `accelerate.Accelerator`.
        accumulator_options: Options of FusedAccumulator, such as `{"release": "backward"}`.
        **kwargs: Of `accelerate.Accelerator`.

    Attributes:
        micro_batch_weight: The weight of micro-batches whose `backward` gets none; None unless set.
        loss_divided_by: What the caller of `backward` has divided its losses by; 1 unless set.
        last_loss: What `backward` was given last, where `counts_micro_batches`.
        counts_micro_batches: Whether the caller of `backward` outside of `accumulate()` sets `sync_gradients`.
        splits_together: Whether ranks split batches into equally many parts, so that losses may communicate.

    Raises:
        ValueError: accelerate runs with FSDP1, DeepSpeed or Megatron-LM, or on a TPU.
    """

    _custom_objects: list[Any]  # accelerate's: what is registered for checkpointing

    def __init__(self, *args: Any, accumulator_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        expect(accumulator_options, Mapping | None, "accumulator_options", "a dict of options")
        super().__init__(*args, **kwargs)
        self._fuse(accumulator_options or {})

    def _fuse(self, options: Mapping[str, Any]) -> None:
        if not self.is_fsdp2 and self.distributed_type.value not in _ONE_PROCESS_A_DEVICE:
            instead = "use FullyShardedDataParallelPlugin(fsdp_version=2), or DistributedDataParallel"
            name = self.distributed_type.value.replace("FSDP", "FSDP1")
            raise ValueError(f"accelerate runs with {name}, which reduces gradients on terms of its own: {instead}")
        self.micro_batch_weight: float | Tensor | None = None
        self.loss_divided_by: float | Tensor = 1
        self.last_loss: Tensor | None = None
        self._reads_gradients = True
        self.counts_micro_batches = False
        self.splits_together = False
        self._accumulator_options = dict(options)
        self._preparing = False
        self._wrapped: list[nn.Module] = []  # as prepared; accelerate's `_models` has what was passed
        self._windows: list[TrainerWindow] = []  # of the prepared optimizers that have one

    @property
    def accumulators(self) -> list[FusedAccumulator]:
        """The accumulators of the prepared optimizers, in the same order."""
        return [window.accumulator for window in self._windows]

    @property
    def accumulator(self) -> FusedAccumulator:
        """The accumulator of the prepared optimizer, with its metrics and its `state_dict`.

        Raises:
            RuntimeError: No optimizer was prepared, or several were.
        """
        if len(self._windows) != 1:
            raise RuntimeError(
                f"{len(self._windows)} optimizers were prepared together with their models, and each has an "
                "accumulator: see accelerator.accumulators"
                if self._windows
                else "no accumulator yet: pass the model and its optimizer to accelerator.prepare(...) first"
            )
        return self._windows[0].accumulator

    @property
    def reads_gradients(self) -> bool:
        """Whether the loop looks at `.grad` between backward and step; the same on all ranks.

        If it is set to False, `optimizer.step()` averages and clips, in the pass of a fused optimizer: `.grad` stays
        None, and the norm that `clip_grad_norm_` returned gets its value in the step.
        """
        return self._reads_gradients

    @reads_gradients.setter
    def reads_gradients(self, reads: bool) -> None:
        self._reads_gradients = reads
        for window in self._windows:
            window.folds = not reads

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """accelerate's. One that is set after `prepare`, as by trainers with one for each model, scales from then on.

        Raises:
            RuntimeError: It is set to another one inside a window, whose sums are unscaled by the one before.
        """
        scaler: torch.amp.GradScaler | None = self.__dict__.get("scaler")
        return scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        others = [window for window in self.__dict__.get("_windows", ()) if not window.scales_by(scaler)]
        if any(window.accumulator.micro_batches and not window.spent for window in others):
            raise RuntimeError(
                "accelerator.scaler = ... inside a window, whose micro-batches another one has scaled: set it before "
                "the window's first backward, or after optimizer.step()"
            )
        self.__dict__["scaler"] = scaler
        for window in others:
            window.scale_by(scaler)

    # ---- preparing

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate; an optimizer gets an accumulator once a model that it steps is prepared too."""
        self._preparing = True
        try:
            prepared = super().prepare(*args, **kwargs)
        finally:
            self._preparing = False
        for item in prepared if isinstance(prepared, (list, tuple)) else (prepared,):
            if isinstance(item, nn.Module):
                self._note(item)
        self._make_windows()
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As in accelerate."""
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if not evaluation_mode:
            self._note(prepared)
            if not self._preparing:
                self._make_windows()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As in accelerate."""
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared.__class__ = FusedOptimizer  # accelerate offers no way to choose the class that wraps optimizers
        return prepared

    @property
    def inside_a_window(self) -> bool:
        """Whether this rank has micro-batches in a window that has not ended."""
        return any(window.accumulator.micro_batches and not window.finalized for window in self._windows)

    def adopt(self, model: nn.Module) -> None:
        """Take back a model that was prepared before `free_memory()`, wrapped as it is."""
        self._note(model)
        self._make_windows()

    def _note(self, model: nn.Module) -> None:
        if not any(model is other for other in self._wrapped):
            self._wrapped.append(model)

    def _make_windows(self) -> None:
        """Give each optimizer a window over the models that it steps, if any are prepared yet."""
        try:
            self._give_windows()
        finally:
            self._windows = [optimizer.window for optimizer in self._optimizers if optimizer.window is not None]
            for window in self._windows:
                window.all_windows, window.folds = list(map(weakref.ref, self._windows)), not self.reads_gradients

    def _give_windows(self) -> None:
        params = [owned((o,)) if o.window is None else o.window.current.stepped() for o in self._optimizers]
        alike = driven([optimizer.optimizer for optimizer in self._optimizers], params)
        steps = [set(map(id, mine)) for mine in params]
        for optimizer, stepped in zip(self._optimizers, steps, strict=True):
            models = [model for model in self._wrapped if any(id(p) in stepped for p in model.parameters())]
            models = models if any(optimizer.optimizer is other for other in alike) else []
            others = set().union(*(other for other in steps if other is not stepped))
            exclusive = not any(id(p) in others for model in models for p in model.parameters())
            window = optimizer.window
            if window is not None:
                if len(window.modules) == len(models) and window.exclusive == exclusive:
                    continue
                window.release()
                optimizer.window = None
            if models:
                optimizer.window = TrainerWindow(
                    models, optimizer.optimizer, self.scaler, exclusive=exclusive, **self._accumulator_options
                )

    def free_memory(self, *objects: Any) -> Any:
        """As in accelerate; accumulators release their models too."""
        self.release_accumulator()
        return super().free_memory(*objects)

    def release_accumulator(self) -> None:
        """Release models and optimizers, so that other accumulators may take them; `prepare` makes new ones."""
        for optimizer in self._optimizers:
            if getattr(optimizer, "window", None) is not None:
                optimizer.window.release()
                optimizer.window = None
        self._wrapped, self._windows = [], []

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate. If `accumulator` is registered for checkpointing, it saves open windows and masters.

        Inside a window all ranks call this together, and the sums of all of them are saved.

        Raises:
            RuntimeError: `accumulator` is registered, and FSDP2 shards what it has of an open window.
        """
        states: dict[int, TrainerWindow] = {}
        for window in self._windows:
            one, sharded = window.accumulator, window.engine.store.sharded
            if window.spent:
                window.close()
            elif sharded and one.micro_batches and any(one is other for other in self._custom_objects):
                raise RuntimeError(
                    f"save_state() after {one.micro_batches} micro-batches of a window of a sharded model: accelerate "
                    "saves registered objects of one rank, and each has another part of the sums. Call it after "
                    "optimizer.step(), where accelerator.sync_gradients is True; or do not register the accumulator, "
                    "and the window begins anew in a run that loads the state, as in accelerate"
                )
            elif not sharded and (one.micro_batches or not self.sync_gradients):
                states[id(one)] = window
        objects = self._custom_objects
        self._custom_objects = [states.get(id(one), one) for one in objects]
        try:
            with self.saving():
                return super().save_state(*args, **kwargs)
        finally:
            self._custom_objects = objects

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let code save optimizers, by torch.distributed.checkpoint too, inside a window."""
        with contextlib.ExitStack() as stack:
            for window in self._windows:
                stack.enter_context(window.saving())
            yield

    # ---- a window

    def open_window(self) -> None:
        """Open the next window if the last one was stepped; `accumulate` and `backward` do so by themselves.

        Raises:
            RuntimeError: the last one was neither stepped nor dropped.
        """
        for window in _ready(self._windows):
            window.open()

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As in accelerate."""
        windows = self._windows
        for window in windows:
            window.enter(waits=len(windows) > 1)
        try:
            with super().accumulate(*models):
                yield
        finally:
            for window in windows:
                window.inside = False
                window.expected_end = window.number if self.sync_gradients else None

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """As in accelerate; it has no effect with FSDP2, which reduces each micro-batch."""
        if self.is_fsdp2 and any(model is module for window in self._windows for module in window.modules):
            return contextlib.nullcontext()
        return super().no_sync(model)

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """As in accelerate; a model that was prepared together with its optimizer has nothing to trigger."""
        if isinstance(model, DistributedDataParallel) and is_silent(model):
            yield
        else:
            with Stock.trigger_sync_in_backward(model):
                yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """As in accelerate, if batches are even.

        Raises:
            ValueError: Batches are uneven, so ranks would have unequal numbers of windows.
        """
        if self.multi_device and self._windows and not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs with uneven batches: ranks end their windows together, and one that has no batches "
                "left cannot stand in for the others' steps. Use even_batches=True, or leave join_uneven_inputs out "
                "where ranks have equally many windows: micro-batches in them may differ"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """`FusedAccumulator.backward`; after a window's last micro-batch `.grad` is the averaged gradient.

        Args:
            loss: As in accelerate: the plain loss of a micro-batch.
            weight: The number of samples or tokens that the loss averages. Without it, the micro-batch counts 1 inside
                `accumulate()`; outside, losses are added up as they are.
            **kwargs: Of `Tensor.backward`.

        Raises:
            RuntimeError: This is a second backward of one micro-batch, or one after the end of a window; or there is a
                weight, and nothing is prepared that could use it.
        """
        windows = self._windows
        if not windows:  # as in accelerate: gradients go where autograd leaves them
            if weight is not None:
                raise RuntimeError(
                    "accelerator.backward(loss, weight): nothing to accumulate into; pass the model and its optimizer "
                    "to accelerator.prepare(...) first"
                )
            super().backward(loss, **kwargs)
            return
        steps = self.gradient_accumulation_steps
        weight = self._begin(windows, weight, steps)
        caller = sys._getframe().f_back if weight is None else None
        if len(windows) == 1:
            windows[0].backward(loss, weight, steps, caller, **kwargs)
            reached = windows
        else:
            divided = expect(loss, Tensor, "loss", "a tensor") / steps
            reached = backward_of_all(windows, divided, weight, caller, **kwargs)
        if self.counts_micro_batches:
            self.last_loss = loss.detach().clone()  # which the caller may divide in place
        self._counted(reached)

    def backward_coupled(
        self,
        chunks: Iterable[Any],
        encode: Callable[[Any], Any],
        loss_fn: Callable[..., Tensor],
        weight: float | Tensor | None = None,
    ) -> Tensor:
        """`FusedAccumulator.backward_coupled`, in place of a micro-batch's `backward`: a loss that couples samples.

            loss = accelerator.backward_coupled(zip(images.split(64), texts.split(64)), encode_pair, clip_loss)

        Args:
            chunks: The parts of the micro-batch.
            encode: Called with each chunk, twice; returns a tensor, or a tuple or dict of tensors, with one row per
                sample. Where it calls the prepared model, mixed precision is as in any forward.
            loss_fn: Returns the plain loss of all encodings. It may have parameters of its own, if they are prepared.
            weight: As in `backward`.

        Returns:
            The loss, detached.

        Raises:
            TypeError, ValueError: As `FusedAccumulator.backward_coupled`.
            RuntimeError: As `FusedAccumulator.backward_coupled` and `backward`; or nothing is prepared.
        """
        windows = self._windows
        if not windows:
            raise RuntimeError(
                "accelerator.backward_coupled(): nothing to accumulate into; pass the model and its optimizer to "
                "accelerator.prepare(...) first"
            )
        steps = self.gradient_accumulation_steps
        weight = self._begin(windows, weight, steps)
        loss, reached = backward_coupled_of_all(windows, chunks, encode, loss_fn, weight, divided_by=steps)
        self._counted(reached)
        return loss

    def backward_batch(self, batch: Any, loss_fn: Callable[[Any], Any], **options: Any) -> BatchReport:
        """`FusedAccumulator.backward_batch`: split a batch into micro-batches that fit in memory.

            accelerator.backward_batch(batch, lambda part: loss_fn(model(part["x"]), part["y"]))

        It takes the place of the forward and `backward`, inside `accumulate()`, where `gradient_accumulation_steps`
        batches are one window, or outside. Every sample counts the same, or `weight` says what counts. Each rank splits
        its own batch; with FSDP2 all have equally many parts.

        Args:
            batch: See `FusedAccumulator.backward_batch`, as the following.
            loss_fn: Called with a part of the batch; returns its mean loss, or that and its weight (and more). Where it
                calls the prepared model, mixed precision is as in any forward. On several ranks it must not
                communicate.
            **options: `micro_batch`, `budget`, `cost`, `collate`, `weight`, `multiple_of`.

        Returns:
            A `BatchReport`: what ran, how often memory ran out, the peak, the loss, and the extras.

        Raises:
            TypeError, ValueError, torch.OutOfMemoryError: As `FusedAccumulator.backward_batch`.
            RuntimeError: As `FusedAccumulator.backward_batch` and `backward`; or not exactly one optimizer was prepared
                with its models.
        """
        if len(self._windows) != 1:
            raise RuntimeError(
                f"accelerator.backward_batch() with {len(self._windows)} optimizers: it needs one optimizer, prepared "
                "with its model in accelerator.prepare(...). With several, split the batch yourself and call "
                "accelerator.backward(loss, weight) for each part"
            )
        self._begin(self._windows, None if self.counts_micro_batches else 1.0, steps=1)
        report = self._windows[0].backward_batch(batch, loss_fn, self.splits_together, **options)
        self._counted(self._windows)
        return report

    def gather(self, tensor: Any) -> Any:
        """As in accelerate."""
        self._check_together("gather")
        return super().gather(tensor)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in accelerate."""
        self._check_together("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def _check_together(self, name: str) -> None:
        if any(window.splits_differ for window in self._windows):
            raise RuntimeError(
                f"accelerator.{name}() in the loss function of backward_batch: ranks may split their batches into "
                "different numbers of parts, and would wait for each other. Call it after backward_batch (in a "
                "Trainer: pass a number as split, which makes the numbers equal) (AK35)"
            )

    def _begin(self, windows: list[TrainerWindow], weight: float | Tensor | None, steps: int) -> float | Tensor | None:
        """Prepare the windows for a micro-batch, whose loss we divide by `steps`; returns its weight, None: 1."""
        weight = self.micro_batch_weight if weight is None else weight
        before, several = self.loss_divided_by, len(windows) > 1
        # We divide the losses of several windows before they see them, and that of one window after it.
        divisions = several + (isinstance(before, Tensor) or before != 1)
        sums = weight is None and not windows[0].inside
        for window in _ready(windows) if several else windows:
            if window.finalized or not window.inside:  # else `accumulate` has opened it
                window.open()
            if window.inside or self.counts_micro_batches:
                ends = bool(self.sync_gradients)
            else:  # other loops count themselves: DistributedDataParallel would average now, one process not yet
                ends = window.several_ranks and not window.inside_no_sync
            window.begin(steps * before, divisions, sums=sums, ends=ends)
        if windows[0].inside and windows[0].notes.backwards and not several:
            self._check_first(windows)
        return weight

    def _counted(self, reached: list[TrainerWindow]) -> None:
        """After a micro-batch, show or average its windows' gradients where the loop may look at them."""
        if len(self._windows) > 1:
            self._check_first(reached)
        for window in reached:
            window.notes.backwards += 1
            if not self._reads_gradients:
                continue
            if window.ends:
                window.finalize()
            elif not window.inside and not self.counts_micro_batches and not window.several_ranks:
                window.show()

    def _check_first(self, windows: list[TrainerWindow]) -> None:
        for window in windows:
            if window.inside and window.notes.backwards and window.engine.window.micro_batches:
                raise RuntimeError(
                    "accelerator.backward() twice inside one accelerator.accumulate(): it would count as two "
                    "micro-batches. Add up the losses and call it once; with several optimizers, keep the parameters "
                    "of one out of the loss of another (requires_grad_(False), detach())"
                )

    def _finalize(self, windows: Iterable[TrainerWindow]) -> None:
        for window in windows:
            if self.sync_gradients and not window.inside_no_sync:
                window.finalize()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """End the window, so that `.grad` can be read; gradients were unscaled while they were accumulated."""
        if not self._windows:
            super().unscale_gradients(optimizer)
        asked = self._optimizers if optimizer is None else [optimizer]
        asked = [one for item in asked for one in (item if isinstance(item, (list, tuple)) else (item,))]
        self._finalize(o.window for o in self._optimizers if o.window is not None and any(o is one for one in asked))

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """As in accelerate. All parameters of an optimizer are clipped in flat fp32 buffers, other sets by torch."""
        params, windows, whole = self._windows_of(parameters)
        if not windows:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        if whole and self.sync_gradients and not windows[0].inside_no_sync:
            if not self._reads_gradients and norm_type == 2:
                return windows[0].clip_in_step(max_norm)
            return windows[0].clip_grad_norm_(max_norm, norm_type)
        self._finalize(windows)
        params = _targets(windows, params)
        if all(p.grad is None for p in params):  # inside a window
            return torch.zeros((), device=params[0].device)
        # accelerate >= 1.15 clips parameters of several meshes together.
        clip = getattr(self, "_clip_grad_norm_dtensor_aware", torch.nn.utils.clip_grad_norm_)
        return clip(params, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """As in accelerate."""
        params, windows, _ = self._windows_of(parameters)
        if not windows or self.is_fsdp2:
            super().clip_grad_value_(params, clip_value)
            return
        self._finalize(windows)
        params = _targets(windows, params)
        if any(p.grad is not None for p in params):
            torch.nn.utils.clip_grad_value_(params, clip_value)

    def _windows_of(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], list[TrainerWindow], bool]:
        """The parameters; the windows that accumulate some of them; whether it is one, and these are all of its own."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found, whole, given = [], False, set(map(id, params))
        for window in self._windows:
            some, whole_window = window.share(given)
            if some:
                found.append(window)
                whole = whole_window
        return params, found, whole and len(found) == 1

    def window_metrics(self, prefix: str = "accumulator/") -> dict[str, float]:
        """The last window's numbers for `accelerator.log`: `FusedAccumulator.metrics` as floats; synchronises.

        Args:
            prefix: Of the names. With several optimizers, an optimizer's index follows it: "accumulator/1/weight".
        """
        expect(prefix, str, "prefix", "a string")
        several = len(self._windows) > 1
        return {
            f"{prefix}{f'{index}/' if several else ''}{name}": float(value)
            for index, window in enumerate(self._windows)
            for name, value in window.metrics().items()
        }


def _ready(windows: list[TrainerWindow]) -> list[TrainerWindow]:
    """The windows that a backward may add to. With several, one that has ended may wait for its `zero_grad()`."""
    if len(windows) == 1:
        return windows
    return [window for window in windows if not window.finalized or window.spent]


def _targets(windows: list[TrainerWindow], params: list[Tensor]) -> list[Tensor]:
    """The tensors that optimizers step for these parameters of the model."""
    for window in windows:
        params = window.accumulator.param_groups([{"params": params}])[0]["params"]
    return params


def fuse(accelerator: Stock, **options: Any) -> Accelerator:
    """Turn an accelerator that other code has made, and that has prepared nothing yet, into ours.

    Args:
        accelerator: Changed in place, and returned.
        **options: Of FusedAccumulator.

    Raises:
        TypeError: It is not an `accelerate.Accelerator`, or is of a subclass.
        RuntimeError: It has prepared a model or an optimizer.
        ValueError: As `Accelerator`.
    """
    if type(accelerator) is not Stock:
        raise wrong_type("fuse(): accelerator", "an accelerate.Accelerator itself, of no subclass", accelerator)
    if accelerator._models or accelerator._optimizers:
        raise RuntimeError("fuse: this accelerator has prepared models or optimizers; call fuse(accelerator) before")
    accelerator.__class__ = Accelerator
    accelerator._fuse(options)
    return accelerator
