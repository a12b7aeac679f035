"""What ranks run in the trainers, for test_trainers_on_ranks.py: all of them alike, and what one alone serves."""

from __future__ import annotations

import contextlib
import copy
import unittest.mock

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.models import mlp
from tests.support.ranks import message
from tests.support.trainer_data import (
    KINDS,
    LR,
    MAX_NORM,
    STEPS,
    environment,
    item,
    items,
    loader,
    parameters,
    sgd,
)
from tests.support.trainer_loops import (
    TRAINERS,
    Accelerate,
    Lightning,
    accelerator,
    ends,
    lightning_trainer,
    of_all,
    transformers_trainer,
)
from tests.support.trainers import VOCABULARY, Samples, gpt2

OPTIONS = {  # beside precisions, clipped or not
    "backward": lambda trainer: {"options": {"release": "backward", "bucket_bytes": 64}},
    "fused": lambda trainer: {"clip": MAX_NORM, "optimizer": lambda p: torch.optim.SGD(p, LR, fused=True)},
    "find_unused_parameters": lambda trainer: trainer.ddp(find_unused_parameters=True),
}


def whole_parameters(rank, size):
    """Under DistributedDataParallel: every precision, clipped or not; every trainer."""
    environment(rank, size)
    return {
        name: {
            **{kind: trainer.run(rank, size, precision=kind[0], clip=kind[1]) for kind in KINDS},
            **{key: trainer.run(rank, size, **of(trainer)) for key, of in OPTIONS.items()},
        }
        for name, trainer in TRAINERS.items()
    }


def sharded_parameters(rank, size):
    """Under FSDP2; and with an overflow on the last rank, in its second micro-batch."""
    environment(rank, size)
    return {
        name: {
            **{kind: trainer.run(rank, size, precision=kind[0], clip=kind[1], sharded=True) for kind in KINDS},
            "overflow": trainer.run(rank, size, precision="fp16", bad={2 * size - 1}, sharded=True),
        }
        for name, trainer in TRAINERS.items()
    }


def overflows(rank, size):
    """On the last rank, in its second micro-batch: all skip the window, and step the next."""
    environment(rank, size)
    return {
        name: {kind: trainer.run(rank, size, precision=kind, bad={2 * size - 1}) for kind in ("fp32", "fp16")}
        for name, trainer in TRAINERS.items()
    }


# By rank: which of two networks each of its micro-batches reaches; the last of one rank is left out.
REACHED = [[(0, 1), (0,), (0, 1), (1,), (0, 1), (0, 1)], [(0, 1), (1,), (1,), (0,), (0, 1), ()]]

# ---- accelerate alone


def accelerate_failed_backward(rank, size):
    """Each rank's second backward fails halfway and is run again; twice, with one optimizer and with two."""
    environment(rank, size)
    found = {}
    for name, parts in (("one", 1), ("again", 1), ("two", 2), ("two again", 2)):
        one = accelerator()
        model = mlp()
        halves = list(model.parameters())[:2], list(model.parameters())[2:]
        groups = [list(model.parameters())] if parts == 1 else halves
        model, *optimizers = one.prepare(model, *(sgd(group) for group in groups))
        numbers = items(size, rank, uneven=False)
        for index, (x, y) in enumerate(loader(numbers)):
            for fails in (True, False) if index == 1 else (False,):
                with contextlib.suppress(torch.OutOfMemoryError), ends(one, index + 1 == len(numbers)):
                    with one.accumulate(model):
                        loss = mse_loss(model(x), y)
                        hook = halves[0][0].register_hook(_out_of_memory) if fails else None
                        try:
                            one.backward(loss, weight=len(x))
                        finally:
                            if hook is not None:
                                hook.remove()
                        for optimizer in optimizers:
                            optimizer.step()
                            optimizer.zero_grad()
                if fails:
                    one.step -= 1  # accelerate counts the block that is run again
        found[name] = parameters(model), [], None
        one.free_memory()
    return found


def _out_of_memory(grad):
    raise torch.OutOfMemoryError("no memory left")


def accelerate_empty_rank(rank, size):
    """Windows in which the last rank has no micro-batch, or none has; `.grad` left to the optimizer, and read."""
    environment(rank, size)
    found = {}
    for reads in (False, True):
        one = accelerator(steps=1)
        one.reads_gradients = reads
        model = mlp()
        model, optimizer = one.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        norms, skipped = [], []
        for window in range(5):
            with one.accumulate(model):
                if window in (1, 3) or (rank < size - 1 and window in (0, 4)):
                    x, y = item(window + rank)
                    one.backward(mse_loss(model(x), y), weight=float(window != 4))
                norm = one.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                norms.append(float(norm))
                skipped.append(one.optimizer_step_was_skipped)
                optimizer.zero_grad()
        found[reads] = parameters(model), norms, skipped
        one.free_memory()
    return found


