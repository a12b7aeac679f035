"""Lightning with FusedAccumulator as a callback, in automatic and manual optimization, against Lightning and the truth.

make example-lightning_loop         # or, with accumkernels[lightning] installed: python examples/lightning_loop.py
make example-lightning_loop RANKS=2         # the same on two ranks: torchrun --nproc-per-node 2 examples/...
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
from big_batch import RANK, RANKS, STEPS, LanguageModel, make_loader, make_optimizer, report, tokens
from torch import Tensor

from accumkernels.integrations.lightning import FusedAccumulation


class Automatic(pl.LightningModule):
    """A module for automatic optimization, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor | None:
        """Return the mean loss of a micro-batch."""
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        """Return the only optimizer."""
        return make_optimizer(self)


class Manual(Automatic):
    """A module for manual optimization with the callback: it neither divides the loss nor calls zero_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], index: int) -> None:
        """Call backward for each micro-batch and step for each window."""
        self.manual_backward(self.model(**batch)["loss"])
        if (index + 1) % STEPS == 0 or index + 1 == self.trainer.num_training_batches:
            self.optimizers().step()


def train(module: pl.LightningModule, steps: int, callbacks: list[pl.Callback]) -> LanguageModel:
    """Train for one epoch."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=1,
        accumulate_grad_batches=steps,
        callbacks=callbacks,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's shuffles
        **quiet,
    )
    trainer.fit(module, make_loader(RANK, RANKS))
    return module.model


def main() -> int:
    """Train four times."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice: more workers
    stock = train(Automatic(), STEPS, [])
    report("Lightning", stock, train(Automatic(), STEPS, [FusedAccumulation(weight=tokens)]))
    report("Lightning", stock, train(Manual(), 1, [FusedAccumulation(weight=tokens)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
