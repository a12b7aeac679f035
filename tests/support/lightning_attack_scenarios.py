"""What ranks run to break Lightning's callback; test_attacks_on_ranks.py holds each to one process on all the data."""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.accelerate_attack_scenarios import Checkpointed
from tests.support.lightning_scenarios import lightning_module, lightning_trainer, sharded
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_VALUE, STEPS, Heads, environment, items, loader, parameters

EXACT = (
    "clipped by value",
    "clipped by value, sharded",
    "gradients changed",
    "gradients changed, sharded",
    "gradients replaced",
    "zero_grad",
    "validation",
    "validation, sharded",
    "unused",
    "unused, not said",
    "checkpointing",
    "checkpointing, reentrant",
)
COMPILED = ("compiled", "compiled, static graph")  # slow: on two ranks alone


def fit(
    rank, size, *callbacks, model=mlp, step=None, manual=False, numbers=None, shard=False, path=None, wrap=None,
    weight=None, **keywords,
):  # fmt: skip
    """The parameters after `Trainer.fit`.

    Args:
        rank: This one.
        size: How many there are.
        *callbacks: Beside ours.
        model: Makes it.
        step: Called with the module, its `training_step`, a batch and its number, in place of `training_step`.
        manual: Whether `step` runs backward and steps itself.
        numbers: Of the rank's batches.
        shard: Whether FSDP2 shards the model.
        path: Of a checkpoint to resume from.
        wrap: Makes of the module what is fitted.
        weight: Of a batch; by default its samples.
        **keywords: Of `lightning_trainer`.
    """
    from accumkernels.integrations.lightning import FusedAccumulation

    callback = FusedAccumulation(weight=weight or (lambda data: len(data[0])))
    attributes = sharded(size) if shard else {}
    settings = {"strategy": attributes.pop("strategy", None), **keywords, **({"steps": 1} if manual else {})}
    trainer = lightning_trainer(rank, size, callback, callbacks=list(callbacks), **settings)
    module = lightning_module(**attributes)
    module.net = model()
    module.automatic_optimization = not manual
    if step is not None:
        module.training_step = functools.partial(_as_step, step, module, module.training_step)
    data = loader(items(size, rank, uneven=False) if numbers is None else numbers)
    validates = "val_check_interval" in keywords
    if validates:
        module.validation_step = functools.partial(_validation_step, module)
    trainer.fit(module if wrap is None else wrap(module), data, data if validates else None, ckpt_path=path)
    return parameters(module)


def _as_step(step, module, usual, data, batch_idx):
    return step(module, usual, data, batch_idx)


def _validation_step(module, data, batch_idx):
    module.log("loss", mse_loss(module.net(data[0]), data[1]), sync_dist=True)


def lightning_attacks(rank, size):
    """By name: parameters, or what was raised."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
    from lightning.pytorch.strategies import DDPStrategy

    environment(rank, size)

    class Changes(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            for p in module.parameters():
                p.grad.mul_(2)

    class Replaces(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            for p in module.parameters():
                p.grad = p.grad * 2

    class Clears(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            if index == 1:
                trainer.optimizers[0].zero_grad()
                module.zero_grad()

    def none(module, usual, data, index):
        return None

    def logs(module, usual, data, index):
        module.log("x", float(rank == size - 1) * index)
        return usual(data, index)

    stop = EarlyStopping("x", mode="min", patience=0, check_on_train_epoch_end=True)

    def ddp(**k):
        return DDPStrategy(process_group_backend="gloo", **k)

    value = {"gradient_clip_algorithm": "value", "clip": MAX_VALUE}

    def compiled(module):
        return torch.compile(module, backend="eager")

    found = {
        "clipped by value": fit(rank, size, **value),
        "clipped by value, sharded": fit(rank, size, shard=True, **value),
        "gradients changed": fit(rank, size, Changes()),
        "gradients changed, sharded": fit(rank, size, Changes(), shard=True),
        "gradients replaced": fit(rank, size, Replaces()),
        "zero_grad": fit(rank, size, Clears()),
        "a step without loss": message(fit, rank, size, step=none),
        "a step fails": fit(rank, size, step=failing(rank, size, 1, STEPS - 1), manual=True),
        "validation": fit(rank, size, val_check_interval=3, num_sanity_val_steps=0),
        "validation, sharded": fit(rank, size, val_check_interval=3, num_sanity_val_steps=0, shard=True),
        "steps changed": fit(rank, size, GradientAccumulationScheduler({0: 4, 1: 2}), max_epochs=2, steps=1),
        "early stopping": fit(rank, size, stop, step=logs, max_epochs=3),
        "unused": fit(rank, size, model=Heads, strategy=ddp(find_unused_parameters=True)),
        "unused, not said": fit(rank, size, model=Heads),
        "checkpointing": fit(rank, size, model=lambda: Checkpointed(False)),
        "checkpointing, reentrant": fit(rank, size, model=lambda: Checkpointed(True)),
    }
    if size == 2:
        found |= {
            "compiled": fit(rank, size, wrap=compiled),
            "compiled, static graph": fit(rank, size, wrap=compiled, strategy=ddp(static_graph=True)),
        }
    return found


def failing(rank, size, *batches):
    """A step of manual optimization that steps after each window, and in which batches of the last rank fail."""

    def step(module, usual, data, index):
        try:
            if rank == size - 1 and index in batches:
                raise ArithmeticError("a batch of this rank is bad")
            module.manual_backward(usual(data, index))
        except ArithmeticError:
            pass
        if index in (STEPS - 1, STEPS + 1):
            module.optimizers().step()

    return step


def lightning_saved_inside(rank, size):
    """After two of four batches of the first window, which have failed on the last rank."""
    import lightning.pytorch as pl

    environment(rank, size)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            if index == 1:
                trainer.save_checkpoint(ranks.shared / f"inside-{size}.ckpt")

    fit(rank, size, Saves(), step=failing(rank, size, 0, 1), manual=True)


def lightning_resumed_inside(rank, size):
    """What `lightning_saved_inside` has saved, and the rest."""
    environment(rank, size)
    own = items(size, rank, uneven=False)[2:]  # Lightning goes on counting batches, and the loader begins anew
    path = str(ranks.shared / f"inside-{size}.ckpt")
    return fit(rank, size, path=path, numbers=own + own[:2], step=failing(rank, size), manual=True)
