"""What the adapters gain: samples per second and gradient bytes of each trainer, with and without FusedAccumulator.

    python -m benchmarks.trainers [--device cpu|cuda] [--csv FILE]

accelerate, Lightning and transformers train the demo's GPT (GPT-2 124M on a GPU) under bf16 autocast, with clipping and
AdamW (fused, but not in Lightning, which alone refuses to clip it), on the same random tokens; the methods of one
trainer take turns, run by run. A run's windows are timed from one optimizer step to the next, so that what a trainer
sets up does not count. The peak of live gradient bytes is of all that holds gradients: `.grad`s, 16-bit gradients not
yet added, and flat buffers. It is looked at when a module's backward ends, before and after gradients are added and
before the optimizer steps, from the second window on, in a run of its own. A trainer that is not installed is listed as
such.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accumkernels.demo.model import GPT
from accumkernels.window.micro_batch import Intake

from ..harness.machine import environment, version
from ..harness.measure import median_and_spread
from ..harness.results import Row, groups, write_csv
from ..methods.training import SIZES, Size

MAX_NORM = 1.0
WITHOUT = "without"
OPTIONS: dict[str, dict[str, Any] | None] = {
    WITHOUT: None,
    "FusedAccumulator": {},
    'FusedAccumulator, release="backward"': {"release": "backward"},
}
COLUMNS = (
    *("trainer", "trainer_version", "method", "model", "parameters", "device", "dtype", "micro_batches"),
    *("tokens_per_micro_batch", "samples_per_second", "tokens_per_second", "ms_median", "ms_p10", "ms_p90"),
    *("peak_gradient_MB", "speed_to_without", "gradients_to_without", "runs", "unavailable"),
    *("threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class Model(nn.Module):
    """The demo's GPT, called as trainers call models."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(*size[:5])

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean loss of int64 `[samples, length]`."""
        return {"loss": self.gpt(inputs, labels)}


class Clock:
    """Notes when windows end."""

    def __init__(self, device: torch.device) -> None:
        self.ends: list[float] = []
        self._device = device

    def window(self, *_: Any) -> None:
        """A window has ended: to be called after each optimizer step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each window but the first."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


class Task(NamedTuple):
    """What every trainer does."""

    size: Size
    micro_batches: int
    windows: int
    device: torch.device

    def samples(self) -> list[dict[str, Tensor]]:
        """Random tokens: what they are makes no difference to the time."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.size.samples * self.micro_batches * self.windows, self.size.length)
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
        devices=1,
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


@contextmanager
def gradient_bytes(model: nn.Module, clock: Clock) -> Iterator[list[int]]:
    """The peak, in a list of one number: of `.grad`s, what is taken and not added yet, and flat buffers.

    The first window does not count: there it is learned which gradients can be taken in 16 bit.
    """
    peak = [0]
    used: list[Intake] = []
    original = Intake.accumulate

    def accumulate(self: Intake, *args: Any, **kwargs: Any) -> None:
        if self not in used:
            used.append(self)
        look()
        original(self, *args, **kwargs)
        look()

    def look(*_: Any) -> None:
        if not clock.ends:
            return
        tensors = [p.grad for p in model.parameters() if p.grad is not None]
        for intake in used:
            tensors += [buffer.tensor for buffer in intake._store.buffers]
            if intake.route is not None:
                stash = intake.route.stash.values()
                tensors += [grad for parts in stash for grads in parts.values() for grad in grads]
            if intake.hooks is not None:
                tensors += [grad for pending in intake.hooks._pending.values() for grad in pending.grads]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        peak[0] = max(peak[0], sum(storages.values()))

    # Hooks on modules, since hooks on parameters would keep their gradients from being taken in 16 bit.
    handles = [part.register_full_backward_hook(look) for part in model.modules() if part is not model]
    optimizer_hook = register_optimizer_step_pre_hook(look)
    Intake.accumulate = accumulate
    try:
        yield peak
    finally:
        Intake.accumulate = original
        for handle in (*handles, optimizer_hook):
            handle.remove()


def reset() -> None:
    """accelerate keeps its settings in singletons."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def measure(run: Run, task: Task, runs: int, advance: Callable[[], object]) -> dict[str, tuple[list[float], int]]:
    """Per method the seconds of windows and the peak of gradient bytes."""
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for name, options in OPTIONS.items():
        reset()
        model = Model(task.size).to(task.device)
        clock = Clock(task.device)
        with gradient_bytes(model, clock) as peak:
            run(task._replace(windows=2), model, clock, options)
        peaks[name] = peak[0]
        advance()
    names = list(OPTIONS)
    for turn in range(runs):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]  # nobody always goes first
            reset()
            clock = Clock(task.device)
            run(task, Model(task.size).to(task.device), clock, OPTIONS[name])
            seconds[name] += clock.seconds
            advance()
    reset()
    return {name: (seconds[name], peaks[name]) for name in names}


