"""What ranks run whose batches are split: each rank has one of its own size, and memory runs out on the last rank."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.models import batch, mlp
from tests.support.ranks import message
from tests.support.trainer_data import environment, parameters, sgd
from tests.support.trainer_loops import Lightning, accelerator, lightning_trainer, transformers_trainer
from tests.support.trainers import Samples, gpt2

WINDOWS = 2
MOST = 2  # samples that fit on the last rank


def of_rank(rank, window):
    """A batch of the window: 4, 9, ... samples."""
    return batch(4 + 5 * rank, seed=10 * window + rank)


def of_window(size, window):
    """All ranks' batches as one."""
    return tuple(map(torch.cat, zip(*(of_rank(rank, window) for rank in range(size)), strict=True)))


def check_memory(rank, size, part):
    """Raise on the last rank."""
    if rank == size - 1 and len(part) > MOST:
        raise torch.OutOfMemoryError(f"{len(part)} samples")


def accelerate_batches(rank, size):
    """Each rank splits as it must, in windows of one batch and of two; with FSDP2 all have as many parts."""
    environment(rank, size)
    found = {}
    for name, steps, fsdp2 in (("ddp", 1, False), ("two", 2, False), ("fsdp2", 1, True)):
        one = accelerator(steps=steps, fsdp2=fsdp2)
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        norms, sizes = [], []

        def loss_fn(part, model=model, fsdp2=fsdp2):
            if not fsdp2:
                check_memory(rank, size, part[0])
            return mse_loss(model(part[0]), part[1])

        for window in range(WINDOWS):
            x, y = of_rank(rank, window)
            for part in zip(x.tensor_split(steps), y.tensor_split(steps), strict=True):
                with one.accumulate(model):
                    options = {"budget": 2} if fsdp2 else {}
                    sizes.append(one.backward_batch(part, loss_fn, **options).sizes)
                    if one.sync_gradients:
                        norms.append(float(one.clip_grad_norm_(model.parameters(), 1e9)))
                    optimizer.step()
                    optimizer.zero_grad()
        found[name] = parameters(model), norms, sizes
        if name == "ddp":
            found["gathers"] = message(one.backward_batch, (x, y), lambda part, one=one: one.gather(part[0]).sum())
        if name == "fsdp2":
            found["auto"] = message(one.backward_batch, (x, y), loss_fn)
        one.free_memory()
    return found


def lightning_batches(rank, size):
    """In automatic optimization; and sharded, with a number."""
    import lightning.pytorch as pl

    from accumkernels.integrations.lightning import FusedAccumulation

    class Regression(pl.LightningModule):
        def __init__(self, synced=False):
            super().__init__()
            self.net = mlp()
            self.synced = synced

        def training_step(self, data, index):
            check_memory(self.global_rank, size, data[0])
            loss = mse_loss(self.net(data[0]), data[1])
            self.log("loss", loss, on_step=self.synced, sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return sgd(self.parameters())

    environment(rank, size)
    data = [of_rank(rank, window) for window in range(WINDOWS)]
    loader = torch.utils.data.DataLoader(data, batch_size=1, collate_fn=lambda one: one[0])
    of_fsdp2 = Lightning.run(rank, size, options={"split": 2}, sharded=True).values
    module = Regression()
    lightning_trainer(rank, size, FusedAccumulation(split="auto"), steps=1).fit(module, loader)
    trainer = lightning_trainer(rank, size, FusedAccumulation(split="auto"), steps=1)
    return parameters(module), of_fsdp2, message(trainer.fit, Regression(synced=True), loader)


def transformers_batches(rank, size):
    """Losses that are divided by the number of items of all ranks; and one that gathers, with a budget and without."""
    environment(rank, size)
    found = {}
    for name, split in (("auto", "auto"), ("gathers", 24)):
        trainer = transformers_trainer(
            size,
            ranks.shared,
            gpt2(layers=1),
            Samples(2 * 8 * size, masked=1),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
        )
        kind = type(trainer)

        class Split(kind):
            def compute_loss(self, model, inputs, *args, **kwargs):
                if torch.is_grad_enabled():
                    if self.gathers:
                        self.seen += int(self.accelerator.gather(torch.ones(1) * len(inputs["labels"])).sum())
                    else:
                        check_memory(rank, size, inputs["labels"])
                return super().compute_loss(model, inputs, *args, **kwargs)

        trainer.__class__ = Split
        trainer.gathers, trainer.seen = name == "gathers", 0
        trainer._split = {"auto": {}}.get(split, {"budget": split})
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[name] = parameters(trainer.model), losses, trainer.seen
    return found
