"""What ranks do to break the trainers' adapters; test_attacks_on_ranks.py holds each to one process on all the data.

What may be done in every trainer is in `attacks`. What one trainer alone serves is in a function of its own.
"""

from __future__ import annotations

import unittest.mock
from datetime import timedelta

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_NORM, MAX_VALUE, STEPS, Heads, Items, environment, item, parameters, sgd
from tests.support.trainer_loops import Accelerate, Checkpointed, Lightning, Stop, Transformers, accelerator, of_all
from tests.support.trainers import SCALE

LEFT_OUT = STEPS + 1  # the last rank's micro-batch of weight 0
LAST = STEPS - 1  # micro-batch of the first window
TO_STEPS = STEPS + 1  # of a window, from its third micro-batch on; the last one is short


class Turns(nn.Module):
    """mlp with a head that every other micro-batch of a rank uses.

    Args:
        size: How many ranks' micro-batches come one after another.
    """

    def __init__(self, size=1):
        super().__init__()
        self.net, self.odd = mlp(), nn.Linear(3, 3)
        self.size, self.calls = size, 0

    def forward(self, x):
        out, self.calls = self.net(x), self.calls + 1
        return self.odd(out) if (self.calls - 1) // self.size % 2 else out


def absent(at):
    """Inside a window no parameter has a gradient."""
    assert all(p.grad is None for p in at.model.parameters())


def present(at):
    """At the end all have."""
    assert all(p.grad is not None for p in at.model.parameters())


def doubled(at):
    """In place."""
    for p in at.model.parameters():
        p.grad.mul_(2)


def replaced(at):
    """By other tensors."""
    for p in at.model.parameters():
        p.grad = p.grad * 2


def clipped(at):
    """By value, as accelerate has it, or torch."""
    clip = getattr(at.owner, "clip_grad_value_", nn.utils.clip_grad_value_)
    clip(at.model.parameters(), MAX_VALUE)


def cleared(at):
    """Inside a window."""
    at.optimizer.zero_grad()
    at.model.zero_grad()


def attacks(trainer, rank, size):
    """Keywords of `run` by name; where the model is sharded too, the name ends in "*", and in "+" there alone."""
    last = rank == size - 1
    seen = iter(range(100))
    first = {"at_end": present, "inside": absent} if rank == 0 else {}
    found = {
        "gradients changed*": {"at_end": doubled, "inside": absent},
        "gradients replaced": {"at_end": replaced},
        "zero_grad*": {"inside": cleared},
        "zero_grad on one rank*": {"inside": cleared} if last else {},
        "reads*": first,
        "reads, clipped*": {**first, "clip": MAX_NORM},
        "unused": {"model": Heads, **trainer.ddp(find_unused_parameters=True)},
        "unused, not said": {"model": Heads},
        "checkpointing*": {"model": lambda: Checkpointed(False)},
        "checkpointing, reentrant*": {"model": lambda: Checkpointed(True)},
        "left out+": {"weight": lambda x: 0.0 if last and next(seen) == LEFT_OUT else len(x)},
        "clipped by value": {"at_end": clipped},
    }
    if trainer.name != "lightning":
        found["static graph"] = trainer.ddp(static_graph=True)
    if trainer.name != "accelerate":  # which refuses it sharded
        found["clipped by value+"] = {"at_end": clipped}
    if trainer.name != "transformers":
        found["unused in turns+"] = {"model": Turns}
    if size == 2:  # slow
        found["compiled"] = trainer.compiled()
    return found


def served(trainer, rank, size):
    """Parameters after each of `attacks`, by name."""
    environment(rank, size)
    found = {}
    for name, keywords in attacks(trainer, rank, size).items():
        base = name.rstrip("*+")
        if not name.endswith("+"):
            found[base] = trainer.run(rank, size, **keywords).values
        if base != name:
            found[f"{base}, sharded"] = trainer.run(rank, size, sharded=True, **keywords).values
    return found


