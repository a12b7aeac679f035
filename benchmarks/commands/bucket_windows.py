"""What a bucket's size does to a whole window on a CPU, beside stock's loop: gradients are freed, and made again.

    python -m benchmarks.bucket_windows [--models 12x256,12x512,24x768] [--csv FILE]

A window is four micro-batches of 32 samples of an MLP of square layers, clipped, with fused AdamW in fp32. What it is
about is pages that the C library gives back to the system and that are made anew in the next backward: they are
counted (minor page faults), beside process time on one thread. Each loop has a process of its own, since others would
change the state of its heap, and the least of `--processes` is kept. `benchmarks.buckets` measures the accumulate calls
alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import accumkernels as ak

from ..harness.arguments import usable
from ..harness.machine import environment
from ..harness.measure import median_and_spread, milliseconds
from ..harness.results import Row, write_csv
from ..harness.tables import Table, track

MICRO_BATCHES = 4
SAMPLES = 32
MODELS = ("12x256", "12x384", "12x512", "24x768")
STOCK, DEFAULT, WHOLE = "stock", "default", "whole micro-batches"
SIZES = (2**20, 2**22, 2**23, 2**25)
COLUMNS = (
    *("layers", "width", "gradients_MiB", "method", "bucket_MiB", "device", "page_faults", "ms_median", "ms_p10"),
    *(
        "ms_p90",
        "ratio_to_stock",
        "samples",
        "threads",
        "instruction_set",
        "driver",
        "cuda",
        "triton",
        "torch",
        "python",
    ),
    *("commit", "date"),
)


def loop(layers: int, width: int, method: str | int) -> Callable[[], None]:
    """A window: stock's, or FusedAccumulator's with a bucket of so many bytes, the default's, or without buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = [torch.randn(SAMPLES, width) for _ in range(MICRO_BATCHES)]

    def stock() -> None:
        for x in batches:
            (model(x).square().mean() / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if method == STOCK:
        return stock
    acc = ak.FusedAccumulator(
        model,
        release="microbatch" if method == WHOLE else "auto",
        bucket_bytes=method if isinstance(method, int) else None,
        fuse_weight_gradients=False,
    )

    def fused() -> None:
        for x in batches:
            acc.backward(model(x).square().mean())
        acc.step(optimizer, max_norm=1.0)

    return fused


def run(layers: int, width: int, method: str | int, repetitions: int) -> tuple[list[float], float]:
    """Seconds of windows, and page faults in one; in a process of its own."""
    torch.set_num_threads(1)
    window = loop(layers, width, method)
    for _ in range(5):  # warm up
        window()
    seconds = []
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repetitions):
        start = time.process_time()
        window()
        seconds.append(time.process_time() - start)
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / repetitions


def measure(layers: int, width: int, repetitions: int, processes: int, about: Row) -> list[Row]:
    """A row for stock, the default, whole micro-batches and each size of bucket."""
    context = multiprocessing.get_context("spawn")
    found: dict[str | int, list[tuple[list[float], float]]] = {}
    for _ in range(processes):
        for method in (STOCK, DEFAULT, WHOLE, *SIZES):
            with context.Pool(1) as pool:
                found.setdefault(method, []).append(pool.apply(run, (layers, width, method, repetitions)))
    best = {method: min(runs, key=lambda taken: median_and_spread(taken[0])[0]) for method, runs in found.items()}
    stock = median_and_spread(best[STOCK][0])[0]
    rows = []
    for method, (seconds, faults) in best.items():
        row: Row = {"layers": layers, "width": width, "samples": repetitions, "page_faults": round(faults), **about}
        row["gradients_MiB"] = float(f"{layers * (width + 1) * width * 4 / 2**20:.3g}")
        row["method"] = "buckets" if isinstance(method, int) else method
        row["bucket_MiB"] = method / 2**20 if isinstance(method, int) else None
        row.update(milliseconds(seconds))
        row["ratio_to_stock"] = float(f"{median_and_spread(seconds)[0] / stock:.3g}")
        rows.append({column: row.get(column) for column in COLUMNS})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, layers x width")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--processes", type=int, default=3, help="for each loop (default: 3)")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    models = []
    for name in arguments.models.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", name.strip())
        if match is None:
            parser.error(f"--models: {name!r} is not like '12x256'")
        models.append((int(match[1]), int(match[2])))
    about = environment(usable("cpu", 1))
    rows: list[Row] = []
    for layers, width in track(models, "models"):
        rows += measure(layers, width, arguments.repetitions, arguments.processes, about)
        if arguments.csv:
            write_csv(arguments.csv, rows)
    title = f"Windows of {MICRO_BATCHES} micro-batches, process time on one thread; torch {torch.__version__}"
    table = Table(
        title, ("model", "gradients, MiB", "method", "bucket, MiB", "page faults", "ms", "p10 to p90", "to stock")
    )
    for r in rows:
        size = "" if r["bucket_MiB"] is None else f"{r['bucket_MiB']:g}"
        spread = f"{r['ms_p10']} to {r['ms_p90']}"
        model = f"{r['layers']} x {r['width']}"
        table.add(
            model, r["gradients_MiB"], r["method"], size, r["page_faults"], r["ms_median"], spread, r["ratio_to_stock"]
        )
    table.print()
    return 0
