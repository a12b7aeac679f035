"""transformers' Trainer with FusedAccumulator: one import changes. Compared with the stock Trainer and the truth.

    make example-transformers_trainer   # or, with accumkernels[transformers]: python examples/transformers_trainer.py
    make example-transformers_trainer RANKS=2   # the same on two ranks: torchrun --nproc-per-node 2 examples/...

The forward of this model does not take `num_items_in_batch`, so the stock Trainer computes a mean of means.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from big_batch import MICRO_BATCH_SIZE, RANKS, STEPS, LanguageModel, collate, make_optimizer, report, samples
from torch import nn

from accumkernels.integrations.transformers import Trainer


def train(trainer_class: type[Any]) -> nn.Module:
    """Train for one epoch, in order."""
    model = LanguageModel()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=STEPS,
            num_train_epochs=1,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo" if RANKS > 1 else None,
            disable_tqdm=True,
        )
        optimizer = make_optimizer(model)
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=samples(),
            data_collator=collate,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return model


def main() -> int:
    """Train three times."""
    report("transformers.Trainer", train(transformers.Trainer), train(Trainer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
