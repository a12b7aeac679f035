"""What ranks run where a Trainer saves or ends an epoch inside a window, for test_attacks_on_ranks.py.

A Trainer resumes from the windows that had ended, and begins the open one anew.
"""

from __future__ import annotations

from tests.support import ranks
from tests.support.trainer_data import STEPS, environment, items, parameters
from tests.support.transformers_attack_scenarios import made, trained

KINDS = {
    "plain": {},
    "masters": {"accumulator_options": {"master_weights": True}},
    "sharded": {"fsdp2": True},
}


def _folder(kind, size):
    return ranks.shared / f"transformers-{kind}-{size}"


def _saves(rank, size, kind):
    """A callback saves after the first micro-batch of each window; the parameters."""
    from transformers import TrainerCallback

    trainer = made(size, uneven=False, folder=_folder(kind, size), **KINDS[kind])
    begun = set()

    class Saves(TrainerCallback):
        def on_substep_end(self, args, state, control, **keywords):
            if state.global_step not in begun:
                begun.add(state.global_step)
                trainer._save_checkpoint(trainer.model_wrapped, None)

    trainer.add_callback(Saves())
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
    """The parameters after the second window of `of` ranks, by default as many as there are."""
    of = of or size
    numbers = [i for window in items(of, uneven=False) for i in window]
    settings = {"gradient_accumulation_steps": STEPS * of // size, "ddp_backend": None if size == 1 else "gloo"}
    trainer = made(size, numbers=numbers, folder=folder, **settings, **KINDS[kind])
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

    return trained(size, Stops(), uneven=False, num_train_epochs=2)
