"""How fast are the kernels, against the memory's limit and against every peer?

    python -m benchmarks.kernels --device cpu --csv benchmarks/results/kernels_cpu.csv
    python -m benchmarks.pictures benchmarks/results/kernels_cpu.csv

Four tables. `accumulate`: one micro-batch's gradients into fp32 accumulators that hold a sum, gradients cold (the
caches hold something else) and written (backward has just left them there; methods that take parameter by parameter
get each one at once). `window`: K times accumulate, unscale, check, norm, clip, zero. `host`: the host's time per call.
`other jobs`: what is often called accumulation, and is not the same. What each method does is said in methods/, in
peers.py and window.py.

GB/s counts what the job needs, so that it compares across methods: one accumulate reads gradient and accumulator and
writes the accumulator. The limits are loops that only move memory, measured in the same run; `fraction_of_limit` refers
to the fastest of them. `share_of_step` is the gradient's part of a step made of it, the matrix products of `tokens`
tokens per micro-batch, and (for windows) a fused AdamW.

On the CPU each method runs in processes of its own, as a training program uses one of them: most of the time of eager
torch is its fp32 temporaries, which glibc hands back to the system and takes anew, page by page, unless the heap
happens to hold a free block of the size. `kept temporaries` shows what remains without that. With `--processes 0` they
share one, which is quicker and on the CPU less fair: the compiled loops bring threads of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import kernel_rows
from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES
from .harness.machine import environment, version
from .harness.processes import in_new_process
from .harness.results import Row, write_csv, write_json
from .harness.shapes import NAMES, Shapes, lists
from .harness.tables import progress
from .kernel_jobs import Job, Measured, merge, run
from .methods import compute, host, other_jobs, peers, window

TABLES = ("accumulate", "window", "host", "other jobs")
PROCESSES = 2  # of each method on the CPU, spread over the run
DEFAULT_MICRO_BATCHES = "2,8,32"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, lists split and checked."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16,fp16", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--shapes", default="gpt2,tiny", help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--tables", default=",".join(TABLES), help=f"comma-separated, of {', '.join(TABLES)}")
    parser.add_argument("--methods", help="comma-separated parts of names: only these methods, and ours")
    parser.add_argument("--micro-batches", default=DEFAULT_MICRO_BATCHES, help="lengths of windows")
    parser.add_argument("--elements", type=int, help="for quick runs: shrink lists that have more")
    parser.add_argument("--tokens", type=int, help="of a micro-batch, for the share of a step")
    parser.add_argument("--repetitions", type=int, default=11, help="of each method in each process")
    parser.add_argument("--seconds", type=float, default=10.0, help="after so many per method, no more repetitions")
    parser.add_argument(
        "--processes", type=int, help="per method of one accumulate (CPU: 2); 0: all in this one (default for CUDA)"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    for name, known in (("dtype", tuple(DTYPES)), ("shapes", NAMES), ("tables", TABLES)):
        setattr(arguments, name, listed(parser, name, getattr(arguments, name), known))
    arguments.micro_batches = tuple(int(k) for k in arguments.micro_batches.split(","))
    if min(arguments.repetitions, arguments.threads, *arguments.micro_batches) < 1:
        parser.error("--repetitions, --threads and --micro-batches must be at least 1")
    if arguments.processes is None:
        arguments.processes = 0 if arguments.device == "cuda" else PROCESSES
    if arguments.tokens is None:
        arguments.tokens = compute.TOKENS[arguments.device]
    return arguments


def jobs(arguments: argparse.Namespace, name: str, shapes: Shapes, dtype: str) -> list[Job]:
    """What to measure on one list of shapes, in processes as asked for."""
    tables = arguments.tables
    tensors = len(shapes)

    def chosen(names: Sequence[str]) -> tuple[str, ...]:
        wanted = arguments.methods.split(",") if arguments.methods else [""]
        return tuple(n for n in names if n == peers.OURS or any(part in n for part in wanted))

    def job(table: str, methods: Sequence[str], **fields: object) -> Job:
        repetitions = arguments.repetitions * (4 if tensors > 1000 else 1)  # short calls vary more
        common = (dtype, arguments.device, arguments.threads, repetitions, arguments.seconds)
        return Job(table, tuple(methods), shapes, *common, **fields)  # type: ignore[arg-type]

    names = chosen(peers.available(torch.device(arguments.device), tensors))
    windows = [n for n in names if n in window.WINDOWS]
    found = [job("step", (), tokens=arguments.tokens)] if {"accumulate", "window"} & set(tables) else []
    together = arguments.processes == 0
    for _ in range(max(1, arguments.processes)):
        if "accumulate" in tables:
            found += [job("accumulate", some) for some in ([names] if together else [[n] for n in names])]
    if "window" in tables and name != "uniform" and dtype != "fp32":
        for some in [windows] if together else [[n] for n in windows]:
            found.append(job("window", some, micro_batches=arguments.micro_batches))
    if "other jobs" in tables and name not in ("uniform", "tiny") and dtype != "fp32":
        found.append(job("other jobs", tuple(other_jobs.JOBS), tokens=arguments.tokens))
    return found


def host_jobs(arguments: argparse.Namespace, dtype: str) -> list[Job]:
    """The host's time, which does not depend on the shapes."""
    if "host" not in arguments.tables:
        return []
    counts = (dtype, arguments.device, arguments.threads, 10 * arguments.repetitions, arguments.seconds)
    return [Job("host", tuple(host.METHODS), host.shapes(tensors), *counts) for tensors in host.TENSORS]


def measure(arguments: argparse.Namespace, work: Sequence[Job], what: str) -> list[Measured]:
    """Run jobs one after the other."""
    measured = []
    for job in work:
        method = job.methods[0] if len(job.methods) == 1 else f"{len(job.methods)} methods"
        progress(f"{what}: {job.table}, {method}")
        measured += run(job) if arguments.processes == 0 else in_new_process(run, job)
    progress("")
    return merge(measured)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = parse(argv)
    device = usable(arguments.device, arguments.threads)
    megatron = version("megatron-core") if device.type == "cuda" else ""
    about = {**environment(device), "megatron_core": megatron or "imitated"}
    rows: list[Row] = []

    def add(measured: list[Measured], name: str, shapes: Shapes, dtype: str) -> None:
        added = kernel_rows.rows(measured, name, shapes, dtype, about, arguments.tokens)
        kernel_rows.show(added)
        rows.extend(added)
        write_csv(arguments.csv, rows)  # after each part: what is measured is not lost when a later part fails
        write_json(arguments.json, rows)

    for dtype in arguments.dtype:
        for job in host_jobs(arguments, dtype):
            add(measure(arguments, [job], dtype), "host", job.shapes, dtype)
        for name in arguments.shapes:
            for shapes in lists(name, arguments.elements):
                work = jobs(arguments, name, shapes, dtype)
                add(measure(arguments, work, f"{name} {dtype}"), name, shapes, dtype)
    for path in (arguments.csv, arguments.json):
        if path:
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
