"""What ranks run to break transformers' Trainer; test_attacks_on_ranks.py holds each to one process on all the data."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch

from tests.support import ranks
from tests.support.accelerate_attack_scenarios import Checkpointed
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_VALUE, STEPS, Heads, Items, environment, parameters
from tests.support.transformers_scenarios import Regressor, transformers_trainer

EXACT = (
    "clipped by value",
    "gradients changed",
    "gradients changed, sharded",
    "gradients replaced",
    "zero_grad",
    "validation",
    "validation inside",
    "unused",
    "unused, not said",
    "static graph",
    "checkpointing",
    "checkpointing, reentrant",
)
COMPILED = ("compiled",)  # slow: on two ranks alone


def made(size, *callbacks, model=mlp, numbers=None, uneven=True, weight=None, folder=None, **keywords):
    """A Trainer of the model as a regression, with its callbacks.

    Args:
        size: How many ranks there are.
        *callbacks: Of the Trainer.
        model: Makes it.
        numbers: Of all ranks' micro-batches.
        uneven: Whether the last rank has one less, without `numbers`.
        weight: In place of `micro_batch_weight`.
        folder: For checkpoints.
        **keywords: Of `transformers_trainer`.
    """
    numbers = list(range((STEPS + 2) * size - uneven)) if numbers is None else numbers
    whole = Regressor()
    whole.net = model()
    trainer = transformers_trainer(size, folder or ranks.shared, whole, Items(numbers, ("x", "y")), **keywords)
    if weight is not None:
        trainer.micro_batch_weight = weight
    for callback in callbacks:
        trainer.add_callback(callback)
    return trainer


def trained(size, *callbacks, step=None, **keywords):
    """The parameters after `train`; `step(trainer, usual, model, inputs, ...)` in place of `training_step`."""
    trainer = made(size, *callbacks, **keywords)
    if step is not None:
        trainer.training_step = functools.partial(step, trainer, trainer.training_step)
    trainer.train()
    return parameters(trainer.model)


def clips_value():
    """A callback."""
    from transformers import TrainerCallback

    class Clips(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
            torch.nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)

    return Clips()


def clears():
    """A callback that calls `zero_grad` inside windows."""
    from transformers import TrainerCallback

    class Clears(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, optimizer=None, **keywords):
            optimizer.zero_grad()
            model.zero_grad()

    return Clears()


def transformers_attacks(rank, size):
    """By name: parameters, or what was raised."""
    from transformers import TrainerCallback

    environment(rank, size)
    last = rank == size - 1

    class Changes(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
            for p in model.parameters():
                p.grad.mul_(2)

    class Replaces(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
            for p in model.parameters():
                p.grad = p.grad * 2

    def fails(trainer, usual, model, inputs, *args):
        try:
            if last and next(calls) in (1, STEPS - 1):
                raise ArithmeticError("a batch of this rank is bad")
            return usual(model, inputs, *args)
        except ArithmeticError:
            return torch.zeros(())

    calls = iter(range(100))

    found = {
        "clipped by value": trained(size, clips_value()),
        "gradients changed": trained(size, Changes()),
        "gradients changed, sharded": trained(size, Changes(), uneven=False, fsdp2=True),
        "gradients replaced": trained(size, Replaces()),
        "zero_grad": trained(size, clears()),
        "a step fails": trained(size, step=fails),
        "validation": evaluated(size),
        "validation inside": evaluated(size, when="on_substep_end"),
        "unused": trained(size, model=Heads, ddp_find_unused_parameters=True),
        "unused, not said": trained(size, model=Heads),
        "static graph": trained(size, ddp_static_graph=True),
        "checkpointing": trained(size, model=lambda: Checkpointed(False)),
        "checkpointing, reentrant": trained(size, model=lambda: Checkpointed(True)),
        "unequal windows": message(trained, size, numbers=list(range(STEPS * size + 1))),
    }
    if size == 2:
        found["compiled"] = trained(size, torch_compile=True, torch_compile_backend="eager")
    return found


def evaluated(size, *, when="on_step_end", **keywords):
    """The parameters where a callback evaluates on all ranks, after each window unless told."""
    from transformers import TrainerCallback

    trainer = made(size, per_device_eval_batch_size=1, **keywords)

    def evaluates(self, *args, **keywords):
        trainer.evaluate(Items(list(range(2 * size)), ("x", "y")))

    trainer.add_callback(type("Evaluates", (TrainerCallback,), {when: evaluates})())
    trainer.train()
    return parameters(trainer.model)


def transformers_stops(rank, size):
    """A callback of the last rank stops its training after a window; the last scenario, since a collective fails."""
    from transformers import TrainerCallback

    environment(rank, size)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1), torch.distributed.group.WORLD)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **keywords):
            control.should_training_stop = control.should_training_stop or rank == size - 1

    return message(trained, size, Stops(), uneven=False, logging_strategy="no")
