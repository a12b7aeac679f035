"""One object for each trainer, which trains the same model on the same micro-batches: in one process or as a rank.

What a loop may do besides is said once for all trainers: see `Loop.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.models import mlp
from tests.support.trainer_data import STEPS, Items, full, item, loader, parameters, sgd
from tests.support.trainers import fp16_on_the_cpu, fp16_plugins, fsdp2_on_the_cpu, make, quiet_trainer, reset


class Run(NamedTuple):
    """What a loop has left.

    Attributes:
        values: Parameters by name.
        norms: Of windows, where the trainer says them.
        skipped: Whether the step of each window was skipped, where the trainer says so.
        scale: The loss scale; None without a scaler.
        rates: Learning rates after each window, with `schedule`.
    """

    values: dict[str, Tensor]
    norms: list[float]
    skipped: list[bool]
    scale: float | None
    rates: list[float]


class At(NamedTuple):
    """Where a hook is called: the accelerator or Trainer, the model as it is called, its optimizer, the micro-batch."""

    owner: Any
    model: nn.Module
    optimizer: Any
    index: int


class Stop(Exception):
    """Raised in accelerate's `before`, ends its loop."""


class Checkpointed(nn.Module):
    """mlp, whose first layers are run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x):
        return self.net[3:](checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=self.reentrant))


def of_all(size, uneven=True):
    """Numbers of all ranks' micro-batches: two windows, of which the second is short."""
    return list(range((STEPS + 2) * size - uneven))


# ---- accelerate


def accelerator(cls=None, precision="fp32", steps=STEPS, options=None, fsdp2=False, **keywords):
    """Ours, or stock's, anew."""
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    from accumkernels.integrations.accelerate import fuse

    keywords.setdefault("dataloader_config", DataLoaderConfiguration(even_batches=False))
    one = make(accelerate.Accelerator, "no" if precision == "fp32" else precision, steps, **keywords)
    if fsdp2:
        fsdp2_on_the_cpu(one, precision)
    return one if cls == "stock" else fuse(one, **(options or {}))


@contextlib.contextmanager
def ends(one, last):
    """Whether accelerate is to believe that a loader, which it has sharded, has given its last micro-batch."""
    data = argparse.Namespace(end_of_dataloader=last, remainder=-1)
    one.gradient_state._add_dataloader(data)
    yield
    one.gradient_state._remove_dataloader(data)


