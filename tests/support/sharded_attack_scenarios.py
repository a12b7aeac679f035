"""What ranks run to break the adapters under FSDP2, beside what the other attack scenarios shard.

test_attacks_on_ranks.py holds each to one process on all the data.
"""

from __future__ import annotations

import unittest.mock

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.accelerate_attack_scenarios import Checkpointed, loop
from tests.support.accelerate_scenarios import accelerator, ends
from tests.support.lightning_attack_scenarios import fit
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import MAX_NORM, STEPS, environment, item, items, parameters, sgd
from tests.support.trainers import SCALE
from tests.support.transformers_attack_scenarios import clears, clips_value, evaluated, trained

EXACT = {
    "accelerate": (
        "checkpointing, reentrant",
        "saved inside",
        "several optimizers",
        "left out",
        "unused in turns",
        "overflow and clipping",
    ),
    "lightning": (
        "zero_grad",
        "checkpointing",
        "checkpointing, reentrant",
        "saved inside",
        "steps changed",
        "left out",
        "unused in turns",
    ),
    "transformers": (
        "clipped by value",
        "zero_grad",
        "validation",
        "validation inside",
        "checkpointing",
        "checkpointing, reentrant",
        "left out",
    ),
}
LEFT_OUT = STEPS + 1  # the last rank's micro-batch of weight 0
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


def left_out(rank, size, index):
    """Whether a micro-batch is not to count."""
    return rank == size - 1 and index == LEFT_OUT


def accelerate_sharded_attacks(rank, size):
    """By name: parameters, or what was raised."""
    environment(rank, size)

    def saves(one, model, optimizer):
        one.save_state(str(ranks.shared / f"sharded-{size}"))

    def attack(**keywords):
        return loop(rank, size, uneven=False, fsdp2=True, **keywords)

    def registered():
        one = accelerator(fsdp2=True)
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        one.register_for_checkpointing(one.accumulator)
        with ends(one, False), one.accumulate(model):
            one.backward(mse_loss(model(item(rank)[0]), item(rank)[1]))
        saves(one, model, optimizer)

    return {
        "checkpointing, reentrant": attack(model=lambda: Checkpointed(True)),
        "saved inside": attack(after=saves),
        "saved inside, registered": message(registered),
        "several optimizers": _several_optimizers(rank, size),
        "several models": message(_several_models),
        "left out": attack(weight=lambda index, x: 0.0 if left_out(rank, size, index) else len(x)),
        "unused in turns": attack(model=Turns),
        "overflow and clipping": _overflow(rank, size),
    }


def _several_optimizers(rank, size):
    one = accelerator(fsdp2=True)
    model = mlp()
    params = list(model.parameters())
    model, *optimizers = one.prepare(model, sgd(params[:2]), sgd(params[2:]))
    numbers = items(size, rank, uneven=False)
    for index, i in enumerate(numbers):
        x, y = item(i)
        with ends(one, index + 1 == len(numbers)), one.accumulate(model):
            one.backward(mse_loss(model(x), y), weight=len(x))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return parameters(model)


def _several_models():
    one = accelerator(fsdp2=True)
    whole = mlp()
    one.prepare(whole[:2], whole[2:], sgd(whole.parameters()))


def _overflow(rank, size):
    """In fp16, in the last micro-batch of the last rank's first window; clipped."""
    one = accelerator(precision="fp16", fsdp2=True)
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    numbers = items(size, rank, uneven=False)
    for index, i in enumerate(numbers):
        x, y = item(i)
        with ends(one, index + 1 == len(numbers)), one.accumulate(model):
            loss = mse_loss(model(x).float(), y)
            one.backward(loss * torch.inf if rank == size - 1 and index == STEPS - 1 else loss, weight=len(x))
            if one.sync_gradients:
                one.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    assert one.scaler.get_scale() == SCALE / 2
    return parameters(model)


def lightning_sharded_attacks(rank, size):
    """By name: parameters, or what was raised."""
    import lightning.pytorch as pl

    from accumkernels.integrations.lightning import _log as log

    environment(rank, size)

    class Clears(pl.Callback):
        def on_train_batch_end(self, trainer, module, out, data, index):
            if index == 1:
                trainer.optimizers[0].zero_grad()
                module.zero_grad()

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

    seen = iter(range(100))

    def attack(*callbacks, **keywords):
        return fit(rank, size, *callbacks, shard=True, **keywords)

    return {
        "zero_grad": attack(Clears()),
        "checkpointing": attack(model=lambda: Checkpointed(False)),
        "checkpointing, reentrant": attack(model=lambda: Checkpointed(True)),
        "compiled": message(attack, wrap=lambda module: torch.compile(module, backend="eager")),
        "saved inside": attack(Saves()),
        "steps changed": attack(Changes()),
        "left out": attack(weight=lambda data: 0.0 if left_out(rank, size, next(seen)) else len(data[0])),
        "unused in turns": attack(model=Turns),
    }


def transformers_sharded_attacks(rank, size):
    """By name: parameters."""
    environment(rank, size)
    seen = iter(range(100))

    def attack(*callbacks, run=trained, **keywords):
        return run(size, *callbacks, uneven=False, fsdp2=True, **keywords)

    found = {
        "clipped by value": attack(clips_value()),
        "zero_grad": attack(clears()),
        "validation": attack(run=evaluated),
        "validation inside": attack(run=evaluated, when="on_substep_end"),
        "checkpointing": attack(model=lambda: Checkpointed(False)),
        "checkpointing, reentrant": attack(model=lambda: Checkpointed(True)),
        "left out": attack(weight=lambda inputs: 0.0 if left_out(rank, size, next(seen)) else len(inputs["x"])),
    }
    if size == 2:
        found["compiled"] = attack(torch_compile=True, torch_compile_backend="eager")
    return found
