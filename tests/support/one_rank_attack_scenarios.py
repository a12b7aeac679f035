"""What one rank alone does to break the trainers' adapters; test_attacks_on_ranks.py holds it to one process."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support.accelerate_attack_scenarios import loop
from tests.support.accelerate_scenarios import accelerator, ends
from tests.support.lightning_attack_scenarios import fit
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_NORM, STEPS, environment, item, items, parameters, sgd
from tests.support.transformers_attack_scenarios import trained

LAST = STEPS - 1  # micro-batch of the first window
EXACT = {
    "accelerate": (
        "reads",
        "reads, sharded",
        "zero_grad",
        "zero_grad, sharded",
        "fails in the last backward",
        "fails before the last backward",
        "overflows in the last backward",
        "asks to stop",
    ),
    "lightning": ("reads", "reads, sharded", "zero_grad", "zero_grad, sharded"),
    "transformers": ("reads", "reads, not clipped", "reads, sharded", "zero_grad", "zero_grad, sharded"),
}


def accelerate_one_rank(rank, size):
    """By name: parameters, or what was raised."""
    environment(rank, size)
    last = rank == size - 1

    def reads(one, model, optimizer):
        if rank == 0:
            assert all((p.grad is not None) == one.sync_gradients for p in model.parameters())

    def clears(one, model, optimizer):
        if last and not one.sync_gradients:
            optimizer.zero_grad()
            model.zero_grad()

    def drops(one, model, optimizer):
        if last and one.sync_gradients:
            optimizer.zero_grad()

    def fails(one, model, index):
        if last and index == LAST:  # out of the block, and past `optimizer.step()`
            raise ArithmeticError("a batch of this rank is bad")

    return {
        "reads": loop(rank, size, after=reads),
        "reads, sharded": loop(rank, size, after=reads, fsdp2=True, uneven=False),
        "zero_grad": loop(rank, size, after=clears),
        "zero_grad, sharded": loop(rank, size, after=clears, fsdp2=True, uneven=False),
        "fails in the last backward": _clipped(rank, size, fails=True),
        "fails before the last backward": _clipped(rank, size, without=True),
        "overflows in the last backward": _clipped(rank, size, factor=torch.inf),
        "asks to stop": _stopped(rank, size),
        "drops a window": message(loop, rank, size, after=drops),
        "drops a window, sharded": message(loop, rank, size, after=drops, fsdp2=True, uneven=False),
        "leaves out a step": message(loop, rank, size, before=fails),
    }


def _clipped(rank, size, fails=False, without=False, factor=1.0):
    """accelerate's loop, with a step in every micro-batch; the last rank's loss in `LAST` is bad.

    Args:
        rank: This one.
        size: How many there are.
        fails: Whether its backward ends halfway, and the loop goes on to its step.
        without: Whether the loop goes on to its step without backward.
        factor: Multiplies it.
    """
    one = accelerator()
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    numbers = items(size, rank)
    for index, i in enumerate(numbers):
        x, y = item(i)
        bad = rank == size - 1 and index == LAST
        with ends(one, index + 1 == len(numbers)), one.accumulate(model):
            loss = mse_loss(model(x), y)
            hook = model.module[0].weight.register_hook(_out_of_memory) if bad and fails else None
            try:
                if not (bad and without):
                    one.backward(loss * factor if bad else loss, weight=len(x))
            except torch.OutOfMemoryError:
                hook.remove()
            if one.sync_gradients:
                one.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def _out_of_memory(grad):
    raise torch.OutOfMemoryError("no memory left")


def _stopped(rank, size):
    """By accelerate's trigger, which the last rank sets after the first window."""
    one = accelerator()
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    for i in items(size, rank):
        x, y = item(i)
        with ends(one, False), one.accumulate(model):
            one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        if one.sync_gradients:
            if rank == size - 1:
                one.set_trigger()
            if one.check_trigger():
                break
    return parameters(model)


def lightning_one_rank(rank, size):
    """By name: parameters."""
    import lightning.pytorch as pl

    environment(rank, size)

    class Reads(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            assert all(p.grad is not None for p in module.parameters())

    class Clears(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            if index in (0, 2) and rank == size - 1:
                trainer.optimizers[0].zero_grad()
                module.zero_grad()

    first = [Reads()] if rank == 0 else []
    return {
        "reads": fit(rank, size, *first, clip=MAX_NORM),
        "reads, sharded": fit(rank, size, *first, clip=MAX_NORM, shard=True),
        "zero_grad": fit(rank, size, Clears()),
        "zero_grad, sharded": fit(rank, size, Clears(), shard=True),
    }


def transformers_one_rank(rank, size):
    """By name: parameters."""
    from transformers import TrainerCallback

    environment(rank, size)

    class Reads(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **keywords):
            assert all(p.grad is not None for p in model.parameters())

    class Clears(TrainerCallback):
        def on_substep_end(self, args, state, control, model=None, optimizer=None, **keywords):
            if rank == size - 1:
                optimizer.zero_grad()
                model.zero_grad()

    first = [Reads()] if rank == 0 else []
    return {
        "reads": trained(size, *first, clip=MAX_NORM),
        "reads, not clipped": trained(size, *first),
        "reads, sharded": trained(size, *first, clip=MAX_NORM, uneven=False, fsdp2=True),
        "zero_grad": trained(size, Clears()),
        "zero_grad, sharded": trained(size, Clears(), uneven=False, fsdp2=True),
    }
