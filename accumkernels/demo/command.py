"""Runs the demo, from the command line's arguments to its files."""

from __future__ import annotations

import sys
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from accumkernels import doctor, ops

from .. import devices
from ..planning.commands import UserError
from . import report
from .gpt import GPT, LINE, Corpus, Window
from .train import (
    ACCUMULATION_STEPS,
    MAX_NORM,
    METHODS,
    SEEDS,
    SHAPES,
    BigBatch,
    Shape,
    choose_size,
    copied,
    gradient_errors,
    peak_bytes,
    seconds_per_window,
    train,
)

# ---- Shows progress: live bars on a terminal, an occasional line in a log


class Display:
    """A bar per method with its loss and the time left; `stage` names the current activity.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = "while setting up"
        self._steps = 0
        self._done = 0
        self._begin = 0.0
        self._bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<11}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def begin_training(self, names: Sequence[str], steps: int) -> None:
        """Announce `steps` windows for each of `names`."""
        self._steps = steps
        self._done = 0
        self._begin = time.perf_counter()
        self.stage = f"after 0 of {steps} windows"
        self._tasks = {name: self._bars.add_task(name, total=steps, note="") for name in names}

    def trained(self, losses: dict[str, float]) -> None:
        """Count one window; `losses` are by name."""
        self._done += 1
        self.stage = f"after {self._done} of {self._steps} windows"
        for name, loss in losses.items():
            self._bars.update(self._tasks[name], advance=1, note=f"loss {loss:.3f}")
        tenth = self._done * 10 // self._steps
        if not self.console.is_terminal and tenth > (self._done - 1) * 10 // self._steps:
            left = (time.perf_counter() - self._begin) / self._done * (self._steps - self._done)
            values = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            self.console.print(f"window {self._done}/{self._steps}, {left:.0f} s left, loss: {values}", soft_wrap=True)

    def begin_measuring(self, total: int) -> None:
        """Announce `total` measurements."""
        self.stage = "while measuring"
        self._steps, self._done = total, 0
        self._measuring = self._bars.add_task("measurements", total=total, note="")

    def measured(self, what: str) -> None:
        """Count one measurement."""
        self._done += 1
        self._bars.advance(self._measuring)
        if not self.console.is_terminal:
            self.console.print(f"measured {self._done}/{self._steps}: {what}", highlight=False, soft_wrap=True)


def run_command(name: str, out: Path, work: Callable[[Display], None]) -> int:
    """Run a command that writes files; return the exit status.

    Raises:
        UserError: `work` does, or a file cannot be written.
    """
    console = Console()
    display = Display(console)
    begin = time.perf_counter()
    try:
        work(display)
    except KeyboardInterrupt:
        print(f"{name} interrupted {display.stage}; no results were written", file=sys.stderr)
        return 130
    except OSError as error:
        raise UserError(str(error)) from None
    seconds = time.perf_counter() - begin
    console.print(f"{out / f'{name}.png'} and {name}.json written; {seconds:.0f} s.", highlight=False)
    return 0


# ---- Runs the demo, from the command line's arguments to its files

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}
# Memory is measured with a batch that a card cannot take at once. Its budget is half as much again as what weights,
# gradients and AdamW's moments take in fp32, 16 bytes per parameter; what is left is for activations.
LINES_AT_A_TIME = 8
BUDGET_PER_PARAMETER = 24  # bytes


def choose_device(name: str | None) -> torch.device:
    """The device called `name`; by default the accelerator that is there, else the CPU.

    Raises:
        UserError: There is no such device.
    """
    if name is None:
        return devices.default()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: no such device; use cpu, or an accelerator that torch finds") from None
    if device.type == "cpu":
        return device
    if not devices.is_available(device):
        built = device.type != "cuda" or torch.version.cuda or torch.version.hip
        reason = "torch finds no usable one" if built else "this torch is built without CUDA"
        raise UserError(f"--device {name}: {reason}")
    found = [other for other in devices.accelerators() if other.type == device.type]
    if (device.index or 0) >= len(found):
        raise UserError(f"--device {name}: there are {len(found)} devices of this kind")
    if (cause := devices.obstacle(device)) is not None:
        raise UserError(f"--device {name}: {cause}")
    return device


def choose_amp(name: str | None, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, as a user would choose it: bf16; fp16 on a GPU, none on a CPU, that has no bf16."""
    if name is not None:
        return AMP_DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16 if devices.multiplies_bf16(device) else torch.float16
    # A CPU with AVX2 alone takes up to 50 times as long as in fp32; nothing in torch says so.
    return None if _seconds_of_product(torch.bfloat16) > 2 * _seconds_of_product(torch.float32) else torch.bfloat16


def _seconds_of_product(dtype: torch.dtype) -> float:
    a, b = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: torch.nn.functional.linear(a, b), number=1, repeat=20))


def _measure(
    runs: list[report.Run],
    model: nn.Module,
    amp_dtype: torch.dtype | None,
    corpus: Corpus,
    large: Window,
    steps: int,
    display: Display,
) -> None:
    """Fill in the numbers of `runs` that training does not give, at the weights of `model`; memory with `large`."""
    windows = {"full": corpus.window(steps), "short": corpus.window(steps + 1, partial=True)}  # not trained on
    display.begin_measuring(len(windows) + len(runs))
    for key, window in windows.items():
        errors = gradient_errors(METHODS, model, window, (amp_dtype, None))
        for run, (with_autocast, without) in zip(runs, errors, strict=True):
            run.gradient_errors[key] = with_autocast
            run.gradient_errors_without_autocast[key] = without
        display.measured(f"gradient errors, {key} window")
    for run, cls in zip(runs, METHODS, strict=True):
        run.peak_bytes = peak_bytes(cls, model, large, amp_dtype)
        display.measured(f"memory of {run.name}")