def rows(trainer: str, found: dict[str, tuple[list[float], int]] | str, task: Task, about: Row) -> list[Row]:
    """One per method; one in all where the trainer is not installed."""
    parameters = sum(p.numel() for p in Model(task.size).parameters())
    tokens = task.size.samples * task.size.length
    common: Row = {
        **about,
        "trainer": trainer,
        "trainer_version": version(trainer),
        "parameters": parameters,
        "dtype": "bf16",
        "micro_batches": task.micro_batches,
        "tokens_per_micro_batch": tokens,
    }
    if isinstance(found, str):
        return [{column: {**common, "unavailable": found}.get(column) for column in COLUMNS}]
    result = []
    before = median_and_spread(found[WITHOUT][0])[0]
    for method, (seconds, peak) in found.items():
        median, p10, p90 = median_and_spread(seconds)
        row: Row = {
            **common,
            "method": method,
            "samples_per_second": float(f"{task.micro_batches * task.size.samples / median:.4g}"),
            "tokens_per_second": float(f"{task.micro_batches * tokens / median:.4g}"),
            **{f"ms_{n}": float(f"{s * 1e3:.4g}") for n, s in (("median", median), ("p10", p10), ("p90", p90))},
            "peak_gradient_MB": float(f"{peak / 1e6:.4g}"),
            "speed_to_without": float(f"{before / median:.3f}"),
            "gradients_to_without": float(f"{peak / found[WITHOUT][1]:.3f}"),
            "runs": len(seconds),
        }
        result.append({column: row.get(column) for column in COLUMNS})
    return result


def show(console: Console, table_rows: Sequence[Row]) -> None:
    """A table per trainer."""
    for group in groups(table_rows, "trainer", "micro_batches").values():
        first = group[0]
        if first["unavailable"]:
            console.print(f"{first['trainer']}: {first['unavailable']}", highlight=False)
            continue
        title = f"{first['trainer']} {first['trainer_version']}, {first['model']}, {first['parameters']:,} parameters, "
        title += f"{first['micro_batches']} micro-batches, bf16; torch {first['torch']}, {first['device']}"
        table = Table(title=title, title_justify="left")
        table.add_column("method", no_wrap=True)
        for header in ("samples/s", "ms a window", "p10 to p90", "to without", "gradient MB", "to without"):
            table.add_column(header, justify="right", no_wrap=True)
        for r in group:
            cells = (r["samples_per_second"], r["ms_median"], f"{r['ms_p10']:g} to {r['ms_p90']:g}")
            more = (r["speed_to_without"], r["peak_gradient_MB"], r["gradients_to_without"])
            table.add_row(str(r["method"]), *map(str, (*cells, *more)))
        console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", choices=list(SIZES), help="default: gpt2 on a GPU, small on the CPU")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--windows", type=int, default=6, help="of a run; the first is not timed")
    parser.add_argument("--runs", type=int, default=5, help="per method")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help=f"default: {','.join(TRAINERS)}")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    names = arguments.trainers.split(",")
    for name in names:
        if name not in TRAINERS:
            parser.error(f"--trainers: {name!r} is not one of {', '.join(TRAINERS)}")
    if arguments.windows < 2:
        parser.error("--windows: 2 or more, the first is not timed")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    model = arguments.model or ("gpt2" if arguments.device == "cuda" else "small")
    task = Task(SIZES[model], arguments.micro_batches, arguments.windows, device)
    about: Row = {**environment(device), "model": model}
    console = Console(width=max(Console().width, 150))
    found: list[Row] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(names) * len(OPTIONS) * (arguments.runs + 1))
        for name in names:
            progress.update(bar, description=name)
            cause = None if version(name) else "not installed"
            measured = cause or measure(TRAINERS[name], task, arguments.runs, lambda: progress.advance(bar))
            added = rows(name, measured, task, about)
            show(console, added)
            found += added
            if arguments.csv:
                write_csv(arguments.csv, found)
    return 0