class Accelerate:
    """The loop of accelerate's documentation, with weights."""

    name = "accelerate"
    uneven = True  # ranks may have unequal numbers of micro-batches
    compiled = staticmethod(lambda: {"wrap": functools.partial(torch.compile, backend="eager")})

    @staticmethod
    def ddp(**settings):
        """Keywords of `run`: settings of DistributedDataParallel."""
        from accelerate.utils import DistributedDataParallelKwargs

        return {"kwargs_handlers": [DistributedDataParallelKwargs(**settings)]}

    @staticmethod
    def run(
        rank=0, size=1, *, ours=True, model=mlp, numbers=None, uneven=True, make=item, precision="fp32", clip=None,
        optimizer=sgd, schedule=False, options=None, sharded=False, weight=len, bad=(), steps=STEPS, epochs=1,
        without=(), begin=None, before=None, inside=None, at_end=None, end=None, wrap=None, divided_by=1, **keywords,
    ):  # fmt: skip
        """Train, as all trainers' `run`.

        Args:
            rank: This one.
            size: How many there are.
            ours: Whether FusedAccumulator accumulates.
            model: Makes it.
            numbers: Of all ranks' micro-batches; by default of two windows, of which the second is short.
            uneven: Whether the last rank has one micro-batch less, where `numbers` are not given.
            make: Makes of a number a micro-batch.
            precision: "fp32", "bf16", or "fp16" with a scaler.
            clip: To this norm.
            optimizer: Makes it, in accelerate also a list of several.
            schedule: Whether the learning rate falls after each step.
            options: Of FusedAccumulator.
            sharded: Whether FSDP2 shards the model.
            weight: Of a micro-batch's inputs; None: none.
            bad: Numbers of micro-batches whose losses are infinite.
            steps: Micro-batches of a window.
            epochs: How many.
            without: Numbers of micro-batches that have no forward and no backward; accelerate's loop alone.
            begin: Called with an `At` before the loop; as the others but `inside`, in accelerate alone.
            before: Called before a forward. An ArithmeticError leaves the micro-batch out, and `Stop` ends the loop.
            inside: Called after a micro-batch that does not end its window.
            at_end: Called before the step of a window, when `.grad` is its average.
            end: Called after the loop.
            wrap: Makes of the model what is called.
            divided_by: What the user divides each loss by.
            **keywords: The trainer's own.
        """
        one = accelerator(None if ours else "stock", precision, steps, options, sharded, **keywords)
        numbers = of_all(size, uneven and not sharded)[rank::size] if numbers is None else numbers[rank::size]
        module = model()
        made = optimizer(list(module.parameters()))
        steppers = made if isinstance(made, list) else [made]
        scheduler = torch.optim.lr_scheduler.StepLR(steppers[0], 1, 0.9 if schedule else 1.0)
        module, scheduler, *steppers = one.prepare(module, scheduler, *steppers)
        call = module if wrap is None else wrap(module)
        norms, skipped, rates = [], [], []
        at = At(one, call, steppers[0], -1)
        if begin is not None:
            begin(at)
        for index, i in [(index, i) for _ in range(epochs) for index, i in enumerate(numbers)]:
            x, y = make(i)
            at = at._replace(index=index)
            try:
                with contextlib.suppress(ArithmeticError), ends(one, index + 1 == len(numbers)), one.accumulate(module):
                    if before is not None:
                        before(at)
                    if i not in without:
                        loss = mse_loss(call(x).float(), y)
                        loss = loss * torch.inf if i in bad else loss
                        loss = loss if divided_by == 1 else loss / divided_by
                        with contextlib.suppress(torch.OutOfMemoryError):
                            one.backward(loss, **({"weight": weight(x)} if ours and weight is not None else {}))
                    hook = at_end if one.sync_gradients else inside
                    if hook is not None:
                        hook(at)
                    if one.sync_gradients and clip is not None:
                        norms.append(full(one.clip_grad_norm_(module.parameters(), clip)))
                    for stepper in steppers:
                        stepper.step()
                    scheduler.step()
                    for stepper in steppers:
                        stepper.zero_grad()
            except Stop:
                break
            if one.sync_gradients:
                skipped.append(one.optimizer_step_was_skipped)
                rates.append(scheduler.get_last_lr()[0])
        if end is not None:
            end(at)
        scale = None if one.scaler is None else one.scaler.get_scale()
        values = parameters(module)
        one.free_memory()
        return Run(values, list(map(float, norms)), skipped, scale, rates)


# ---- Lightning


def lightning_module(model=mlp, **attributes):
    """The same model and loss; `configure_model` shards it where it is given a mesh."""
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.rates = []

        def configure_model(self):
            if attributes.get("shard") and not hasattr(self.net, "set_requires_gradient_sync"):
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, data, index):
            attributes.get("before", lambda index: None)(index)
            x, y = data
            loss = mse_loss(self.net(x).float(), y)
            loss = loss * torch.inf if (self.global_rank, index) in attributes.get("bad", ()) else loss
            return loss / attributes["divided_by"] if attributes.get("divided_by", 1) != 1 else loss

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()
            self.rates.append(scheduler.get_last_lr()[0])

        def configure_optimizers(self):
            optimizer = attributes.get("optimizer", sgd)(self.parameters())
            if not attributes.get("schedule"):
                return optimizer
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Regression()


def lightning_trainer(rank, size, *callbacks, precision="fp32", clip=None, strategy=None, steps=STEPS, **keywords):
    """In the process group that is there; or in one process."""
    from lightning.pytorch.strategies import DDPStrategy

    if precision == "fp16":
        keywords["plugins"] = fp16_plugins()
    if size > 1 or strategy is not None:
        keywords["strategy"] = strategy or DDPStrategy(process_group_backend="gloo")
    return quiet_trainer(
        *callbacks,
        steps=steps,
        devices=size,
        gradient_clip_val=clip,
        precision="bf16-mixed" if precision == "bf16" else None,
        use_distributed_sampler=False,
        **keywords,
    )


