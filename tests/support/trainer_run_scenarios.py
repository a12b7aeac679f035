"""What the ranks of test_trainer_runs_on_ranks.py run: runs of trainers that fail, end early, or are resumed."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.models import mlp
from tests.support.trainer_rank_scenarios import (
    LR,
    STEPS,
    Items,
    Regressor,
    _ends,
    accelerator,
    cpu_model_parallel,
    environment,
    item,
    items,
    lightning_module,
    lightning_trainer,
    loader,
    parameters,
    transformers_trainer,
)

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
    """In `compute_loss`."""
    environment(rank, size)
    trainer = transformers_trainer(size, ranks.shared, Regressor(), Items(list(range((STEPS + 2) * size)), ("x", "y")))
    calls, original = iter(range(100)), trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (_raise(rank, size, next(calls)), original(*args, **kwargs))[1]
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
        with _ends(one, index in (STEPS + 1, STEPS + 3)), one.accumulate(model):
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
        with _ends(one, index + 1 == len(numbers)), one.accumulate(model):
            one.backward(mse_loss(model(x).float(), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()


def accelerate_run(folder, numbers, seed=0, load=None, **keywords):
    """A window from a checkpoint or from the beginning; saved afterwards. The parameters."""
    one = accelerator(steps=100, **keywords)
    model = mlp(seed=seed)
    model, optimizer = one.prepare(model, with_momentum(model.parameters()))
    if not keywords.get("fsdp2"):
        one.register_for_checkpointing(one.accumulator)
    if load is not None:
        one.load_state(str(load))
    one_window(one, model, optimizer, numbers)
    one.save_state(str(folder))
    one.wait_for_everyone()
    values = parameters(model)
    one.free_memory()
    return values


def accelerate_resumed(rank, size):
    """The second window, from what one process has saved after the first; and the first, saved for one process."""
    environment(rank, size)
    first, second = (window[rank::size] for window in items(2))
    found = accelerate_run(ranks.shared / "second", second, seed=1, load=ranks.shared / "of-one")
    accelerate_run(ranks.shared / "of-two", first)
    return found


def accelerate_fsdp2_resumed(rank, size):
    """Sharded, by torch.distributed.checkpoint: `save_state` and `load_state`."""
    environment(rank, size)
    first, second = (window[rank::size] for window in items(size, uneven=False))
    accelerate_run(ranks.shared / "sharded-1", first, fsdp2=True)
    return accelerate_run(ranks.shared / "sharded-2", second, seed=1, load=ranks.shared / "sharded-1", fsdp2=True)


def lightning_fsdp2_resumed(rank, size):
    """Two epochs of a window each, in two runs: Lightning's distributed checkpoint."""
    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)
    path = str(ranks.shared / "lightning-sharded")
    numbers = items(size, uneven=False)[0][rank::size]
    for epochs, saved in ((1, None), (2, path)):
        callback = FusedAccumulation(weight=lambda data: len(data[0]))
        trainer = lightning_trainer(rank, size, callback, strategy=cpu_model_parallel(size), max_epochs=epochs)
        module = lightning_module(shard=True, optimizer=with_momentum)
        if saved is None:
            module.on_train_end = lambda trainer=trainer: trainer.save_checkpoint(path)
        trainer.fit(module, loader(numbers), ckpt_path=saved)
    return parameters(module)


def transformers_fsdp2_resumed(rank, size):
    """The Trainer's checkpoint after the first window; another run resumes from it."""
    environment(rank, size)
    folder = ranks.shared / "transformers-sharded"
    data = Items([i for window in items(size, uneven=False) for i in window], ("x", "y"))
    for resumed in (None, str(folder / "checkpoint-1")):
        trainer = transformers_trainer(
            size, folder, Regressor(), data, fsdp2=True, optimizer=with_momentum, save_strategy="steps", save_steps=1
        )
        trainer.train(resume_from_checkpoint=resumed)
    return parameters(trainer.model)
