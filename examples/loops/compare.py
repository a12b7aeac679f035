"""Runs a stock loop and the swapped one, and prints what differs: lines, losses, time and memory."""

from __future__ import annotations

import difflib
import gc
import inspect
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from accumkernels.splitting.memory import LiveBytes, format_bytes

Loop = Callable[[], Iterator[float]]


class Run(NamedTuple):
    """One loop's losses, one for each update, its seconds and the most bytes of tensors that were alive."""

    losses: list[float]
    seconds: float
    peak: int


def run(loop: Loop) -> Run:
    """Train from the seed, after a warm-up; on a CPU once more, uncompiled, to count bytes op by op."""
    list(loop())
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    start = time.perf_counter()
    losses = list(loop())
    seconds = time.perf_counter() - start
    if torch.cuda.is_available():
        return Run(losses, seconds, torch.cuda.max_memory_allocated())
    torch.manual_seed(0)
    with LiveBytes() as live, torch.compiler.set_stance("force_eager"):
        list(loop())
    return Run(losses, seconds, live.peak)


def difference(stock: Loop, swapped: Loop) -> list[str]:
    """Both loops as one diff with all of their lines, both called `train`; docstrings are left out."""
    sides = []
    for loop in (stock, swapped):
        head, _, *body = inspect.getsource(loop).splitlines()
        sides.append([head.replace(loop.__name__, "train"), *body])
    return list(difflib.unified_diff(*sides, lineterm="", n=len(sides[0])))[3:]  # without the names of files


def compare(stock: Loop, swapped: Loop) -> int:
    """Print the comparison; the exit status is 1 where a loss differs by more than 1e-5."""
    lines = [line for line in difference(stock, swapped) if line[0] != " "]
    print("\n".join(lines))
    print(f"{sum(line[0] == '-' for line in lines)} lines go, {sum(line[0] == '+' for line in lines)} come\n")

    runs = [run(loop) for loop in (stock, swapped)]
    print("update       stock     swapped  difference")
    differences = [abs(a - b) for a, b in zip(*(r.losses for r in runs), strict=True)]
    for index, (a, b, d) in enumerate(zip(runs[0].losses, runs[1].losses, differences, strict=True), 1):
        print(f"{index:6}  {a:10.6f}  {b:10.6f}  {d:10.1e}")
    for name, done in zip(("stock", "swapped"), runs, strict=True):
        print(f"{name:8} {done.seconds:6.2f} s, at most {format_bytes(done.peak)} of tensors")
    print(f"largest difference of a loss: {max(differences):.1e}")
    return int(max(differences) > 1e-5)