def versions_and_device(device: torch.device) -> dict[str, Any]:
    """What the doctor knows of versions, and what trains."""
    return {
        **doctor.versions(),
        "device": f"{device} ({doctor.describe(device)})",
        "threads": torch.get_num_threads(),
        "backend": ops.name(ops.select("auto", device)),
    }


def in_short(versions: dict[str, Any]) -> str:
    """The versions for a picture's title."""
    return ", ".join(f"{key} {versions[key]}" for key in ("accumkernels", "torch", "device", "threads", "backend"))


def _demo(
    device: torch.device, amp_dtype: torch.dtype | None, out: Path, steps: int | None, seed: int, display: Display
) -> None:
    console = display.console

    def build(shape: Shape, number: int) -> GPT:
        torch.manual_seed(number)
        return shape.build().to(device)

    # A micro-batch is one line, as on a card that is full: its gradients then cost as much as its layers.
    corpus = Corpus(1, ACCUMULATION_STEPS, device, seed)
    lines = LINES_AT_A_TIME * ACCUMULATION_STEPS
    large = Corpus(LINES_AT_A_TIME, ACCUMULATION_STEPS, device, seed).window(0)
    shape, fitting = choose_size(seconds_per_window(build(SHAPES[-1], seed), corpus, amp_dtype))
    steps = steps or fitting
    model = build(shape, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    amp = "float32" if amp_dtype is None else str(amp_dtype).removeprefix("torch.")
    versions = versions_and_device(device)
    console.print(
        f"A byte-level GPT of {parameters / 1e6:.0f} M parameters on Python's standard library: {steps} windows of "
        f"{ACCUMULATION_STEPS} micro-batches of one line, up to {LINE} bytes, {amp}, on {versions['device']}, "
        f"{torch.get_num_threads()} threads; FusedAccumulator's backend: {versions['backend']}.",
        highlight=False,
    )
    methods = [copied(cls, model, amp_dtype) for cls in METHODS]
    with display:
        display.begin_training([method.name for method in methods], steps)
        runs = train(methods, corpus, steps, display.trained)
        _measure(runs, methods[0].model, amp_dtype, corpus, large, steps, display)
        del methods  # before there are more
        seeds = runs[:1]
        for number in range(1, SEEDS):
            again = copied(BigBatch, build(shape, seed + number), amp_dtype)
            again.name += f", seed {seed + number}"
            display.begin_training([again.name], steps)
            seeds += train([again], corpus, steps, display.trained)
    display.stage = "while writing the files"
    ends = [run.final_loss for run in seeds]
    batch, budget = f"{lines} lines", BUDGET_PER_PARAMETER * parameters
    for run in runs:
        run.fits = run.peak_bytes <= budget
    report.print_table(
        console,
        runs,
        unit="tokens",
        exact="float64",
        how="in one batch",
        where="; at the weights that the big batch ended with. Micro-batches hold unequal numbers of bytes",
        full=ACCUMULATION_STEPS,
        short=len(corpus.window(0, partial=True).micro_batches),
        amp=amp,
        seeds=SEEDS,
        lowest=min(ends),
        highest=max(ends),
        memory="memory in torch's allocator" if devices.counts_memory(device) else "tensors alive at a time",
        batch=f"a batch of {batch}, accumulated {LINES_AT_A_TIME} at a time, on a budget of {budget / 1e6:,.0f} MB",
    )
    report.print_conclusion(
        console,
        runs[1],
        runs[2],
        "tokens",
        scaled=amp == "float16",
        cache_casts=amp_dtype is not None,
        clips=True,
    )
    settings = {
        "steps": steps,
        "seed": seed,
        "parameters": parameters,
        "context": LINE,
        "accumulation_steps": ACCUMULATION_STEPS,
        "autocast": amp,
        "max_norm": MAX_NORM,
        "threads": torch.get_num_threads(),
        "memory_batch": lines,
        "memory_budget": budget,
    }
    losses = [run.losses for run in seeds]
    report.write_json(out / "demo.json", runs, seeds=losses, settings=settings, versions=versions)
    title = f"GPT, {parameters / 1e6:.0f} M parameters, {amp}; {in_short(versions)}"
    report.draw(out / "demo.png", runs, title, unit="tokens", batch=batch, budget=budget, seeds=seeds)


def run(device: str | None, out: Path, steps: int | None, seed: int, amp: str | None = None) -> int:
    """Run the demo, and return the exit status; raises as `run_command`.

    Args:
        device: As for `choose_device`.
        out: Directory for `demo.png` and `demo.json`; created if it does not exist.
        steps: Windows to train; None for as many as fit into the time.
        seed: Of the weights and the order of the samples.
        amp: A key of `AMP_DTYPES`; by default as in `choose_amp`.
    """

    def work(display: Display) -> None:
        chosen = choose_device(device)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}") from None
        _demo(chosen, choose_amp(amp, chosen), out, steps, seed, display)

    return run_command("demo", out, work)
