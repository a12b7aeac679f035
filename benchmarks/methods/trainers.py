"""Trainers with and without their adapters: the same model, data, clipping and AdamW in each."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .training import Size

MAX_NORM = 1.0
WITHOUT = "without"
OPTIONS: dict[str, dict[str, Any] | None] = {
    WITHOUT: None,
    "FusedAccumulator": {},
    'FusedAccumulator, release="backward"': {"release": "backward"},
}


class Model(nn.Module):
    """The demo's GPT, called as trainers call models."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = size.model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean loss of int64 `[samples, length]`."""
        return {"loss": self.gpt(inputs, labels)}


class Clock:
    """Notes when windows end.

    Args:
        device: Waited for.
        between: Called between two windows, outside of both.
    """

    def __init__(self, device: torch.device, between: Callable[[], None] = lambda: None) -> None:
        self.ends: list[float] = []
        self._starts: list[float] = []
        self._device = device
        self._between = between

    def window(self, *_: Any) -> None:
        """A window has ended: to be called after each optimizer step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ends.append(time.perf_counter())
        self._between()
        self._starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each window but the first."""
        return [end - start for start, end in zip(self._starts, self.ends[1:], strict=False)]


class Task(NamedTuple):
    """What every trainer does."""

    size: Size
    micro_batches: int
    windows: int
    device: torch.device
    ranks: int = 1

    def samples(self) -> list[dict[str, Tensor]]:
        """Random tokens, of all ranks: what they are makes no difference to the time."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.size.samples * self.micro_batches * self.windows * self.ranks, self.size.length)
        inputs, labels = (torch.randint(self.size.vocabulary, shape, generator=generator) for _ in range(2))
        return [{"inputs": one, "labels": other} for one, other in zip(inputs, labels, strict=True)]

    def loader(self) -> torch.utils.data.DataLoader:
        """Micro-batches."""
        return torch.utils.data.DataLoader(self.samples(), self.size.samples)


def adamw(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    """Torch's."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def run_accelerate(task: Task, model: nn.Module, clock: Clock, options: dict[str, Any] | None) -> None:
    """The loop of accelerate's documentation."""
    import accelerate

    from accumkernels.integrations.accelerate import Accelerator

    settings: dict[str, Any] = {
        "cpu": task.device.type == "cpu",
        "gradient_accumulation_steps": task.micro_batches,
        "mixed_precision": "bf16",
    }
    if options is None:
        accelerator = accelerate.Accelerator(**settings)
    else:
        accelerator = Accelerator(**settings, accumulator_options=options)
    model, optimizer, loader = accelerator.prepare(model, adamw(model, fused=True), task.loader())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.window()
    accelerator.free_memory()


def run_lightning(task: Task, model: nn.Module, clock: Clock, options: dict[str, Any] | None) -> None:
    """Automatic optimization."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from accumkernels.integrations.lightning import FusedAccumulation

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self, fused=False)

    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % task.micro_batches == 0:
                clock.window()

    trainer = pl.Trainer(
        accelerator="cpu" if task.device.type == "cpu" else "gpu",
        devices=task.ranks,
        strategy=DDPStrategy() if task.ranks > 1 else "auto",
        max_epochs=1,
        precision="bf16-mixed",
        accumulate_grad_batches=task.micro_batches,
        gradient_clip_val=MAX_NORM,
        callbacks=[Ends(), *([] if options is None else [FusedAccumulation(**options)])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), task.loader())


def run_transformers(task: Task, model: nn.Module, clock: Clock, options: dict[str, Any] | None) -> None:
    """The Trainer."""
    import transformers

    from accumkernels.integrations.transformers import Trainer

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.window()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=task.size.samples,
            gradient_accumulation_steps=task.micro_batches,
            num_train_epochs=1,
            bf16=True,
            max_grad_norm=MAX_NORM,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=task.device.type == "cpu",
            ddp_backend=torch.distributed.get_backend() if task.ranks > 1 else None,
            disable_tqdm=True,
        )
        cls = functools.partial(Trainer, accumulator_options=options) if options is not None else transformers.Trainer
        trainer = cls(model=model, args=arguments, train_dataset=task.samples(), callbacks=[Ends()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


Run = Callable[[Task, nn.Module, Clock, "dict[str, Any] | None"], None]
TRAINERS: dict[str, Run] = {
    "accelerate": run_accelerate,
    "lightning": run_lightning,
    "transformers": run_transformers,
}


def as_launched() -> None:
    """Set what `torchrun` sets, for trainers in ranks that have a process group already."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)},
        GROUP_RANK="0", NODE_RANK="0", TORCHELASTIC_RUN_ID="here", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip


def reset() -> None:
    """accelerate keeps its settings in singletons."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
