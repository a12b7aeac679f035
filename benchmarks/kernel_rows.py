"""Rows of benchmarks.kernels: what is computed from seconds, and the tables they are printed as."""

from __future__ import annotations

from collections.abc import Sequence

from . import kernel_jobs
from .harness.case import DTYPES
from .harness.measure import median_and_spread
from .harness.results import Row, groups
from .harness.shapes import Shapes, numel
from .harness.tables import Table
from .kernel_jobs import Measured
from .methods import host, limits, peers

COLUMNS = (
    *("table", "shapes", "method", "device", "dtype", "gradients", "micro_batches", "tensors", "elements", "launches"),
    *("ms_median", "ms_p10", "ms_p90", "host_ms", "device_ms", "GB_per_s", "fraction_of_limit", "fraction_of_copy"),
    *("ratio_to_ours", "share_of_step", "tokens", "samples", "unavailable", "threads", "instruction_set", "driver"),
    *("cuda", "triton", "megatron_core", "torch", "python", "commit", "date"),
)


def needed_bytes(table: str, method: str, elements: int, dtype: str, micro_batches: int) -> int | None:
    """What the job (of a limit: the loop) must move: the same for all methods; None where no job is shared."""
    gradient = DTYPES[dtype].itemsize
    if method in limits.NAMES:
        return elements * limits.bytes_per_element(method, DTYPES[dtype])
    if table == "accumulate":
        return elements * (gradient + 8)
    if table == "window":  # the first micro-batch written, the others added, one norm read
        return elements * ((gradient + 4) + (micro_batches - 1) * (gradient + 8) + 4)
    return None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def rows(
    measured: Sequence[Measured],
    name: str,
    shapes: Shapes,
    dtype: str,
    environment: Row,
    tokens: int,
) -> list[Row]:
    """One row per entry of `measured` that is no part of a step, of one list of shapes and one dtype."""
    elements = numel(shapes)
    step = {m.method: m.seconds[0] for m in measured if m.table == "step"}
    medians = {
        (m.table, m.gradients, m.micro_batches, m.method): median_and_spread(m.seconds)[0]
        for m in measured
        if m.seconds
    }

    def rate(m: Measured) -> float | None:
        nbytes = needed_bytes(m.table, m.method, elements, dtype, m.micro_batches)
        return None if nbytes is None or not m.seconds else nbytes / median_and_spread(m.seconds)[0] / 1e9

    loops = [m for m in measured if m.method in limits.NAMES]

    def fraction(m: Measured, names: Sequence[str]) -> float | None:
        """Of the fastest of these loops, with gradients in the same state."""
        best = [rate(loop) or 0.0 for loop in loops if (loop.table, loop.gradients) == (m.table, m.gradients)
                and loop.method in names]  # fmt: skip
        mine = rate(m)
        return mine / max(best) if best and mine is not None else None

    found = []
    for m in measured:
        if m.table == "step":
            continue
        median, p10, p90 = median_and_spread(m.seconds) if m.seconds else (None, None, None)
        base = reference(m)
        ours = medians.get((m.table, m.gradients, m.micro_batches, base))
        products = step.get(kernel_jobs.PRODUCTS, 0.0)
        share = None
        if median is not None and products and m.table in ("accumulate", "window") and m.method not in limits.NAMES:
            rest = m.micro_batches * products + (step[kernel_jobs.OPTIMIZER] if m.table == "window" else 0.0)
            share = median / (median + rest)
        found.append(
            {
                "table": m.table,
                "shapes": name,
                "method": m.method,
                "dtype": dtype,
                "gradients": m.gradients,
                "micro_batches": m.micro_batches or None,
                "tensors": len(shapes),
                "elements": elements,
                "launches": m.launches,
                "ms_median": _rounded(None if median is None else median * 1e3),
                "ms_p10": _rounded(None if p10 is None else p10 * 1e3),
                "ms_p90": _rounded(None if p90 is None else p90 * 1e3),
                "host_ms": _rounded(None if m.host is None else m.host * 1e3),
                "device_ms": _rounded(None if m.device is None else m.device * 1e3),
                "GB_per_s": _rounded(rate(m)),
                "fraction_of_limit": _rounded(fraction(m, limits.NAMES), 3),
                "fraction_of_copy": _rounded(fraction(m, (limits.COPY,)), 3),
                "ratio_to_ours": _rounded(median / ours if ours and median is not None else None, 3),
                "share_of_step": _rounded(share, 3),
                "tokens": tokens if share is not None or m.table == "other jobs" else None,
                "samples": len(m.seconds),
                "unavailable": m.unavailable,
                **environment,
            }
        )
    return [{column: row.get(column) for column in COLUMNS} for row in found]