def sharded(size):
    """Keywords for ModelParallelStrategy, which Lightning has on GPUs only."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="gloo")


class Lightning:
    """Automatic optimization; Lightning communicates in every batch, so that ranks have equally many."""

    name = "lightning"
    uneven = False
    compiled = staticmethod(lambda: {"wrap": functools.partial(torch.compile, backend="eager")})

    @staticmethod
    def ddp(**settings):
        """As `Accelerate.ddp`."""
        from lightning.pytorch.strategies import DDPStrategy

        return {"strategy": DDPStrategy(process_group_backend="gloo", **settings)}

    @staticmethod
    def run(
        rank=0, size=1, *callbacks, ours=True, model=mlp, numbers=None, uneven=False, make=item, optimizer=sgd,
        schedule=False, options=None, sharded=False, weight=len, bad=(), before=None, inside=None, at_end=None,
        wrap=None, step=None, manual=False, path=None, strategy=None, divided_by=1, **keywords,
    ):  # fmt: skip
        """As `Accelerate.run`, with callbacks beside ours and keywords of `lightning_trainer`.

        `step` is called with the module, its `training_step`, a batch and its number, in place of `training_step`;
        with `manual` it runs backward and steps itself. `path` is that of a checkpoint to resume from.
        """
        import lightning.pytorch as pl

        from accumkernels.integrations.lightning import FusedAccumulation

        numbers = of_all(size, False)[rank::size] if numbers is None else numbers[rank::size]
        steps = 1 if manual else keywords.setdefault("steps", STEPS)

        class Hooks(pl.Callback):
            def on_train_batch_end(self, trainer, module, out, data, index):
                if (index + 1) % steps and index + 1 < len(numbers):
                    inside(At(trainer, module, trainer.optimizers[0], index))

        class AtEnd(pl.Callback):
            def on_before_optimizer_step(self, trainer, module, optimizer):
                at_end(At(trainer, module, optimizer, 0))

        callbacks = [*callbacks, *([Hooks()] if inside else []), *([AtEnd()] if at_end else [])]
        if ours:
            of_batch = None if weight is None else lambda data: weight(data[0])
            callbacks.insert(0, FusedAccumulation(weight=of_batch, **(options or {})))
        of_size = globals()["sharded"](size) if sharded else strategy
        trainer = lightning_trainer(rank, size, *callbacks, strategy=of_size, **{**keywords, "steps": steps})
        wrong = {(rank, index) for index, i in enumerate(numbers) if i in bad}
        module = lightning_module(
            model, shard=sharded, optimizer=optimizer, schedule=schedule, bad=wrong, divided_by=divided_by
        )
        if before is not None:
            hook = lambda net, _: before(At(trainer, net, None, 0)) if net.training else None  # noqa: E731
            module.net.register_forward_pre_hook(hook)
        module.automatic_optimization = not manual
        if step is not None:
            module.training_step = functools.partial(_as_step, step, module, module.training_step)
        data = loader(numbers, make)
        validates = "val_check_interval" in keywords
        if validates:
            module.validation_step = functools.partial(_validation_step, module)
        trainer.fit(module if wrap is None else wrap(module), data, data if validates else None, ckpt_path=path)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return Run(parameters(module), [], [], None if scaler is None else scaler.get_scale(), module.rates)


def _as_step(step, module, usual, data, batch_idx):
    return step(module, usual, data, batch_idx)


def _validation_step(module, data, batch_idx):
    module.log("loss", mse_loss(module.net(data[0]), data[1]), sync_dist=True)


# ---- transformers


class Regressor(nn.Module):
    """The same model, as the Trainer calls it."""

    def __init__(self, model=mlp, divided_by=1):
        super().__init__()
        self.net, self.divided_by = model(), divided_by

    def forward(self, x, y):
        loss = mse_loss(self.net(x).float(), y)
        return {"loss": loss if self.divided_by == 1 else loss / self.divided_by}


def transformers_trainer(
    size, folder, model, dataset, precision="fp32", clip=None, optimizer=sgd, fsdp2=False, ours=True, **arguments,
):  # fmt: skip
    """Without shuffling; fp16 and FSDP2 as in `accelerator`."""
    import transformers

    from accumkernels.integrations.transformers import Trainer

    reset()
    own = {key: arguments.pop(key) for key in ("accumulator_options", "loss_is", "split") if key in arguments}

    class InOrder(Trainer if ours else transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 1,
        "max_grad_norm": clip or 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo" if size > 1 else None,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "bf16": precision == "bf16",
        "remove_unused_columns": False,
        "accelerator_config": {"even_batches": False},
        **arguments,
    }
    trainer = InOrder(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=dataset,
        optimizers=(optimizer(model.parameters()), None),
        data_collator=lambda one: one[0] if "x" in one[0] else {k: torch.stack([o[k] for o in one]) for k in one[0]},
        **own,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if precision == "fp16":
        fp16_on_the_cpu(trainer.accelerator)
    if fsdp2:
        fsdp2_on_the_cpu(trainer.accelerator, precision)
        trainer.is_fsdp_enabled = True
    return trainer


class Transformers:
    """A Trainer of the model as a regression, whose losses are means."""

    name = "transformers"
    uneven = True
    compiled = staticmethod(lambda: {"torch_compile": True, "torch_compile_backend": "eager"})

    @staticmethod
    def ddp(**settings):
        """As `Accelerate.ddp`."""
        return {f"ddp_{name}": value for name, value in settings.items()}

    @staticmethod
    def made(
        size=1, *callbacks, ours=True, model=mlp, numbers=None, uneven=True, make=item, schedule=False, options=None,
        sharded=False, weight=len, bad=(), before=None, inside=None, at_end=None, step=None, folder=None, steps=STEPS,
        epochs=1, optimizer=sgd, divided_by=1, **arguments,
    ):  # fmt: skip
        """A Trainer that `run` trains; see there."""
        from transformers import TrainerCallback

        made = []

        class Hooks(TrainerCallback):
            def on_substep_end(self, args, state, control, model=None, optimizer=None, **keywords):
                if inside is not None:
                    inside(At(made[0], model, optimizer, 0))

            def on_step_end(self, args, state, control, lr_scheduler=None, **keywords):
                made[0].rates.append(lr_scheduler.get_last_lr()[0])

        class AtEnd(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **keywords):
                at_end(At(made[0], model, optimizer, 0))

        numbers = of_all(size, uneven and not sharded) if numbers is None else numbers
        own = {"accumulator_options": options} if ours else {}
        if ours and weight is not None:
            own["loss_is"] = lambda inputs: weight(inputs["x"])
        trainer = transformers_trainer(
            size, folder or ranks.shared, Regressor(model, divided_by), Items(numbers, ("x", "y"), bad, make),
            ours=ours, fsdp2=sharded, gradient_accumulation_steps=steps, num_train_epochs=epochs, optimizer=optimizer,
            **own, **arguments,
        )  # fmt: skip
        made.append(trainer)
        trainer.rates = []
        if schedule:
            trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.9)
        if before is not None:
            trainer.model.net.register_forward_pre_hook(lambda net, _: before(At(trainer, net, None, 0)))
        if step is not None:
            trainer.training_step = functools.partial(step, trainer, trainer.training_step)
        for callback in (*callbacks, Hooks(), *([AtEnd()] if at_end else [])):
            trainer.add_callback(callback)
        return trainer

    @staticmethod
    def run(rank=0, size=1, *callbacks, **keywords):
        """As `Accelerate.run`, with callbacks and arguments of the Trainer, and the `folder` for checkpoints.

        `step(trainer, usual, model, inputs, ...)` takes the place of `training_step`.
        """
        trainer = Transformers.made(size, *callbacks, **keywords)
        trainer.train()
        norms = [float(full(entry["grad_norm"])) for entry in trainer.state.log_history if "grad_norm" in entry]
        skipped = [not math.isfinite(norm) for norm in norms]
        scaler = trainer.accelerator.scaler
        scale = None if scaler is None else scaler.get_scale()
        return Run(parameters(trainer.model), norms, skipped, scale, trainer.rates)


TRAINERS = {kind.name: kind for kind in (Accelerate, Lightning, Transformers)}
