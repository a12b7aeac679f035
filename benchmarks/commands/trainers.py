"""What the adapters gain: samples per second and gradient bytes of each trainer, with and without FusedAccumulator.

    python -m benchmarks.trainers [--device cpu|cuda] [--model small,medium] [--ranks 1,2] [--csv FILE [--keep]]

accelerate, Lightning and transformers train the demo's GPT (GPT-2 124M on a GPU) under bf16 autocast, with clipping and
AdamW (fused, but not in Lightning, which alone refuses to clip it), on the same random tokens; the methods of one
trainer take turns, run by run. A run's windows are timed from one optimizer step to the next, so that what a trainer
sets up does not count. The peak of live gradient bytes is of all that holds gradients: `.grad`s, 16-bit gradients not
yet added, and flat buffers. It is looked at when a module's backward ends, before and after gradients are added and
before the optimizer steps, from the second window on, in a run of its own. A ratio of speeds is that of two runs of the
same turn, since a machine is not as fast in one minute as in another; p10 to p90 are of turns. A trainer that is not
installed is listed as such. On several ranks, each a process on this machine, trainers run under
DistributedDataParallel; samples and tokens are those of all ranks, and times and bytes those of rank 0.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
import socket
import statistics
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..harness.gradient_bytes import GradientBytes
from ..harness.machine import environment, version
from ..harness.measure import median_and_spread, milliseconds
from ..harness.results import Row, groups, read_csv, write_csv
from ..harness.tables import Table, progress
from ..methods.trainers import OPTIONS, TRAINERS, WITHOUT, Clock, Model, Task, as_launched, reset
from ..methods.training import SIZES

COLUMNS = (
    *("trainer", "trainer_version", "method", "model", "parameters", "device", "dtype", "ranks"),
    *("micro_batches", "tokens_per_micro_batch", "samples_per_second", "tokens_per_second"),
    *("ms_median", "ms_p10", "ms_p90", "peak_gradient_MB", "speed_to_without", "speed_p10", "speed_p90"),
    *("gradients_to_without", "runs", "unavailable"),
    *("threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class Measured(NamedTuple):
    """What a method took: seconds of windows, for each turn, and the peak of gradient bytes."""

    turns: list[list[float]]
    peak: int


Found = dict[str, Measured]  # by method


def measure(trainer: str, task: Task, runs: int) -> Found:
    """Run all methods of a trainer in turns."""
    run = TRAINERS[trainer]
    peaks: dict[str, int] = {}
    turns: dict[str, list[list[float]]] = {name: [] for name in OPTIONS}
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
            turns[name].append(clock.seconds)
    reset()
    progress("")
    return {name: Measured(turns[name], peaks[name]) for name in names}


def _rank(rank: int, port: int, path: str, trainer: str, task: Task, runs: int, threads: int) -> None:
    """One process; rank 0 writes what it measured."""
    torch.set_num_threads(threads)
    backend = "gloo"
    if task.device.type == "cuda":
        backend, task = "nccl", task._replace(device=torch.device("cuda", rank))
        torch.cuda.set_device(task.device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, timedelta(minutes=10), world_size=task.ranks, rank=rank)
    as_launched()
    found = measure(trainer, task, runs)
    if rank == 0:
        Path(path).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_on_ranks(trainer: str, task: Task, runs: int, threads: int) -> Found:
    """As `measure`, in as many processes as the task has ranks, with so many threads in all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured")
        each = max(1, threads // task.ranks)
        mp.spawn(_rank, (port, str(path), trainer, task, runs, each), nprocs=task.ranks)
        return pickle.loads(path.read_bytes())


def rows(trainer: str, found: Found | str, task: Task, about: Row) -> list[Row]:
    """One per method; one in all where the trainer is not installed."""
    parameters = sum(p.numel() for p in Model(task.size).parameters())
    tokens = task.size.samples * task.size.length
    common: Row = {
        **about,
        "trainer": trainer,
        "trainer_version": version(trainer),
        "parameters": parameters,
        "dtype": "bf16",
        "ranks": task.ranks,
        "micro_batches": task.micro_batches,
        "tokens_per_micro_batch": tokens,
    }
    if isinstance(found, str):
        return [{column: {**common, "unavailable": found}.get(column) for column in COLUMNS}]
    result = []
    without = found[WITHOUT]
    for method, measured in found.items():
        seconds = [window for turn in measured.turns for window in turn]
        median = median_and_spread(seconds)[0]
        pairs = zip(without.turns, measured.turns, strict=True)
        speed, speed_p10, speed_p90 = median_and_spread([statistics.median(w) / statistics.median(m) for w, m in pairs])
        row: Row = {
            **common,
            "method": method,
            "samples_per_second": float(f"{task.ranks * task.micro_batches * task.size.samples / median:.4g}"),
            "tokens_per_second": float(f"{task.ranks * task.micro_batches * tokens / median:.4g}"),
            **milliseconds(seconds),
            "peak_gradient_MB": float(f"{measured.peak / 1e6:.4g}"),
            "speed_to_without": float(f"{speed:.3f}"),
            "speed_p10": float(f"{speed_p10:.3f}"),
            "speed_p90": float(f"{speed_p90:.3f}"),
            "gradients_to_without": float(f"{measured.peak / without.peak:.3f}"),
            "runs": len(seconds),
        }
        result.append({column: row.get(column) for column in COLUMNS})
    return result


def show(table_rows: Sequence[Row]) -> None:
    """A table per trainer, model and number of ranks."""
    for group in groups(table_rows, "trainer", "model", "ranks", "micro_batches").values():
        first = group[0]
        if first["unavailable"]:
            print(f"{first['trainer']}: {first['unavailable']}")
            continue
        title = f"{first['trainer']} {first['trainer_version']}, {first['model']}, {first['parameters']:,} parameters, "
        title += f"{first['ranks']} ranks, {first['micro_batches']} micro-batches, bf16; torch {first['torch']}, "
        title += str(first["device"])
        headers = ("method", "samples/s", "ms a window", "p10 to p90", "speed to without", "its p10 to p90")
        headers += ("gradient MB", "to without")
        table = Table(title, headers)
        for r in group:
            cells = (r["samples_per_second"], r["ms_median"], f"{r['ms_p10']:g} to {r['ms_p90']:g}")
            speed = (r["speed_to_without"], f"{r['speed_p10']:g} to {r['speed_p90']:g}")
            table.add(r["method"], *cells, *speed, r["peak_gradient_MB"], r["gradients_to_without"])
        table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help=f"of {', '.join(SIZES)}; default: gpt2 on a GPU, small on the CPU")
    parser.add_argument("--ranks", default="1", help="numbers of processes, comma-separated (default: 1)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--windows", type=int, default=6, help="of a run; the first is not timed")
    parser.add_argument("--runs", type=int, default=5, help="per method")
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help=f"default: {','.join(TRAINERS)}")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other trainers, models and ranks")
    arguments = parser.parse_args(argv)
    names = arguments.trainers.split(",")
    models = (arguments.model or ("gpt2" if arguments.device == "cuda" else "small")).split(",")
    for option, given, known in (("--trainers", names, TRAINERS), ("--model", models, SIZES)):
        for name in given:
            if name not in known:
                parser.error(f"{option}: {name!r} is not one of {', '.join(known)}")
    if arguments.windows < 2:
        parser.error("--windows: 2 or more, the first is not timed")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    about = environment(device)
    cases = list(itertools.product(models, map(int, arguments.ranks.split(",")), names))
    found: list[Row] = []
    if arguments.keep and arguments.csv and arguments.csv.exists():
        kept = (dict[str, object](row) for row in read_csv(arguments.csv))
        found = [row for row in kept if (row["model"], int(str(row["ranks"])), row["trainer"]) not in cases]
    for model, ranks, name in cases:
        task = Task(SIZES[model], arguments.micro_batches, arguments.windows, device, ranks)
        measured: Found | str
        if not version(name):
            measured = "not installed"
        elif ranks == 1:
            measured = measure(name, task, arguments.runs)
        else:
            measured = measure_on_ranks(name, task, arguments.runs, arguments.threads)
        added = rows(name, measured, task, {**about, "model": model})
        show(added)
        found += added
        if arguments.csv:
            write_csv(arguments.csv, found)
    return 0
