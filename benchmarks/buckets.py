"""What a bucket's size costs: the calls that add one micro-batch, or a whole window on a CPU beside stock's loop.

    python -m benchmarks.buckets [--device cpu|cuda] [--csv FILE]
    python -m benchmarks.buckets --windows [12x256,12x512,24x768] [--csv FILE]

With `release="backward"` gradients are added whenever `bucket_bytes` of them are pending. Each bucket is a call of the
op, with its cost on the host and, on a GPU, a launch that has to fill the device; a smaller bucket frees memory
earlier. By default the calls alone are measured, on GPT-2's shapes; the sizes take turns.

With `--windows` a window is four micro-batches of 32 samples of an MLP of square layers, clipped, with fused AdamW in
fp32. What it is about is pages that the C library gives back to the system and that are made anew in the next backward:
they are counted (minor page faults), beside process time on one thread. Each loop has a process of its own, since
others would change the state of its heap, and the least of `--processes` is kept.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import accumkernels as ak
from accumkernels import ops

from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES, Case
from .harness.machine import environment
from .harness.measure import Flush, Timer, median_and_spread, milliseconds
from .harness.processes import in_new_process
from .harness.results import Row, write_csv
from .harness.shapes import lists
from .harness.tables import Table, track

SIZES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
WHOLE = 2**40  # everything at once
_ABOUT = ("samples", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date")
COLUMNS = (
    *("dtype", "device", "tensors", "elements", "bucket_MiB", "calls", "ms_median", "ms_p10", "ms_p90"),
    *("ratio_to_one_call", *_ABOUT),
)

# Of windows.
MICRO_BATCHES = 4
SAMPLES = 32
MODELS = "12x256,12x384,12x512,24x768"
STOCK, DEFAULT, WHOLE_MICRO_BATCHES = "stock", "default", "whole micro-batches"
WINDOW_SIZES = (2**20, 2**22, 2**23, 2**25)
WINDOW_COLUMNS = (
    *("layers", "width", "gradients_MiB", "method", "bucket_MiB", "device", "page_faults", "ms_median", "ms_p10"),
    *("ms_p90", "ratio_to_stock", *_ABOUT),
)


def buckets(case: Case, nbytes: int) -> list[list[int]]:
    """Indices of the gradients, cut as backward would fill buckets of `nbytes`."""
    found: list[list[int]] = [[]]
    pending = 0
    for index, grad in enumerate(case.grads):
        found[-1].append(index)
        pending += grad.nbytes
        if pending >= nbytes:
            found.append([])
            pending = 0
    return [bucket for bucket in found if bucket]


def prepare(case: Case, nbytes: int) -> tuple[Callable[[], None], int]:
    """A call that adds all gradients bucket by bucket; and the number of buckets."""
    state = torch.zeros(4, dtype=torch.float64, device=case.device)
    flags = torch.zeros(len(case.grads), dtype=torch.int32, device=case.device)
    scale = torch.tensor(1.0, device=case.device)
    parts = [([case.grads[i] for i in part], part, [False] * len(part)) for part in buckets(case, nbytes)]
    layout = case.layout, case.layout_host

    accumulate = ops.select("native", case.device).accumulate_

    def add() -> None:
        for given in parts:
            accumulate(case.flat, state, *given, *layout, flags=flags, loss_scale=scale, count=False)

    return add, len(parts)


def measure(dtype: str, device: torch.device, elements: int | None, repetitions: int, about: Row) -> list[Row]:
    """A row per size of bucket, from the smallest up to all at once."""
    case = Case(lists("gpt2", elements)[0], DTYPES[dtype], device)
    timer, flush = Timer(device), Flush(device)
    calls = {nbytes: prepare(case, nbytes) for nbytes in (*SIZES, WHOLE)}
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in calls}
    for repetition in track(range(repetitions + 1), dtype):
        for nbytes, (add, _) in calls.items():
            taken = timer(add, before=flush)
            if repetition:  # the first warms up
                seconds[nbytes].append(taken)
    whole = median_and_spread(seconds[WHOLE])[0]
    found = []
    for nbytes, (_, count) in calls.items():
        row: Row = {"dtype": dtype, "tensors": len(case.grads), "elements": case.numel, "calls": count, **about}
        row["bucket_MiB"] = None if nbytes == WHOLE else nbytes / 2**20
        row.update(milliseconds(seconds[nbytes]))
        row["ratio_to_one_call"] = float(f"{median_and_spread(seconds[nbytes])[0] / whole:.3g}")
        row["samples"] = repetitions
        found.append({column: row.get(column) for column in COLUMNS})
    return found


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
        release="microbatch" if method == WHOLE_MICRO_BATCHES else "auto",
        bucket_bytes=method if isinstance(method, int) else None,
        fuse_weight_gradients=False,
    )

    def fused() -> None:
        for x in batches:
            acc.backward(model(x).square().mean())
        acc.step(optimizer, max_norm=1.0)

    return fused


def run_windows(layers: int, width: int, method: str | int, repetitions: int) -> tuple[list[float], float]:
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


def measure_windows(layers: int, width: int, repetitions: int, processes: int, about: Row) -> list[Row]:
    """A row for stock, the default, whole micro-batches and each size of bucket."""
    found: dict[str | int, list[tuple[list[float], float]]] = {}
    for _ in range(processes):
        for method in (STOCK, DEFAULT, WHOLE_MICRO_BATCHES, *WINDOW_SIZES):
            found.setdefault(method, []).append(in_new_process(run_windows, layers, width, method, repetitions))
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
        rows.append({column: row.get(column) for column in WINDOW_COLUMNS})
    return rows


def show(rows: list[Row]) -> None:
    """Print the calls of a dtype."""
    first = rows[0]
    title = f"GPT-2 shapes, {first['elements']:,} elements, {first['dtype']}; torch {first['torch']}"
    table = Table(f"{title}, {first['device']}", ("bucket, MiB", "calls", "ms", "p10 to p90", "to one call"))
    for r in rows:
        size = "all at once" if r["bucket_MiB"] is None else f"{r['bucket_MiB']:g}"
        spread = f"{r['ms_p10']} to {r['ms_p90']}"
        table.add(size, r["calls"], r["ms_median"], spread, r["ratio_to_one_call"])
    table.print()


def show_windows(rows: list[Row]) -> None:
    """Print the windows of a model."""
    first = rows[0]
    title = f"{first['layers']} layers of {first['width']}, {first['gradients_MiB']} MiB of gradients"
    title += f", windows of {MICRO_BATCHES} micro-batches, process time on one thread; torch {first['torch']}"
    table = Table(title, ("method", "bucket, MiB", "page faults", "ms", "p10 to p90", "to stock"))
    for r in rows:
        size = "" if r["bucket_MiB"] is None else f"{r['bucket_MiB']:g}"
        spread = f"{r['ms_p10']} to {r['ms_p90']}"
        table.add(r["method"], size, r["page_faults"], r["ms_median"], spread, r["ratio_to_stock"])
    table.print()


def layers_and_width(parser: argparse.ArgumentParser, name: str) -> tuple[int, int]:
    """The MLP of a name like "12x256"."""
    match = re.fullmatch(r"(\d+)x(\d+)", name.strip())
    if match is None:
        parser.error(f"--windows: {name!r} is not like '12x256'")
    return int(match[1]), int(match[2])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16", help=f"of calls: comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--elements", type=int, help="of calls, for quick runs: shrink the list")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument(
        "--windows", nargs="?", const=MODELS, metavar="MODELS", help=f"windows of layers x width (default: {MODELS})"
    )
    parser.add_argument("--processes", type=int, default=3, help="of windows, for each loop (default: 3)")
    arguments = parser.parse_args(argv)
    dtypes = listed(parser, "dtype", arguments.dtype, DTYPES)
    models = [layers_and_width(parser, name) for name in (arguments.windows or "").split(",") if name]
    if models and arguments.device == "cuda":
        parser.error("--windows counts pages of the host's memory: it needs --device cpu")
    device = usable("cpu" if models else arguments.device, 1 if models else arguments.threads)
    about = environment(device)
    rows: list[Row] = []

    def keep(group: list[Row], table: Callable[[list[Row]], None]) -> None:
        rows.extend(group)
        write_csv(arguments.csv, rows)
        table(group)

    for layers, width in track(models, "models"):
        keep(measure_windows(layers, width, arguments.repetitions, arguments.processes, about), show_windows)
    for dtype in () if models else dtypes:
        keep(measure(dtype, device, arguments.elements, arguments.repetitions, about), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
