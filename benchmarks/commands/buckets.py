"""What a bucket's size costs: the time of one micro-batch's accumulate, cut into buckets.

    python -m benchmarks.buckets [--device cpu|cuda] [--csv FILE]

With `release="backward"` gradients are added whenever `bucket_bytes` of them are pending. Each bucket is a call of the
op, with its cost on the host and, on a GPU, a launch that has to fill the device; a smaller bucket frees memory
earlier. Measured are the calls alone, on GPT-2's shapes; the sizes take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from accumkernels import ops

from ..harness.arguments import command_line, listed, usable
from ..harness.case import DTYPES, Case
from ..harness.machine import environment
from ..harness.measure import Flush, Timer, median_and_spread, milliseconds
from ..harness.results import Row, write_csv
from ..harness.shapes import lists
from ..harness.tables import Table, track

SIZES = (2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27)
WHOLE = 2**40  # everything at once
COLUMNS = (
    *("dtype", "device", "tensors", "elements", "bucket_MiB", "calls", "ms_median", "ms_p10", "ms_p90"),
    *("ratio_to_one_call", "samples", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python"),
    *("commit", "date"),
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

    accumulate = ops.select("native", case.device).accumulate_

    def add() -> None:
        for grads, segments, overwrite in parts:
            accumulate(
                case.flat,
                state,
                grads,
                segments,
                overwrite,
                case.layout,
                case.layout_host,
                flags=flags,
                loss_scale=scale,
                count=False,
            )

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


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--elements", type=int, help="for quick runs: shrink the list")
    parser.add_argument("--repetitions", type=int, default=30)
    arguments = parser.parse_args(argv)
    dtypes = listed(parser, "dtype", arguments.dtype, DTYPES)
    device = usable(arguments.device, arguments.threads)
    about = environment(device)
    rows: list[Row] = []
    for dtype in dtypes:
        group = measure(dtype, device, arguments.elements, arguments.repetitions, about)
        rows += group
        if arguments.csv:
            write_csv(arguments.csv, rows)
        first = group[0]
        title = f"GPT-2 shapes, {first['elements']:,} elements, {first['dtype']}; torch {first['torch']}"
        table = Table(f"{title}, {first['device']}", ("bucket, MiB", "calls", "ms", "p10 to p90", "to one call"))
        for r in group:
            size = "all at once" if r["bucket_MiB"] is None else f"{r['bucket_MiB']:g}"
            spread = f"{r['ms_p10']} to {r['ms_p90']}"
            table.add(size, r["calls"], r["ms_median"], spread, r["ratio_to_one_call"])
        table.print()
    return 0
