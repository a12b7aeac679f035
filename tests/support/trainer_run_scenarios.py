"""What the ranks of test_trainer_runs_on_ranks.py run: runs of trainers that fail, end early, or are resumed."""

from __future__ import annotations

import torch

from tests.support import ranks
from tests.support.models import mlp
from tests.support.trainer_data import LR, STEPS, environment, items, parameters
from tests.support.trainer_loops import Accelerate, Lightning, Transformers, lightning_trainer, of_all

MOMENTUM = 0.9


def with_momentum(params):
    """Its state counts, too."""
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


# ---- the last rank raises in the last micro-batch of a window, when sums may be on their way already


def _raises(rank, size):
    """A hook before forwards."""
    forwards = iter(range(100))

    def before(at):
        if next(forwards) == STEPS - 1 and rank == size - 1:
            raise LookupError("a batch of this rank is bad")

    return {"before": before, "uneven": False}


def accelerate_raises(rank, size):
    """In the user's own loop."""
    environment(rank, size)
    Accelerate.run(rank, size, **_raises(rank, size))


def lightning_raises(rank, size):
    """In `training_step`."""
    environment(rank, size)
    Lightning.run(rank, size, options={"release": "backward", "bucket_bytes": 256}, **_raises(rank, size))


def transformers_raises(rank, size):
    """In `compute_loss`."""
    environment(rank, size)
    Transformers.run(rank, size, **_raises(rank, size))


# ---- windows that a rank leaves out


def accelerate_without_micro_batches(rank, size):
    """The last rank runs no backward in the second of three windows; then no rank does, with a schedule beside."""
    environment(rank, size)
    first, second, third = (set(range(k * STEPS * size, (k + 1) * STEPS * size)) for k in range(3))
    without = third | {i for i in second if i % size == size - 1}
    numbers = sorted(first | second | third)
    return Accelerate.run(rank, size, numbers=numbers, without=without, optimizer=with_momentum, schedule=True)


# ---- windows that all ranks drop


def lightning_drops(rank, size):
    """By each of the hooks; the parameters of Lightning alone, and with the callback."""
    from accumkernels.integrations.lightning import FusedAccumulation
    from tests.support import dropping_modules as modules

    environment(rank, size)
    found = {}
    for kind in modules.MODULES:
        for callbacks in ([], [FusedAccumulation(release="backward", bucket_bytes=256)]):
            module = kind(modules.momentum)
            lightning_trainer(rank, size, *callbacks, epochs=3).fit(module)
            found.setdefault(kind.__name__, []).append(parameters(module))
    return found


# ---- saved and resumed


def accelerate_run(folder, numbers, rank=0, size=1, seed=0, load=None, **keywords):
    """A window from a checkpoint or from the beginning; saved afterwards where there is a folder. The parameters."""

    def begin(at):
        if not keywords.get("sharded"):
            at.owner.register_for_checkpointing(at.owner.accumulator)
        if load is not None:
            at.owner.load_state(str(load))

    def end(at):
        if folder is not None:
            at.owner.save_state(str(folder))
            at.owner.wait_for_everyone()

    return Accelerate.run(
        rank, size, steps=100, numbers=numbers, model=lambda: mlp(seed=seed), optimizer=with_momentum, begin=begin,
        end=end, **keywords,
    ).values  # fmt: skip


def accelerate_resumed(rank, size):
    """The second window, from what one process has saved after the first; and the first, saved for one process."""
    environment(rank, size)
    first, second = items(2)
    found = accelerate_run(None, second, rank, size, seed=1, load=ranks.shared / "of-one")
    accelerate_run(ranks.shared / "of-two", first, rank, size)
    return found


# ---- sharded: saved by two ranks, and resumed on any number of them


SAVED_BY = 2  # whose windows the others' are, too


def accelerate_fsdp2_saved(rank, size):
    """After the first window, by torch.distributed.checkpoint: `save_state`."""
    environment(rank, size)
    first = items(size, uneven=False)[0]
    for precision in ("fp32", "fp16"):
        folder = ranks.shared / f"accelerate-{precision}"
        accelerate_run(folder, first, rank, size, sharded=True, precision=precision)


def accelerate_fsdp2_resumed(rank, size):
    """The second window, after `load_state`; in fp16 with the scaler's state."""
    environment(rank, size)
    second = items(SAVED_BY, uneven=False)[1]
    return {
        precision: accelerate_run(
            None, second, rank, size, seed=1, load=ranks.shared / f"accelerate-{precision}", sharded=True,
            precision=precision,
        )
        for precision in ("fp32", "fp16")
    }  # fmt: skip


def _lightning_epochs(rank, size, epochs, precision):
    """Each a window over the first window's data; the checkpoint is saved after the first."""
    import lightning.pytorch as pl

    path = str(ranks.shared / f"lightning-{precision}")

    class Saves(pl.Callback):
        def on_train_end(self, trainer, module):
            if epochs == 1:
                trainer.save_checkpoint(path)

    return Lightning.run(
        rank, size, Saves(), numbers=items(SAVED_BY, uneven=False)[0], precision=precision, sharded=True,
        optimizer=with_momentum, epochs=epochs, steps=100, path=path if epochs > 1 else None,
    ).values  # fmt: skip


def lightning_fsdp2_saved(rank, size):
    """After the first of two epochs, by Lightning's distributed checkpoint."""
    environment(rank, size)
    for precision in ("fp32", "fp16"):
        _lightning_epochs(rank, size, 1, precision)


def lightning_fsdp2_resumed(rank, size):
    """The second epoch."""
    environment(rank, size)
    return {precision: _lightning_epochs(rank, size, 2, precision) for precision in ("fp32", "fp16")}


def _transformers_run(size, precision, resumed, **keywords):
    folder = ranks.shared / f"transformers-{precision}"
    steps = STEPS * SAVED_BY // size  # so that windows are the same
    trainer = Transformers.made(
        size, numbers=of_all(SAVED_BY, False), folder=folder, precision=precision, sharded=True,
        optimizer=with_momentum, steps=steps, **keywords,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resumed else None)
    return parameters(trainer.model)


def transformers_fsdp2_saved(rank, size):
    """The Trainer's checkpoint after the first window."""
    environment(rank, size)
    for precision in ("fp32", "fp16"):
        _transformers_run(size, precision, False, save_strategy="steps", save_steps=1)


def transformers_fsdp2_resumed(rank, size):
    """The second window, in another run."""
    environment(rank, size)
    return {precision: _transformers_run(size, precision, True) for precision in ("fp32", "fp16")}


SAVED = [accelerate_fsdp2_saved, lightning_fsdp2_saved, transformers_fsdp2_saved]
RESUMED = [accelerate_fsdp2_resumed, lightning_fsdp2_resumed, transformers_fsdp2_resumed]
