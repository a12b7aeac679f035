"""What a whole window costs the host: stock's loop beside FusedAccumulator's, for models of few and many parameters.

    python -m benchmarks.host [--parameters 4,24,150,1500] [--accumulate] [--csv FILE]

A window is four micro-batches of an MLP of `Linear(16, 16)`, so small that what is measured is the work around the
arithmetic. Process time on one thread of the CPU; the loops take turns, and a turn begins with a window that is not
timed, since a loop that trains is not interrupted by others. Each row is a set-up with and without GradScaler,
autocast and clipping. Two more rows for each model are of one `acc.accumulate()` alone, with a GradScaler,
and of a list of its parameters' `.grad`s, which any way of adding them up needs; `--accumulate` measures these alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import accumkernels as ak

from .harness.arguments import usable
from .harness.machine import environment
from .harness.measure import median_and_spread, milliseconds
from .harness.results import Row, write_csv
from .harness.tables import Table, track

MICRO_BATCHES = 4
WIDTH = 16
RELEASES = ("auto", "microbatch", "backward")
COLUMNS = (
    *("parameters", "scaler", "autocast", "clip", "method", "device", "ms_median", "ms_p10", "ms_p90"),
    "ratio_to_stock",
    *("samples", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class SetUp(NamedTuple):
    """What a loop does beside forward, backward and step."""

    scaler: bool
    autocast: bool
    clip: bool


SETUPS = (
    SetUp(True, False, True),
    SetUp(False, False, True),
    SetUp(False, False, False),
    SetUp(True, True, True),
)


def loop(parameters: int, setup: SetUp, release: str | None) -> Callable[[], None]:
    """A window, with `release` of FusedAccumulator, or None for stock's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=setup.scaler)
    acc = None if release is None else ak.FusedAccumulator(model, scaler=scaler, release=release)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = [torch.randn(4, WIDTH) for _ in range(MICRO_BATCHES)]
    max_norm = 1.0 if setup.clip else None

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if setup.autocast else contextlib.nullcontext():
            return model(x).float().square().mean()

    def stock() -> None:
        for x in batches:
            scaler.scale(loss(x) / MICRO_BATCHES).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def fused() -> None:
        assert acc is not None
        for x in batches:
            acc.backward(loss(x))
        acc.step(optimizer, max_norm=max_norm)

    return stock if acc is None else fused


def measure(parameters: int, setup: SetUp, repetitions: int, about: Row) -> list[Row]:
    """A row for stock and one for each way of releasing gradients."""
    names = {"stock": None, **{f'FusedAccumulator, release="{release}"': release for release in RELEASES}}
    loops = {name: loop(parameters, setup, release) for name, release in names.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for repetition in range(repetitions + 3):
        for name, window in loops.items():
            window()
            start = time.process_time()
            window()
            elapsed = time.process_time() - start
            if repetition >= 3:  # the first ones warm up
                seconds[name].append(elapsed)
    stock = median_and_spread(seconds["stock"])[0]
    rows = []
    for name, found in seconds.items():
        row: Row = {"parameters": parameters, **setup._asdict(), "method": name, "samples": repetitions, **about}
        row.update(milliseconds(found))
        row["ratio_to_stock"] = float(f"{median_and_spread(found)[0] / stock:.3g}")
        rows.append({column: row.get(column) for column in COLUMNS})
    return rows


def measure_accumulate(parameters: int, repetitions: int, about: Row) -> list[Row]:
    """A row for `acc.accumulate()` inside a window, and one for reading every `.grad`."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    acc = ak.FusedAccumulator(model, scaler=scaler)
    params = list(model.parameters())
    seconds: dict[str, list[float]] = {"acc.accumulate()": [], "reading .grad": []}
    for repetition in range(20 * repetitions + 3):
        # Kept until the clock stands: every loop frees gradients somewhere.
        grads = [torch.ones_like(p) for p in params]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        start = time.process_time()
        [p.grad for p in params]
        read = time.process_time()
        acc.accumulate()
        end = time.process_time()
        if repetition >= 3:
            seconds["reading .grad"].append(read - start)
            seconds["acc.accumulate()"].append(end - read)
    rows = []
    for name, found in seconds.items():
        row: Row = {"parameters": parameters, "scaler": True, "method": name, "samples": len(found), **about}
        row.update(milliseconds(found))
        rows.append({column: row.get(column) for column in COLUMNS})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", default="4,24,150,1500", help="comma-separated, even numbers")
    parser.add_argument("--accumulate", action="store_true", help="no windows, one accumulate alone")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    counts = [int(count) for count in arguments.parameters.split(",")]
    about = environment(usable("cpu", 1))
    # First, before the windows of all loops have used the heap.
    alone = [row for count in counts for row in measure_accumulate(count, arguments.repetitions, about)]
    rows: list[Row] = []
    windows = [] if arguments.accumulate else [(c, s) for c in counts for s in SETUPS]
    for count, setup in track(windows, "windows"):
        rows += measure(count, setup, arguments.repetitions, about)
    rows += alone
    title = f"Windows of {MICRO_BATCHES} micro-batches, process time on one thread; torch {torch.__version__}"
    table = Table(title, ("method", "parameters", "scaler", "autocast", "clip", "ms", "p10 to p90", "to stock"))
    for r in rows:
        flags = ("" if r[name] is None else "yes" if r[name] else "no" for name in SetUp._fields)
        spread = f"{r['ms_p10']} to {r['ms_p90']}"
        table.add(r["method"], r["parameters"], *flags, r["ms_median"], spread, r["ratio_to_stock"])
    table.print()
    write_csv(arguments.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
