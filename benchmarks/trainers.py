"""What the adapters gain: samples per second and gradient bytes of each trainer, with and without FusedAccumulator.

    python -m benchmarks.trainers [--device cpu|cuda] [--model small,medium] [--ranks 1,2] [--processes 4]
        [--csv FILE [--keep]]

accelerate, Lightning and transformers train the demo's GPT (GPT-2 124M on a GPU) under bf16 autocast, with clipping and
AdamW (fused, but not in Lightning, which alone refuses to clip it), on the same random tokens. Each method of a trainer
is a process of its own (on several ranks one for each, under DistributedDataParallel), and they take turns, window by
window: while one trains the others wait, since a machine is not as fast in one second as in another. A window is timed
from one optimizer step to the next; what a trainer sets up does not count. A ratio of speeds is that of two windows of
the same turn. The same loop in a new process has other memory, and a speed of its own: with `--processes`, all methods
are started so many times, and medians and spreads are over the windows of all. Samples and tokens are those of all
ranks, times and bytes those of rank 0. The peak of live gradient bytes is of all that holds gradients: `.grad`s, 16-bit
gradients not yet added, and flat buffers. It is looked at when a module's backward ends, before and after gradients are
added and before the optimizer steps, from the second window on, in a run of its own. A trainer that is not installed is
listed as such.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .harness.arguments import command_line, listed
from .harness.gradient_bytes import GradientBytes
from .harness.machine import environment, version
from .harness.measure import median_and_spread, milliseconds
from .harness.processes import free_ports, start
from .harness.results import Row, groups, read_csv, write_csv
from .harness.tables import Table
from .methods.trainers import OPTIONS, TRAINERS, WITHOUT, Clock, Model, Task, as_launched, reset
from .methods.training import SIZES

COLUMNS = (
    *("trainer", "trainer_version", "method", "model", "parameters", "device", "dtype", "ranks"),
    *("micro_batches", "tokens_per_micro_batch", "samples_per_second", "tokens_per_second"),
    *("ms_median", "ms_p10", "ms_p90", "peak_gradient_MB", "speed_to_without", "speed_p10", "speed_p90"),
    *("gradients_to_without", "windows", "processes", "unavailable"),
    *("threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class Measured(NamedTuple):
    """What a method took: seconds of each window, and the peak of gradient bytes."""

    seconds: list[float]
    peak: int


def _train(trainer: str, task: Task, method: str, wait: Callable[[], object], go_on: Callable[[], object]) -> Measured:
    """Train with one method, while it has the turn: from `wait` to `go_on`."""
    run, options = TRAINERS[trainer], OPTIONS[method]
    wait()
    model = Model(task.size).to(task.device)
    clock = Clock(task.device)
    # The first window does not count: there it is learned which gradients can be taken in 16 bit.
    with GradientBytes(model, counts=lambda: bool(clock.ends)) as held:
        run(task._replace(windows=2), model, clock, options)
    reset()

    def others() -> None:
        if len(timed.ends) < task.windows:
            go_on()
            wait()

    timed = Clock(task.device, others)
    run(task, Model(task.size).to(task.device), timed, options)
    go_on()
    return Measured(timed.seconds, held.gradient_peak)


def _process(index: int, trainer: str, task: Task, threads: int, ports: list[int], turns: list[Any]) -> Measured:
    """One rank of one method."""
    method, rank = divmod(index, task.ranks)
    torch.set_num_threads(max(1, threads // task.ranks))
    if task.ranks > 1:
        backend = "gloo"
        if task.device.type == "cuda":
            backend, task = "nccl", task._replace(device=torch.device("cuda", rank))
            torch.cuda.set_device(task.device)
        address = f"tcp://127.0.0.1:{ports[method]}"
        dist.init_process_group(backend, address, timedelta(minutes=30), world_size=task.ranks, rank=rank)
        as_launched()
    wait, go_on = turns[index].acquire, turns[(index + task.ranks) % len(turns)].release
    measured = _train(trainer, task, list(OPTIONS)[method], wait, go_on)
    if task.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return measured


def measure(trainer: str, task: Task, threads: int) -> dict[str, Measured]:
    """Run all methods of a trainer in turns, each with so many threads in all its ranks."""
    turns = [mp.get_context("spawn").Semaphore(int(i < task.ranks)) for i in range(len(OPTIONS) * task.ranks)]
    arguments = (trainer, task, threads, free_ports(len(OPTIONS)), turns)
    found = start(_process, arguments, len(turns), [f"accumkernels.integrations.{trainer}"])
    return dict(zip(OPTIONS, found[:: task.ranks], strict=True))  # of each method, rank 0's


def joined(runs: Sequence[dict[str, Measured]]) -> dict[str, Measured]:
    """All windows of some runs in one, and the highest peaks."""
    return {
        name: Measured([s for run in runs for s in run[name].seconds], max(run[name].peak for run in runs))
        for name in runs[0]
    }


def rows(trainer: str, found: dict[str, Measured] | str, task: Task, about: Row) -> list[Row]:
    """One per method; one in all where the trainer is not installed."""
    parameters = sum(p.numel() for p in Model(task.size).parameters())
    common: Row = {
        **about,
        "trainer": trainer,
        "trainer_version": version(trainer),
        "parameters": parameters,
        "dtype": "bf16",
        "ranks": task.ranks,
        "micro_batches": task.micro_batches,
        "tokens_per_micro_batch": task.size.tokens,
    }
    if isinstance(found, str):
        return [{column: {**common, "unavailable": found}.get(column) for column in COLUMNS}]
    result = []
    without = found[WITHOUT]
    for method, measured in found.items():
        median = median_and_spread(measured.seconds)[0]
        pairs = zip(without.seconds, measured.seconds, strict=True)
        speed, speed_p10, speed_p90 = median_and_spread([theirs / ours for theirs, ours in pairs])
        row: Row = {
            **common,
            "method": method,
            "samples_per_second": float(f"{task.ranks * task.micro_batches * task.size.samples / median:.4g}"),
            "tokens_per_second": float(f"{task.ranks * task.micro_batches * task.size.tokens / median:.4g}"),
            **milliseconds(measured.seconds),
            "peak_gradient_MB": float(f"{measured.peak / 1e6:.4g}"),
            "speed_to_without": float(f"{speed:.3f}"),
            "speed_p10": float(f"{speed_p10:.3f}"),
            "speed_p90": float(f"{speed_p90:.3f}"),
            "gradients_to_without": float(f"{measured.peak / without.peak:.3f}"),
            "windows": len(measured.seconds),
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
    parser = command_line(__doc__)
    parser.add_argument("--model", help=f"of {', '.join(SIZES)}; default: gpt2 on a GPU, small on the CPU")
    parser.add_argument("--ranks", default="1", help="numbers of processes, comma-separated (default: 1)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--windows", type=int, default=31, help="per method; the first is not timed")
    parser.add_argument("--processes", type=int, default=1, help="per method and rank, one after another (default: 1)")
    parser.add_argument("--trainers", default=",".join(TRAINERS), help=f"default: {','.join(TRAINERS)}")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other trainers, models and ranks")
    arguments = parser.parse_args(argv)
    names = listed(parser, "trainers", arguments.trainers, TRAINERS)
    models = listed(parser, "model", arguments.model or ("gpt2" if arguments.device == "cuda" else "small"), SIZES)
    if arguments.windows < 2:
        parser.error("--windows: 2 or more, the first is not timed")
    if arguments.processes < 1:
        parser.error("--processes: 1 or more")
    device = torch.device(arguments.device)
    about = {**environment(device), "processes": arguments.processes}
    cases = list(itertools.product(models, map(int, arguments.ranks.split(",")), names))
    found: list[Row] = []
    if arguments.keep and arguments.csv and arguments.csv.exists():
        kept = (dict[str, object](row) for row in read_csv(arguments.csv))
        found = [row for row in kept if (row["model"], int(str(row["ranks"])), row["trainer"]) not in cases]
    for model, ranks, name in cases:
        task = Task(SIZES[model], arguments.micro_batches, arguments.windows, device, ranks)
        measured: dict[str, Measured] | str = "not installed"
        if version(name):
            measured = joined([measure(name, task, arguments.threads) for _ in range(arguments.processes)])
        added = rows(name, measured, task, {**about, "model": model})
        show(added)
        found += added
        write_csv(arguments.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
