"""A linear layer's weight gradient: made and then added, against one GEMM that adds it; both timed whole.

    python -m benchmarks.weight_gradients [--device cpu|cuda] [--csv FILE]

Per shape and number of tokens: the product in the operands' dtype and then the accumulate op, as for a weight that is
not fused; every GEMM with beta = 1 that the machine has; and which of them is chosen. A window has many layers, so each
call takes the next of several weights in one flat buffer, as many as do not fit into the last-level cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

import accumkernels as ak
import accumkernels.ops.products as products
from accumkernels import ops
from accumkernels.ops import native

from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES
from .harness.machine import environment
from .harness.measure import Timer, last_level_cache_bytes, median_and_spread, milliseconds
from .harness.results import Row, write_csv
from .harness.tables import Table, track

SHAPES = ((768, 768), (2304, 768), (3072, 768), (768, 3072), (50257, 768), (1024, 4096), (512, 512))
TOKENS = (8, 32, 64, 256, 1024)
SEPARATE = "product, then accumulate"
COLUMNS = (
    *("dtype", "device", "rows", "columns", "tokens", "way", "chosen", "ms_median", "ms_p10", "ms_p90", "to_separate"),
    *("samples", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


def ways(dtype: torch.dtype, device: torch.device) -> dict[str, products.Gemm]:
    """The GEMMs with beta = 1 of this machine, by what they are called in the table."""
    if dtype == torch.float32:
        own = device.type == "cpu" and native.multiplies(dtype)
        return {"addmm": products.same_dtype} | ({"accumkernels": products.native} if own else {})
    if device.type == "cuda":
        return {"addmm(out_dtype=float32)": products.widening}
    found = {"addmm of widened operands": products.widened}
    if products.mkl_gemm(dtype) is not None:
        found["MKL"] = products.mkl
    if dtype == torch.bfloat16 and native.multiplies(dtype):
        found["accumkernels"] = products.native
    return found


def prepare(
    rows: int, columns: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Callable[[int], None], bool]]:
    """By way, a call that adds the i-th gradient, and whether the way is the one that is chosen."""
    count = max(2, 2 * last_level_cache_bytes(device) // (4 * rows * columns)) if rows * columns < 2**24 else 2
    count = min(count, 64)
    weights = nn.ParameterList(torch.empty(rows, columns, device=device) for _ in range(count))
    accumulator = ak.FusedAccumulator(weights, fuse_weight_gradients=False)
    views = [accumulator.main_grad(weight) for weight in weights]  # on the pages that a model's have
    generator = torch.Generator(device).manual_seed(0)
    grad = torch.randn(tokens, rows, device=device, generator=generator).to(dtype)
    input = torch.randn(tokens, columns, device=device, generator=generator).to(dtype)
    state = torch.zeros(4, dtype=torch.float64, device=device)
    layout_host = torch.tensor([[0, rows * columns]])
    layout = layout_host.to(device)

    accumulate = ops.select("native", device).accumulate_

    def separate(i: int) -> None:
        accumulate(
            views[i % count].view(-1), state, [grad.t().mm(input)], [0], [False], layout, layout_host, count=False
        )

    def one(add: products.Gemm) -> Callable[[int], None]:
        return lambda i: add(views[i % count], grad, input, 1.0, 1.0)

    chosen = products.choose(views[0], dtype, tokens)
    found = {SEPARATE: (separate, chosen is None)}
    return found | {name: (one(add), add is chosen) for name, add in ways(dtype, device).items()}


def measure(
    rows: int, columns: int, tokens: int, dtype: str, device: torch.device, repetitions: int, about: Row
) -> list[Row]:
    """A row per way; they take turns."""
    timer = Timer(device)
    calls = prepare(rows, columns, tokens, DTYPES[dtype], device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(len(names) * (repetitions + 1)):
        repetition, turn = divmod(i, len(names))
        name = names[(repetition + turn) % len(names)]  # nobody always comes after the same one
        call = calls[name][0]
        taken = timer(lambda call=call, i=i: call(i))  # i: a weight that no other way has just brought into the caches
        if repetition:  # the first warms up
            seconds[name].append(taken)
    found: list[Row] = []
    separate = median_and_spread(seconds[SEPARATE])[0]
    for name, (_, chosen) in calls.items():
        to_separate = median_and_spread(seconds[name])[0] / separate
        row: Row = {"dtype": dtype, "rows": rows, "columns": columns, "tokens": tokens, "way": name, **about}
        row |= milliseconds(seconds[name])
        row |= {"chosen": "yes" if chosen else "", "to_separate": float(f"{to_separate:.3g}"), "samples": repetitions}
        found.append({column: row.get(column) for column in COLUMNS})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16,fp16,fp32", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--shapes", default=",".join(f"{r}x{c}" for r, c in SHAPES), help="rows x columns of weights")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="of a micro-batch")
    parser.add_argument("--repetitions", type=int, default=25)
    arguments = parser.parse_args(argv)
    dtypes = listed(parser, "dtype", arguments.dtype, DTYPES)
    device = usable(arguments.device, arguments.threads)
    about = environment(device)
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    rows: list[Row] = []
    for dtype in dtypes:
        cases = [(r, c, t) for r, c in shapes for t in map(int, arguments.tokens.split(","))]
        group: list[Row] = []
        for r, c, tokens in track(cases, dtype):
            group += measure(r, c, tokens, dtype, device, arguments.repetitions, about)
        rows += group
        write_csv(arguments.csv, rows)
        table = Table(f"weight gradients, {dtype}, {about['device']}", ("weight", "tokens", "way", "ms", "to separate"))
        for row in group:
            way = f"{row['way']} *" if row["chosen"] else row["way"]
            table.add(f"{row['rows']} x {row['columns']}", row["tokens"], way, row["ms_median"], row["to_separate"])
        table.print()
    print("* chosen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