def reference(m: Measured) -> str:
    """The method that `ratio_to_ours` refers to; the jobs that are no peers have none."""
    if m.table == "other jobs" or (m.table == "window" and m.method in limits.NAMES):
        return ""
    return host.ACCUMULATE if m.table == "host" else peers.OURS


_HEADERS = {
    "launches": "launches",
    "ms_median": "ms",
    "spread": "p10 to p90",
    "host_ms": "host ms",
    "device_ms": "device ms",
    "GB_per_s": "GB/s",
    "fraction_of_limit": "of the limit",
    "fraction_of_copy": "of the copy",
    "ratio_to_ours": "ratio to ours",
    "share_of_step": "of a step",
}
_TITLES = {
    "accumulate": "one accumulate, gradients {gradients}",
    "window": "a whole window of {micro_batches} micro-batches",
    "host": "host time of one call",
    "other jobs": "other jobs, not peers",
}


def show(rows: Sequence[Row]) -> None:
    """A table per question."""
    limits_of_windows = [r for r in rows if r["table"] == "window" and r["micro_batches"] is None]
    for group in groups(rows, "table", "shapes", "dtype", "elements", "gradients", "micro_batches").values():
        first = group[0]
        if first["table"] == "window" and first["micro_batches"] is None:
            continue  # shown with each length
        title = f"{first['shapes']}, {first['dtype']}, {first['tensors']:,} tensors, {first['elements']:,} elements: "
        title += _TITLES[str(first["table"])].format(**first)
        title += f"; {first['threads']} threads, torch {first['torch']}, {first['device']}"
        if first["table"] == "window":
            same = [r for r in limits_of_windows if (r["shapes"], r["dtype"]) == (first["shapes"], first["dtype"])]
            group = [*(r for r in same if r["elements"] == first["elements"]), *group]
        _show_group(title, group)


def _show_group(title: str, group: Sequence[Row]) -> None:
    def cell(row: Row, column: str) -> str:
        if column == "spread":
            return "" if row["ms_p10"] is None else f"{row['ms_p10']:g} to {row['ms_p90']:g}"
        value = row[column]
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    columns = [c for c in _HEADERS if any(cell(row, c) for row in group)]
    table = Table(title, ("method", *(_HEADERS[column] for column in columns)))
    for row in group:
        name = str(row["method"]) + (f" (not available: {row['unavailable']})" if row["unavailable"] else "")
        table.add(name, *(cell(row, column) for column in columns))
    table.print()
    if group[0]["table"] == "accumulate":
        verdict = summary(group)
        if verdict:
            print(verdict, flush=True)


def summary(group: Sequence[Row]) -> str:
    """What a table of one accumulate says, in a sentence; empty without ours."""
    row = {str(r["method"]): r for r in group}
    if peers.OURS not in row:
        return ""
    text = f"accumkernels: {row[peers.OURS]['fraction_of_limit']} of the limit"
    eager = [name for name in row if name in peers.PEERS and name not in peers.NOT_EAGER]
    if eager:
        best = min(eager, key=lambda name: float(str(row[name]["ms_median"])))
        text += f"; {row[best]['ratio_to_ours']} times as fast as eager torch's best ({best})"
    for name in (peers.KEPT, peers.COMPILED):
        if name in row:
            text += f"; {row[name]['ratio_to_ours']} times as fast as {name}"
    return text + "."
