"""What a user gets: tokens per second and peak memory of training a GPT, end to end.

    python -m benchmarks.training [--device cpu|cuda] [--dtype bf16,fp16] [--csv FILE]

On a GPU it is GPT-2 124M, on the CPU the demo's small model (`--model` says otherwise). Every method trains on the same
random tokens, in windows of 1, 2, 4 and 8 micro-batches, with clipping and fused AdamW; each takes turns with stock's
loop, window by window. Peak memory is that of a method alone, weights and optimizer state included. A method that this
version of accumkernels does not have is listed with what its constructor says.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES
from .harness.live_storages import LiveStorages
from .harness.machine import environment
from .harness.measure import median_and_spread, milliseconds, take_turns
from .harness.results import Row, groups, write_csv, write_json
from .harness.tables import Table, progress
from .methods.training import METHODS, SIZES, STOCK, Batch, Method, Size, batches, build

COLUMNS = (
    *("model", "parameters", "method", "device", "dtype", "micro_batches", "tokens_per_micro_batch"),
    *("tokens_per_second", "ms_median", "ms_p10", "ms_p90", "peak_MB", "speed_to_stock", "memory_to_stock", "windows"),
    *("fused", "in_16_bits", "graphs", "unavailable", "threads", "instruction_set", "driver", "cuda", "triton"),
    *("torch", "python", "commit", "date"),
)


class Result(NamedTuple):
    """What was measured of a method."""

    seconds: list[float]  # of each window
    stock: list[float]  # of the windows of stock's loop that it took turns with
    peak: int | None  # in bytes
    ways: dict[str, float]  # see `Loop.ways`
    graphs: int  # compiled in all windows


def refusal(method: Method, dtype: torch.dtype, device: torch.device) -> str | None:
    """What a method's constructor has against it; None where it works."""
    try:
        build(method, SIZES["tiny"].model, dtype, device)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None


def peak_bytes(
    method: Method, size: Size, dtype: torch.dtype, device: torch.device, data: list[Batch], compiled: bool
) -> int | None:
    """Peak of two windows (the optimizer's state exists from the second on), the model included, the data not.

    Returns:
        None of a compiled model on the CPU, whose allocations nobody counts.
    """
    if compiled and device.type != "cuda":
        return None

    def train() -> None:
        loop = build(method, size.model, dtype, device, compiled)
        for _ in range(2):
            loop.window(data)

    gc.collect()
    if device.type != "cuda":  # the storages alive after each op are added up
        live = LiveStorages()
        before = live.add(tensor for batch in data for tensor in batch)
        with live:
            train()
        return live.peak - before
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    train()
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    micro_batches: int,
    windows: int,
    methods: Sequence[Method] = METHODS,
    compiled: bool = False,
) -> dict[str, Result | str]:
    """Per method the seconds of each window and the peak in bytes; or why it is not available."""
    data = batches(size, micro_batches, device)
    found: dict[str, Result | str] = {}
    peaks: dict[str, int | None] = {}
    for method in methods:
        progress(f"{micro_batches} micro-batches: memory, {method.name}")
        cause = refusal(method, dtype, device)
        if cause is None:
            peaks[method.name] = peak_bytes(method, size, dtype, device, data, compiled)
        else:
            found[method.name] = cause
    for method in methods:
        if method.name not in peaks or method.name == STOCK:
            continue
        # Alone beside stock's loop: what any other holds or looks for would be in the times.
        loops = {m.name: build(m, size.model, dtype, device, compiled) for m in (methods[0], method)}
        calls = {name: functools.partial(loop.window, data) for name, loop in loops.items()}
        seconds, graphs = take_turns(calls, device, windows, f"{micro_batches} micro-batches, {method.name}: window")
        peak, ways = peaks[method.name], loops[method.name].ways()
        found[method.name] = Result(seconds[method.name], seconds[STOCK], peak, ways, graphs[method.name])
        if STOCK not in found:
            found[STOCK] = Result(seconds[STOCK], seconds[STOCK], peaks[STOCK], loops[STOCK].ways(), graphs[STOCK])
        del loops, calls
        gc.collect()
    progress("")
    return {m.name: found[m.name] for m in methods if m.name in found}