def fails(grad):
    """A hook on a gradient."""
    raise torch.OutOfMemoryError("no memory left")


# ---- accelerate


def accelerate_attacks(rank, size):
    """By name: parameters, or what was raised."""
    found = served(Accelerate, rank, size)
    last = rank == size - 1
    bad = size * LAST + size - 1  # the last rank's last one of the first window

    def run(**keywords):
        return Accelerate.run(rank, size, **keywords).values

    def breaks(at):
        if last and at.index == 1:
            raise ArithmeticError("a batch of this rank is bad")

    def breaks_at_the_end(at):  # out of the block, and past `optimizer.step()`
        if last and at.index == LAST:
            raise ArithmeticError("a batch of this rank is bad")

    def validates(at):
        if at.index != 2:
            return
        at.model.eval()
        with torch.no_grad():
            at.owner.gather_for_metrics(mse_loss(at.model(item(2)[0]), item(2)[1]))
        at.model.train()

    def changes(at):
        if at.index == 1:
            at.owner.gradient_accumulation_steps = STEPS + 1

    def runs_out(at):
        if last and at.index == LAST:
            hooks.append(at.model.module[0].weight.register_hook(fails))
        elif hooks:
            hooks.pop().remove()

    def stops(at):
        if at.index == STEPS:
            if last:
                at.owner.set_trigger()
            if at.owner.check_trigger():
                raise Stop

    def saves(at):
        at.owner.save_state(str(ranks.shared / f"sharded-{size}"))

    def registers(at):
        at.owner.register_for_checkpointing(at.owner.accumulator)

    def drops(at):
        if last:
            at.optimizer.zero_grad()

    def several_models():
        one = accelerator(fsdp2=True)
        whole = mlp()
        one.prepare(whole[:2], whole[2:], sgd(whole.parameters()))

    def overflows():
        left = Accelerate.run(rank, size, sharded=True, precision="fp16", bad={bad}, clip=MAX_NORM)
        assert left.scale == SCALE / 2
        return left.values

    hooks = []
    found |= {
        "clipped by value, sharded": message(run, at_end=clipped, sharded=True),
        "a step fails": run(before=breaks),
        "validation": run(before=validates),
        "validation, sharded": run(before=validates, sharded=True),
        "steps changed": run(before=changes, uneven=False),
        "saved inside, sharded": run(inside=saves, at_end=saves, sharded=True),
        "saved inside, registered": message(run, begin=registers, inside=saves, sharded=True),
        "several optimizers, sharded": run(optimizer=lambda p: [sgd(p[:2]), sgd(p[2:])], sharded=True),
        "several models": message(several_models),
        "overflow and clipping, sharded": overflows(),
        "fails in the last backward": run(before=runs_out, clip=MAX_NORM),
        "fails before the last backward": run(without={bad}, clip=MAX_NORM),
        "overflows in the last backward": run(bad={bad}, clip=MAX_NORM),
        "asks to stop": run(before=stops),
        "drops a window": message(run, at_end=drops),
        "drops a window, sharded": message(run, at_end=drops, sharded=True),
        "leaves out a step": message(run, before=breaks_at_the_end),
    }
    if size == 2:
        found |= {
            "compiled before": run(model=lambda: torch.compile(mlp(), backend="eager")),
            "compiled, sharded": run(**Accelerate.compiled(), sharded=True),
        }
    return found


def accelerate_saved_inside(rank, size):
    """After two of four micro-batches, by `save_state`."""
    environment(rank, size)

    def saves(at):
        if at.index == 2:
            at.owner.save_state(str(ranks.shared / f"inside-a-window-{size}"))
            at.owner.wait_for_everyone()
            raise Stop

    Accelerate.run(rank, size, uneven=False, before=saves, begin=lambda at: resumes(at, None))


