"""What ranks run in transformers' Trainer."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.support import ranks
from tests.support.models import mlp
from tests.support.trainer_data import KINDS, LR, MAX_NORM, STEPS, Items, environment, full, parameters, sgd
from tests.support.trainers import VOCABULARY, Samples, fp16_on_the_cpu, fsdp2_on_the_cpu, gpt2, reset


class Regressor(nn.Module):
    """The same model, as the Trainer calls it."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        return {"loss": mse_loss(self.net(x).float(), y)}


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


def transformers_trainer(
    size, folder, model, dataset, precision="fp32", clip=None, optimizer=sgd, fsdp2=False, accumulator_options=None,
    **arguments,
):  # fmt: skip
    """Without shuffling; fp16 and FSDP2 as in `accelerator`."""
    import transformers

    from accumkernels.integrations.transformers import Trainer

    reset()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Weighted(InOrder):
        def micro_batch_weight(self, inputs):
            return len(inputs["x"])

    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": STEPS,
        "num_train_epochs": 1,
        "max_grad_norm": clip or 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "bf16": precision == "bf16",
        "remove_unused_columns": False,
        "accelerator_config": {"even_batches": False},
        **arguments,
    }
    trainer = (Weighted if isinstance(dataset, Items) else InOrder)(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=dataset,
        optimizers=(optimizer(model.parameters()), None),
        data_collator=lambda one: one[0] if "x" in one[0] else {k: torch.stack([o[k] for o in one]) for k in one[0]},
        accumulator_options=accumulator_options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if precision == "fp16":
        fp16_on_the_cpu(trainer.accelerator)
    if fsdp2:
        fsdp2_on_the_cpu(trainer.accelerator, precision)
        trainer.is_fsdp_enabled = True
    return trainer


def transformers_loop(size, precision="fp32", clip=None, bad=(), uneven=True, **keywords):
    """Parameters, the norms of windows, with `bad` whether they overflowed, and the scale."""
    numbers = list(range((STEPS + 2) * size - uneven))
    data = Items(numbers, ("x", "y"), bad)
    trainer = transformers_trainer(size, ranks.shared, Regressor(), data, precision=precision, clip=clip, **keywords)
    trainer.train()
    norms = [float(full(entry["grad_norm"])) for entry in trainer.state.log_history if "grad_norm" in entry]
    if bad:
        norms = [not math.isfinite(norm) for norm in norms]
    scaler = trainer.accelerator.scaler
    return parameters(trainer.model), norms, None if scaler is None else scaler.get_scale()


def transformers_ddp(rank, size):
    """Weighted means, in every precision."""
    environment(rank, size)
    found = {kind: transformers_loop(size, *kind) for kind in KINDS}
    found["fused"] = transformers_loop(size, clip=MAX_NORM, optimizer=lambda p: torch.optim.SGD(p, LR, fused=True))
    return found


def transformers_overflow(rank, size):
    """On the last rank, in its second micro-batch: all skip."""
    environment(rank, size)
    return {kind: transformers_loop(size, kind, bad={2 * size - 1}) for kind in ("fp32", "fp16")}


def transformers_fsdp2(rank, size):
    """Sharded by accelerate."""
    environment(rank, size)
    found = {kind: transformers_loop(size, *kind, uneven=False, fsdp2=True) for kind in KINDS}
    found["overflow"] = transformers_loop(size, "fp16", bad={2 * size - 1}, uneven=False, fsdp2=True)
    return found


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