def rows(
    results: dict[str, Result | str],
    model: str,
    size: Size,
    dtype: str,
    micro_batches: int,
    about: Row,
    compiled: bool = False,
) -> list[Row]:
    """One per method."""
    label = f"{model}, torch.compile" if compiled else model
    common = {"model": label, "parameters": size.parameters, "dtype": dtype, **about}
    common["tokens_per_micro_batch"] = size.tokens
    found = []
    stock = results[STOCK]
    assert not isinstance(stock, str)
    for name, result in results.items():
        row: Row = {**common, "method": name, "micro_batches": micro_batches}
        if isinstance(result, str):
            row["unavailable"] = result
        else:
            seconds, beside, peak, ways, graphs = result
            median = median_and_spread(seconds)[0]
            row["tokens_per_second"] = float(f"{micro_batches * size.tokens / median:.4g}")
            row.update(milliseconds(seconds))
            if peak is not None and stock.peak is not None:
                row["peak_MB"] = float(f"{peak / 1e6:.5g}")
                row["memory_to_stock"] = float(f"{peak / stock.peak:.3f}")
            row["speed_to_stock"] = float(f"{median_and_spread(beside)[0] / median:.3f}")
            row["windows"] = len(seconds)
            row.update((way, float(f"{part:.4f}")) for way, part in ways.items())
            row["graphs"] = graphs if compiled else None
        found.append({column: row.get(column) for column in COLUMNS})
    return found


def show(table_rows: Sequence[Row]) -> None:
    """A table per dtype and length of windows."""
    for group in groups(table_rows, "model", "dtype", "micro_batches").values():
        first = group[0]
        title = f"{first['model']}, {first['parameters']:,} parameters, {first['dtype']}, {first['micro_batches']} "
        title += f"micro-batches of {first['tokens_per_micro_batch']} tokens; torch {first['torch']}, {first['device']}"
        headers = ("method", "tokens/s", "ms a window", "p10 to p90", "to stock", "peak MB", "to stock")
        table = Table(title, (*headers, "fused", "in 16 bits"))
        for r in group:
            if r["unavailable"]:
                continue
            spread = f"{r['ms_p10']:g} to {r['ms_p90']:g}"
            cells = (f"{r['tokens_per_second']:,.0f}", r["ms_median"], spread, r["speed_to_stock"], r["peak_MB"])
            table.add(r["method"], *cells, r["memory_to_stock"], r["fused"], r["in_16_bits"])
        table.print()
        for r in group:
            if r["unavailable"]:
                print(f"{r['method']}: not available: {r['unavailable']}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16", help="comma-separated: bf16, fp16 (default: bf16)")
    parser.add_argument("--model", choices=list(SIZES), help="default: gpt2 on a GPU, small on the CPU")
    parser.add_argument("--tokens", type=int, help="of a micro-batch, which is one sample then")
    parser.add_argument("--micro-batches", default="1,2,4,8")
    parser.add_argument("--methods", default="", help="comma-separated parts of names: only these methods, and stock")
    parser.add_argument("--compile", action="store_true", help="the model is compiled by torch.compile")
    parser.add_argument("--windows", type=int, default=20, help="timed, per method")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    dtypes = listed(parser, "dtype", arguments.dtype, ("bf16", "fp16"))
    device = usable(arguments.device, arguments.threads)
    model = arguments.model or ("gpt2" if arguments.device == "cuda" else "small")
    wanted = arguments.methods.split(",")
    methods = [m for m in METHODS if m.name == STOCK or any(part in m.name for part in wanted)]
    about = environment(device)
    size = SIZES[model]
    if arguments.tokens is not None:
        size = size._replace(length=arguments.tokens, samples=1)
    found: list[Row] = []
    for dtype in dtypes:
        for micro_batches in map(int, arguments.micro_batches.split(",")):
            compiled = arguments.compile
            results = measure(size, DTYPES[dtype], device, micro_batches, arguments.windows, methods, compiled)
            added = rows(results, model, size, dtype, micro_batches, about, compiled)
            show(added)
            found += added
            write_csv(arguments.csv, found)
            write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