def accelerate_recipe(rank, size):
    """Their documented loop for token counts, by the import alone: sums, divided by the number over all ranks."""
    environment(rank, size)
    found = {}
    for name in ("stock", "ours"):
        one = accelerator("stock" if name == "stock" else None)
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        for window in items(size, uneven=False):
            own = [item(i) for i in window[rank::size]]
            total = one.gather(torch.tensor(sum(len(x) for x, _ in own))).sum().item()
            for i, (x, y) in enumerate(own):
                with model.no_sync() if i + 1 < len(own) else contextlib.nullcontext():
                    loss = mse_loss(model(x), y, reduction="sum") / 3  # as many outputs as a sample has
                    one.backward(loss * STEPS * one.num_processes / total)
            assert next(model.parameters()).grad is not None
            optimizer.step()
            optimizer.zero_grad()
        found[name] = parameters(model)
        one.free_memory()
    return found


def accelerate_own_backward(rank, size):
    """Backwards that accelerate does not see, and gradients cleared by way of the model."""
    environment(rank, size)
    found = {}
    for name in ("stock", "ours"):
        one = accelerator("stock" if name == "stock" else None)
        one.gradient_accumulation_steps = 1
        model = mlp()
        model, optimizer = one.prepare(model, sgd(model.parameters()))
        for window in range(3):
            x, y = item(window * size + rank)
            mse_loss(model(x), y).backward()
            optimizer.step()
            model.zero_grad()
        found[name] = parameters(model)
        one.free_memory()
    return found