def resumes(at, folder):
    """With the accumulator in accelerate's checkpoints, from one of them."""
    at.owner.register_for_checkpointing(at.owner.accumulator)
    if folder is not None:
        at.owner.load_state(str(folder))


def rest_of_a_window(folder, numbers, rank=0, size=1):
    """The parameters after the window that was saved and has these micro-batches left."""
    begin = lambda at: resumes(at, folder)  # noqa: E731
    return Accelerate.run(rank, size, steps=100, numbers=numbers, begin=begin, model=lambda: mlp(seed=1)).values


def accelerate_resumed_inside(rank, size):
    """What `accelerate_saved_inside` has saved, and the rest of its window."""
    environment(rank, size)
    return rest_of_a_window(ranks.shared / f"inside-a-window-{size}", of_all(size)[2 * size : 4 * size], rank, size)


def accelerate_resumed_from_three(rank, size):
    """What three ranks have saved inside a window, on another number of them."""
    environment(rank, size)
    return rest_of_a_window(ranks.shared / "inside-a-window-3", of_all(3)[2 * 3 : 4 * 3], rank, size)


# ---- Lightning


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

    return {"step": step, "manual": True}


def lightning_attacks(rank, size):
    """By name: parameters, or what was raised."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler

    from accumkernels.integrations.lightning import _log as log

    found = served(Lightning, rank, size)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            with unittest.mock.patch.object(log, "warning") as warned:
                trainer.save_checkpoint(ranks.shared / f"sharded-{size}.ckpt")
            inside = (index + 1) % STEPS if index + 1 < STEPS + 2 else 0
            assert [call.args[1] for call in warned.call_args_list] == ([inside] if inside else [])

    class Changes(pl.Callback):
        def on_train_batch_start(self, trainer, module, data, index):
            if index == 2:
                trainer.accumulate_grad_batches = TO_STEPS

    def logs(module, usual, data, index):
        module.log("x", float(rank == size - 1) * index)
        return usual(data, index)

    def run(*callbacks, **keywords):
        return Lightning.run(rank, size, *callbacks, **keywords).values

    stop = EarlyStopping("x", mode="min", patience=0, check_on_train_epoch_end=True)
    value = {"gradient_clip_algorithm": "value", "clip": MAX_VALUE}
    validation = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    found |= {
        "clipped by value, by the Trainer": run(**value),
        "clipped by value, by the Trainer, sharded": run(sharded=True, **value),
        "a step without loss": message(run, step=lambda *_: None),
        "a step fails": run(**failing(rank, size, 1, STEPS - 1)),
        "validation": run(**validation),
        "validation, sharded": run(**validation, sharded=True),
        "steps changed": run(GradientAccumulationScheduler({0: 4, 1: 2}), epochs=2, steps=1),
        "steps changed, sharded": run(Changes(), sharded=True),
        "early stopping": run(stop, step=logs, epochs=3),
        "saved inside, sharded": run(Saves(), sharded=True),
        "compiled, sharded": message(run, **Lightning.compiled(), sharded=True),
    }
    if size == 2:
        found["compiled, static graph"] = run(**Lightning.compiled(), **Lightning.ddp(static_graph=True))
    return found


def lightning_saved_inside(rank, size):
    """After two of four batches of the first window, which have failed on the last rank."""
    import lightning.pytorch as pl

    environment(rank, size)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            if index == 1:
                trainer.save_checkpoint(ranks.shared / f"inside-{size}.ckpt")

    Lightning.run(rank, size, Saves(), **failing(rank, size, 0, 1))


def lightning_resumed_inside(rank, size):
    """What `lightning_saved_inside` has saved, and the rest."""
    environment(rank, size)
    left = of_all(size, False)[2 * size :]  # Lightning goes on counting batches, and the loader begins anew
    path = str(ranks.shared / f"inside-{size}.ckpt")
    return Lightning.run(rank, size, path=path, numbers=left + left[: 2 * size], **failing(rank, size)).values


# ---- transformers


def evaluating(size, when="on_step_end", **keywords):
    """The parameters where a callback evaluates on all ranks."""
    from transformers import TrainerCallback

    class Evaluates(TrainerCallback):
        pass

    trainer = Transformers.made(size, Evaluates(), per_device_eval_batch_size=1, **keywords)
    setattr(Evaluates, when, lambda *_, **__: trainer.evaluate(Items(list(range(2 * size)), ("x", "y"))) and None)
    trainer.train()
    return parameters(trainer.model)


def transformers_attacks(rank, size):
    """By name: parameters, or what was raised."""
    found = served(Transformers, rank, size)
    calls = iter(range(100))

    def breaks(trainer, usual, model, inputs, *args):
        try:
            if rank == size - 1 and next(calls) in (1, STEPS - 1):
                raise ArithmeticError("a batch of this rank is bad")
            return usual(model, inputs, *args)
        except ArithmeticError:
            return torch.zeros(())

    def run(**keywords):
        return Transformers.run(rank, size, **keywords).values

    found |= {
        "a step fails": run(step=breaks),
        "validation": evaluating(size),
        "validation, sharded": evaluating(size, sharded=True),
        "validation inside": evaluating(size, "on_substep_end"),
        "validation inside, sharded": evaluating(size, "on_substep_end", sharded=True),
        "unequal windows": message(run, numbers=list(range(STEPS * size + 1))),
    }
    if size == 2:
        found["compiled, sharded"] = run(sharded=True, **Transformers.compiled())
    return found


KINDS = {
    "plain": {},
    "masters": {"options": {"master_weights": True}},
    "sharded": {"sharded": True},
}


def _folder(kind, size):
    return ranks.shared / f"transformers-{kind}-{size}"


def _saves(rank, size, kind):
    """A callback saves after the first micro-batch of each window; the parameters."""
    from transformers import TrainerCallback

    begun = set()

    class Saves(TrainerCallback):
        def on_substep_end(self, args, state, control, **keywords):
            if state.global_step not in begun:
                begun.add(state.global_step)
                trainer._save_checkpoint(trainer.model_wrapped, None)

    trainer = Transformers.made(size, Saves(), uneven=False, folder=_folder(kind, size), **KINDS[kind])
    trainer.train()
    return parameters(trainer.model)


def transformers_saved_inside(rank, size):
    """By kind: the parameters."""
    environment(rank, size)
    return {kind: _saves(rank, size, kind) for kind in KINDS}


def transformers_resumed_inside(rank, size):
    """By kind: the parameters after the second window, whose beginning the checkpoint was saved after."""
    environment(rank, size)
    return {kind: resumed(_folder(kind, size), size, kind) for kind in KINDS}


def resumed(folder, size, kind, of=None):
    """The parameters after the second window of `of` ranks, by default as many as there are.

    A Trainer resumes from the windows that had ended, and begins the open one anew.
    """
    of = of or size
    trainer = Transformers.made(size, numbers=of_all(of, False), folder=folder, steps=STEPS * of // size, **KINDS[kind])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return parameters(trainer.model)


def transformers_epoch_stopped(rank, size):
    """A callback of all ranks ends the first of two epochs after its first micro-batch, which stays in the window."""
    from transformers import TrainerCallback

    environment(rank, size)
    calls = iter(range(100))

    class Stops(TrainerCallback):
        def on_substep_end(self, args, state, control, **keywords):
            control.should_epoch_stop = next(calls) == 0

    return Transformers.run(rank, size, Stops(), uneven=False, epochs=2).values


def transformers_stops(rank, size):
    """A callback of the last rank stops its training after a window; the last scenario, since a collective fails."""
    from transformers import TrainerCallback

    environment(rank, size)
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1), torch.distributed.group.WORLD)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **keywords):
            control.should_training_stop = control.should_training_stop or rank == size - 1

    return message(Transformers.run, rank, size, Stops(), uneven=False, logging_strategy="no")
