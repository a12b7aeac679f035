"""Data parallel windows over an emulated link: what is hidden behind backward, against DistributedDataParallel.

    python -m benchmarks.link [--host waits,"runs ahead"] [--micro-batches 1,2,4] [--reduction 0.5,1] [--csv FILE]

Computing and the link are sleeps (methods/link.py), so that two ranks on one machine behave as two devices with a slow
link between them. The host waits for the device, as on a CPU, which is both; or it runs ahead, as of a GPU. `reduction`
is what a reduction takes on the link, as a share of a micro-batch's backward. Methods take turns, window by window, a
window takes as long as its slowest rank, and a ratio is that of two windows of the same turn. It is the schedule that
is measured, not a device: bytes moved by the host are real, but few.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .harness.machine import environment
from .harness.measure import median_and_spread, milliseconds
from .harness.processes import free_ports, start
from .harness.results import Row, groups, write_csv
from .harness.tables import Table
from .methods.link import BACKWARD, BYTES, LAYERS, METHODS, NO_SYNC, Device, Link, Window, chunks_over

COLUMNS = (
    *("method", "ranks", "host", "micro_batches", "reduction", "ms_median", "ms_p10", "ms_p90"),
    *("ratio_to_no_sync", "ratio_p10", "ratio_p90", "windows"),
    *("device", "instruction_set", "torch", "python", "commit", "date"),
)
RANKS = 2
HOSTS = ("waits", "runs ahead")  # of the device


def _rank(
    rank: int, port: int, counts: list[int], ahead: bool, reduction: float, windows: int
) -> dict[tuple[int, str], list[float]]:
    """One process: every method, in turns."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, timedelta(minutes=5), world_size=RANKS, rank=rank)
    link = Link(BYTES / (reduction * BACKWARD * LAYERS), Device(ahead))
    with chunks_over(link):
        seconds = _windows(link.device, {name: method(link) for name, method in METHODS.items()}, counts, windows)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def _windows(
    device: Device, built: dict[str, Window], counts: list[int], windows: int
) -> dict[tuple[int, str], list[float]]:
    """Seconds of each method's windows, in turns."""
    for window in built.values():
        for count in (2, 2, 2):  # DistributedDataParallel learns the order of gradients in the first
            window(count)
            device.wait()
    seconds: dict[tuple[int, str], list[float]] = {(count, name): [] for count in counts for name in built}
    for _ in range(windows):
        for (count, name), measured in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            built[name](count)
            device.wait()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            measured.append(slowest.item())
    return seconds


def measure(host: str, counts: list[int], reduction: float, windows: int, about: Row) -> list[Row]:
    """A row per method and number of micro-batches."""
    seconds, *_ = start(_rank, (*free_ports(1), counts, host == HOSTS[1], reduction, windows), RANKS)
    found = []
    for (count, name), samples in seconds.items():
        ratios = [s / stock for s, stock in zip(samples, seconds[count, NO_SYNC], strict=True)]
        ratio, ratio_p10, ratio_p90 = (float(f"{r:.3f}") for r in median_and_spread(ratios))
        row: Row = {
            **about,
            **{"method": name, "ranks": RANKS, "host": host, "micro_batches": count, "reduction": reduction},
            **milliseconds(samples),
            "windows": len(samples),
            **{"ratio_to_no_sync": ratio, "ratio_p10": ratio_p10, "ratio_p90": ratio_p90},
        }
        found.append({column: row.get(column) for column in COLUMNS})
    return found


def show(rows: Sequence[Row]) -> None:
    """A table per host, speed of the link and number of micro-batches."""
    for group in groups(rows, "host", "reduction", "micro_batches").values():
        first = group[0]
        title = (
            f"{first['ranks']} ranks, {first['micro_batches']} micro-batches, the host {first['host']}, a reduction "
            f"takes {first['reduction']} of a backward (emulated)"
        )
        table = Table(title, ("method", "ms a window", "p10 to p90", "to no_sync", "its p10 to p90"))
        for r in group:
            spread = f"{r['ms_p10']:g} to {r['ms_p90']:g}"
            of_ratio = f"{r['ratio_p10']:g} to {r['ratio_p90']:g}"
            table.add(str(r["method"]), f"{r['ms_median']:g}", spread, f"{r['ratio_to_no_sync']:g}", of_ratio)
        table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--micro-batches", default="1,2,4", help="per window, comma-separated (default: 1,2,4)")
    parser.add_argument("--reduction", default="0.5,1", help="shares of a backward, comma-separated (default: 0.5,1)")
    parser.add_argument("--host", default=",".join(HOSTS), help='comma-separated (default: "waits,runs ahead")')
    parser.add_argument("--windows", type=int, default=15, help="timed, per method")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    counts = [int(count) for count in arguments.micro_batches.split(",")]
    about = environment(torch.device("cpu"))
    found: list[Row] = []
    hosts = arguments.host.split(",")
    if not set(hosts) <= set(HOSTS):
        parser.error(f"--host must be of {', '.join(HOSTS)}, got {arguments.host!r}")
    for host, reduction in itertools.product(hosts, map(float, arguments.reduction.split(","))):
        added = measure(host, counts, reduction, arguments.windows, about)
        show(added)
        found += added
        write_csv(arguments.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
