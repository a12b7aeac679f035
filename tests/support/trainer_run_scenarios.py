"""What the ranks of test_trainer_runs_on_ranks.py run: runs of trainers that fail, end early, or are resumed."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.accelerate_scenarios import accelerator, ends
from tests.support.lightning_scenarios import lightning_module, lightning_trainer, sharded
from tests.support.models import mlp
from tests.support.trainer_data import LR, STEPS, Items, environment, item, items, loader, parameters
from tests.support.transformers_scenarios import Regressor, transformers_trainer

MOMENTUM = 0.9


def with_momentum(params):
    """Its state counts, too."""
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


# ---- the last rank raises in the last micro-batch of a window, when sums may be on their way already


def _raise(rank, size, index):
    if rank == size - 1 and index == STEPS - 1:
        raise ArithmeticError("a batch of this rank is bad")


def accelerate_raises(rank, size):
    """In the user's own loop."""
    environment(rank, size)
    one = accelerator()
    model = mlp()
    model, optimizer = one.prepare(model, with_momentum(model.parameters()))
    for index, i in enumerate(items(size, rank)):
        x, y = item(i)
        with one.accumulate(model):
            _raise(rank, size, index)
            one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()


def lightning_raises(rank, size):
    """In `training_step`."""
    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)
    trainer = lightning_trainer(rank, size, FusedAccumulation(release="backward", bucket_bytes=256))
    module = lightning_module(before=lambda index: _raise(rank, size, index))
    trainer.fit(module, loader(items(size, rank, uneven=False)))


def transformers_raises(rank, size):
    """In `compute_loss`, once it is trained with: what the adapter asks of the loss before may fail."""
    environment(rank, size)
    trainer = transformers_trainer(size, ranks.shared, Regressor(), Items(list(range((STEPS + 2) * size)), ("x", "y")))
    calls, original = iter(range(100)), trainer.compute_loss

    def compute_loss(*args, **kwargs):
        if torch.is_grad_enabled():
            _raise(rank, size, next(calls))
        return original(*args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()


# ---- windows that a rank leaves out


def accelerate_without_micro_batches(rank, size):
    """The last rank runs no backward in the second window; then no rank does, with a schedule beside; parameters."""
    environment(rank, size)
    one = accelerator()
    model = mlp()
    optimizer = with_momentum(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = one.prepare(model, optimizer, schedule)
    rates = []
    numbers = items(size, rank, uneven=False)
    for index in range(STEPS + 4):
        # The last batch is a window of its own, without a backward on any rank.
        with ends(one, index in (STEPS + 1, STEPS + 3)), one.accumulate(model):
            if index < STEPS or (index < STEPS + 2 and rank + 1 < size):
                x, y = item(numbers[index])
                one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if one.sync_gradients:
            rates.append(optimizer.param_groups[0]["lr"])
            skipped = optimizer.step_was_skipped
    values = parameters(model)
    one.free_memory()
    return values, rates, skipped


# ---- saved and resumed


def one_window(one, model, optimizer, numbers):
    """A window of an Accelerator with more steps than that."""
    for index, i in enumerate(numbers):
        x, y = item(i)
        with ends(one, index + 1 == len(numbers)), one.accumulate(model):
            one.backward(mse_loss(model(x).float(), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()


def accelerate_run(folder, numbers, seed=0, load=None, **keywords):
    """A window from a checkpoint or from the beginning; saved afterwards where there is a folder. The parameters."""
    one = accelerator(steps=100, **keywords)
    model = mlp(seed=seed)
    model, optimizer = one.prepare(model, with_momentum(model.parameters()))
    if not keywords.get("fsdp2"):
        one.register_for_checkpointing(one.accumulator)
    if load is not None:
        one.load_state(str(load))
    one_window(one, model, optimizer, numbers)
    if folder is not None:
        one.save_state(str(folder))
        one.wait_for_everyone()
    values = parameters(model)
    one.free_memory()
    return values


def accelerate_resumed(rank, size):
    """The second window, from what one process has saved after the first; and the first, saved for one process."""
    environment(rank, size)
    first, second = (window[rank::size] for window in items(2))
    found = accelerate_run(None, second, seed=1, load=ranks.shared / "of-one")
    accelerate_run(ranks.shared / "of-two", first)
    return found


# ---- sharded: saved by two ranks, and resumed on any number of them


SAVED_BY = 2  # whose windows the others' are, too


def accelerate_fsdp2_saved(rank, size):
    """After the first window, by torch.distributed.checkpoint: `save_state`."""
    environment(rank, size)
    for precision in ("fp32", "fp16"):
        first = items(size, uneven=False)[0][rank::size]
        accelerate_run(ranks.shared / f"accelerate-{precision}", first, fsdp2=True, precision=precision)


def accelerate_fsdp2_resumed(rank, size):
    """The second window, after `load_state`; in fp16 with the scaler's state."""
    environment(rank, size)
    second = items(SAVED_BY, uneven=False)[1][rank::size]
    return {
        precision: accelerate_run(
            None, second, seed=1, load=ranks.shared / f"accelerate-{precision}", fsdp2=True, precision=precision
        )
        for precision in ("fp32", "fp16")
    }


def _lightning_epochs(rank, size, epochs, precision):
    """Each a window over the first window's data."""
    from accumkernels.integrations.lightning import FusedAccumulation

    path = str(ranks.shared / f"lightning-{precision}")
    callback = FusedAccumulation(weight=lambda data: len(data[0]))
    both = sharded(size)
    trainer = lightning_trainer(
        rank, size, callback, precision, strategy=both.pop("strategy"), max_epochs=epochs, steps=100
    )
    module = lightning_module(optimizer=with_momentum, **both)
    if epochs == 1:
        module.on_train_end = lambda: trainer.save_checkpoint(path)
    numbers = items(SAVED_BY, uneven=False)[0][rank::size]
    trainer.fit(module, loader(numbers), ckpt_path=path if epochs > 1 else None)
    return parameters(module)


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
    data = Items([i for window in items(SAVED_BY, uneven=False) for i in window], ("x", "y"))
    folder = ranks.shared / f"transformers-{precision}"
    trainer = transformers_trainer(
        size,
        folder,
        Regressor(),
        data,
        precision=precision,
        fsdp2=True,
        optimizer=with_momentum,
        gradient_accumulation_steps=STEPS * SAVED_BY // size,  # so that windows are the same
        **keywords,
    )
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
