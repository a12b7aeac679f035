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
from collections.abc import Sequence
from pathlib import Path

import torch

from ..harness.gradient_bytes import GradientBytes
from ..harness.machine import environment, version
from ..harness.measure import median_and_spread
from ..harness.results import Row, groups, write_csv
from ..harness.tables import Table, progress
from ..methods.trainers import OPTIONS, TRAINERS, WITHOUT, Clock, Model, Task, reset
from ..methods.training import SIZES

COLUMNS = (
    *("trainer", "trainer_version", "method", "model", "parameters", "device", "dtype", "micro_batches"),
    *("tokens_per_micro_batch", "samples_per_second", "tokens_per_second", "ms_median", "ms_p10", "ms_p90"),
    *("peak_gradient_MB", "speed_to_without", "gradients_to_without", "runs", "unavailable"),
    *("threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


def measure(trainer: str, task: Task, runs: int) -> dict[str, tuple[list[float], int]]:
    """Per method the seconds of windows and the peak of gradient bytes."""
    run = TRAINERS[trainer]
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for name, options in OPTIONS.items():
        progress(f"{trainer}: memory, {name}")
        reset()
        model = Model(task.size).to(task.device)
        clock = Clock(task.device)
        # The first window does not count: there it is learned which gradients can be taken in 16 bit.
        with GradientBytes(model, counts=lambda clock=clock: bool(clock.ends)) as held:  # type: ignore[misc]
            run(task._replace(windows=2), model, clock, options)
        peaks[name] = held.gradient_peak
    names = list(OPTIONS)
    for turn in range(runs):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]  # nobody always goes first
            progress(f"{trainer}: run {turn + 1} of {runs}")
            reset()
            clock = Clock(task.device)
            run(task, Model(task.size).to(task.device), clock, OPTIONS[name])
            seconds[name] += clock.seconds
    reset()
    progress("")
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


def show(table_rows: Sequence[Row]) -> None:
    """A table per trainer."""
    for group in groups(table_rows, "trainer", "micro_batches").values():
        first = group[0]
        if first["unavailable"]:
            print(f"{first['trainer']}: {first['unavailable']}")
            continue
        title = f"{first['trainer']} {first['trainer_version']}, {first['model']}, {first['parameters']:,} parameters, "
        title += f"{first['micro_batches']} micro-batches, bf16; torch {first['torch']}, {first['device']}"
        headers = ("method", "samples/s", "ms a window", "p10 to p90", "to without", "gradient MB", "to without")
        table = Table(title, headers)
        for r in group:
            cells = (r["samples_per_second"], r["ms_median"], f"{r['ms_p10']:g} to {r['ms_p90']:g}")
            more = (r["speed_to_without"], r["peak_gradient_MB"], r["gradients_to_without"])
            table.add(r["method"], *cells, *more)
        table.print()


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
    found: list[Row] = []
    for name in names:
        cause = None if version(name) else "not installed"
        added = rows(name, cause or measure(name, task, arguments.runs), task, about)
        show(added)
        found += added
        if arguments.csv:
            write_csv(arguments.csv, found)
    return 0
