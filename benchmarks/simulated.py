"""What data parallel windows send on thousands of ranks: benchmarks.ranks --simulate.

Nothing is sent: one process is rank 0 of 2 to 16,384 under torch's fake process group, whose peers are taken to be like
it (methods/simulated.py). Recorded are the collectives of a window in their order, their number and bytes, and the
process time of the host. The time on a link is a model: alpha seconds per message and hop of a tree, and bytes over a
rate; for the model that was recorded, and for one of 10^9 parameters, whose gradients and parameters are as many times
larger, in as many messages. Megatron's distributed optimizer is not run, but taken from its documentation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from .harness.arguments import usable
from .harness.machine import environment
from .harness.measure import median_and_spread
from .harness.results import Row, groups
from .harness.tables import Table, track
from .methods.simulated import (
    ALPHA,
    MEGATRON,
    MOST_SHARDED,
    RATE,
    RECORDED,
    SHARDED,
    Sent,
    Simulated,
    megatron,
    model,
    parameters_of,
    simulate,
)

RANKS = (2, 64, 1024, 16384)
LARGE = 10**9  # parameters
COLUMNS = (
    *("method", "source", "ranks", "micro_batches", "parameters", "when", "kind", "holds", "collectives", "bytes"),
    *("sent_bytes", "link_ms", "link_ms_1e9", "window_host_ms", "end_host_ms", "windows", "alpha_us", "rate_GB_per_s"),
    *("device", "instruction_set", "torch", "python", "commit", "date"),
)


def rows_of(
    name: str, source: str, ranks: int, micro_batches: int, parameters: int, found: Simulated, about: Row
) -> list[Row]:
    """A row for each kind of collective in each part of a window, in their order; host times are in the first."""
    rows = []
    for number, sent in enumerate(found.sent):
        row: Row = {
            **about,
            **{"method": name, "source": source, "ranks": ranks, "micro_batches": micro_batches},
            **{"parameters": parameters, "when": sent.when, "kind": sent.kind, "holds": sent.holds},
            **{"collectives": sent.count, "bytes": sent.nbytes, "sent_bytes": round(sent.wire(ranks))},
            **{"alpha_us": ALPHA * 1e6, "rate_GB_per_s": RATE / 1e9, "windows": len(found.window_seconds)},
            "link_ms": float(f"{sent.seconds(ranks) * 1e3:.3g}"),
            "link_ms_1e9": float(f"{_larger(sent, parameters).seconds(ranks) * 1e3:.3g}"),
        }
        if number == 0 and found.window_seconds:
            row["window_host_ms"] = float(f"{median_and_spread(found.window_seconds)[0] * 1e3:.4g}")
            row["end_host_ms"] = float(f"{median_and_spread(found.end_seconds)[0] * 1e3:.4g}")
        rows.append({column: row.get(column) for column in COLUMNS})
    return rows


def _larger(sent: Sent, parameters: int) -> Sent:
    """The same of the large model."""
    return sent if sent.holds == "agreement" else sent._replace(nbytes=round(sent.nbytes * LARGE / parameters))


def measure(ranks: Sequence[int], micro_batches: int, windows: int) -> list[Row]:
    """All methods on all numbers of ranks."""
    about = environment(usable("cpu", 1))
    parameters = parameters_of(model())
    rows: list[Row] = []
    for name, count in track([(n, c) for n in RECORDED for c in ranks], "windows"):
        padded = name in SHARDED and count > MOST_SHARDED
        found = simulate(min(count, MOST_SHARDED) if padded else count, name, micro_batches, windows)
        if padded:
            found = Simulated(found.sent, [], [])
        source = f"recorded on {MOST_SHARDED}" if padded else "recorded"
        rows += rows_of(name, source, count, micro_batches, parameters, found, about)
    for count in ranks:
        found = Simulated(megatron(parameters), [], [])
        rows += rows_of(MEGATRON, "documentation", count, micro_batches, parameters, found, about)
    return rows


def show(rows: Sequence[Row]) -> None:
    """A table per number of ranks."""
    for (count,), of_count in groups(rows, "ranks").items():
        first = of_count[0]
        title = f"{count} ranks, simulated: a window of {first['micro_batches']} micro-batches, "
        title += f"{first['parameters']:,} parameters; torch {torch.__version__}"
        headers = ("method", "when", "what", "collectives", "bytes sent", "link, ms", "of 1e9, ms")
        headers += ("host, ms", "its end")
        table = Table(title, headers)
        for r in of_count:
            host = ["" if r[key] is None else f"{r[key]:g}" for key in ("window_host_ms", "end_host_ms")]
            what = f"{r['kind']} of {r['holds']}"
            numbers = (f"{r['collectives']}", f"{r['sent_bytes']:,}", f"{r['link_ms']:g}", f"{r['link_ms_1e9']:g}")
            table.add(str(r["method"]), str(r["when"]), what, *numbers, *host)
        table.print()


def measured(arguments: argparse.Namespace) -> list[Row]:
    """What `benchmarks.ranks --simulate` does; returns the rows."""
    ranks = [int(count) for count in arguments.ranks.split(",")] if arguments.ranks else list(RANKS)
    rows = [
        row
        for count in map(int, arguments.micro_batches.split(","))
        for row in measure(ranks, count, arguments.windows)
    ]
    show(rows)
    return rows