def accelerate_several(rank, size):
    """One model, two optimizers, one clipping; and two models with one optimizer."""
    environment(rank, size)

    def two(params):
        matrices = [params[0], params[4]]
        return [sgd(matrices), sgd([p for p in params if not any(p is one for one in matrices)])]

    run = Accelerate.run(rank, size, optimizer=two, clip=MAX_NORM)
    one = accelerator()
    whole = mlp()
    first, second, optimizer = one.prepare(whole[:2], whole[2:], sgd(whole.parameters()))
    norms = []
    numbers = items(size, rank)
    for index, i in enumerate(numbers):
        x, y = item(i)
        with ends(one, index + 1 == len(numbers)), one.accumulate(first, second):
            one.backward(mse_loss(second(first(x)), y), weight=len(x))
            if one.sync_gradients:
                norms.append(one.clip_grad_norm_([*first.parameters(), *second.parameters()], MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    values = [*parameters(first).values(), *parameters(second).values()]
    one.free_memory()
    of_two_models = run._replace(values=dict(zip(run.values, values, strict=True)), norms=norms)
    return {"two optimizers": run, "two models": of_two_models}


def accelerate_ends_apart(rank, size):
    """Two networks with an optimizer each; the last micro-batch of a window reaches another on each rank.

    By release; parameters of both, by network.
    """
    environment(rank, size)
    found = {}
    for release in ("auto", "microbatch"):
        one = accelerator(steps=2, options={"release": release})
        nets = [mlp(), mlp(seed=1)]
        *nets, first, second = one.prepare(*nets, *(sgd(net.parameters()) for net in nets))
        for i, places in enumerate(REACHED[rank]):
            x, y = item(2 * i + rank)
            with one.accumulate(*nets):
                if places:
                    one.backward(mse_loss(sum(nets[place](x) for place in places), y), weight=len(x))
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        found[release] = [parameters(net) for net in nets]
        one.free_memory()
    return found


def accelerate_refuses(rank, size):
    """What would hang or be wrong, on all ranks alike."""
    from accelerate.local_sgd import LocalSGD

    environment(rank, size)
    one = accelerator(steps=1)
    model = mlp()
    model, optimizer = one.prepare(model, sgd(model.parameters()))
    found = {}

    def joins():
        with one.join_uneven_inputs([model], even_batches=False):
            pass

    with unittest.mock.patch.object(type(one), "multi_device", True):  # on CPUs, accelerate does not join anything
        found["join"] = message(joins)
    x, y = item(0)
    one.backward(mse_loss(model(x), y))
    found["two that sync"] = message(lambda: one.backward(mse_loss(model(x), y)))
    one.free_memory()

    def local(accumulate):
        one = accelerator(steps=1)
        model, optimizer = one.prepare(made := mlp(), sgd(made.parameters()))
        with LocalSGD(one, model, 2), one.accumulate(model) if accumulate else contextlib.nullcontext():
            one.backward(mse_loss(model(x), y), weight=len(x))
            optimizer.step()

    found["local, in accumulate"] = message(local, True)
    found["local"] = message(local, False)
    both = mlp()
    one = accelerator(steps=1)
    found["shared"] = message(lambda: one.prepare(both, sgd(both.parameters()), sgd(both.parameters())))
    return found


# ---- Lightning alone


def lightning_two_optimizers(rank, size):
    """Two networks in one module in manual optimization, as Lightning's documentation has it, with toggle_optimizer."""
    import lightning.pytorch as pl

    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = mlp(), mlp(seed=1)

        def training_step(self, data, index):
            x, y = data
            ends = (index + 1) % STEPS == 0 or index + 1 == self.trainer.num_training_batches
            for place, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                # Each looks through both networks, and is to move its own.
                out = self.one(x) + self.two(x)
                self.manual_backward(mse_loss(out, y if place else -y))
                if ends:
                    self.clip_gradients(optimizer, MAX_NORM, "norm")
                    optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return sgd(self.one.parameters()), sgd(self.two.parameters())

    trainer = lightning_trainer(rank, size, FusedAccumulation(weight=lambda data: len(data[0])), steps=1)
    module = Manual()
    trainer.fit(module, loader(items(size, rank, uneven=False)))
    return parameters(module)


def lightning_resumed(rank, size):
    """A checkpoint at the end of the first window, which rank 0 writes; test_resumed_on_one_rank loads it."""
    import lightning.pytorch as pl

    environment(rank, size)

    class Saves(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(ranks.shared / f"window-{size}.ckpt")

    def model():
        net = mlp(torch.bfloat16)
        net.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        return net

    numbers = of_all(size)[: STEPS * size]
    options = {"master_weights": True}
    return Lightning.run(rank, size, Saves(), model=model, numbers=numbers, options=options).values


def lightning_inside_a_window(rank, size):
    """Saved after two of four micro-batches, on all ranks together; rank 0's is what is written."""
    from accumkernels.integrations.lightning import FusedAccumulation

    environment(rank, size)
    states = {}
    Lightning.run(
        rank, size, inside=lambda at: states.setdefault(at.index, FusedAccumulation.of(at.owner).state_dict())
    )
    return states[1]


# ---- transformers alone


class Dropping(nn.Module):
    """Gets `num_items_in_batch`, drops it, and averages shifted labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels, **kwargs):
        logits = self.head(torch.tanh(self.embedding(input_ids)))[:, :-1]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())}


def transformers_tokens(rank, size):
    """A model that takes `num_items_in_batch`; two `train()`s, of which the second finds the model wrapped."""
    environment(rank, size)
    model = gpt2(layers=1)
    trainer = transformers_trainer(size, ranks.shared, model, Samples(STEPS * size, masked=1), logging_strategy="no")
    before = copy.deepcopy(dict(parameters(model)))
    trainer.train()
    once = parameters(trainer.model)
    trainer.train()
    return before, once, parameters(trainer.model)


def transformers_means(rank, size):
    """Losses that drop `num_items_in_batch`, with the last window short; parameters, and losses as logged.

    The Trainer's `compute_loss` multiplies by the number of ranks; one of the user's does not.
    """
    environment(rank, size)
    found = {}
    for kind in ("ddp", "fsdp2", "overridden"):
        data = Samples((STEPS + 2) * size, masked=1)
        trainer = transformers_trainer(size, ranks.shared, Dropping(), data, fsdp2=kind == "fsdp2")
        if kind == "overridden":
            trainer.compute_loss = lambda model, inputs, num_items_in_batch=None: model(**inputs)["loss"]
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[kind] = parameters(trainer.model), losses
    return found


def transformers_resumed(rank, size):
    """Saved by rank 0 after the first window, with masters; test_resumed_on_one_rank loads it."""
    from accumkernels.integrations.transformers import ACCUMULATOR_NAME

    environment(rank, size)
    folder = ranks.shared / f"transformers-{size}"
    model = gpt2(torch.bfloat16, layers=1)
    trainer = transformers_trainer(
        size,
        folder,
        model,
        Samples(2 * STEPS * size, masked=1),
        save_strategy="steps",
        save_steps=1,
        logging_strategy="no",
    )
    trainer.accelerator._accumulator_options = trainer._accumulator_options = {"master_weights": True}
    trainer.train()
    torch.distributed.barrier()
    return (folder / "checkpoint-1" / ACCUMULATOR_NAME).is_file(), parameters(trainer.model)
