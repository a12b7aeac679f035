"""Whether the defaults are ever slower than stock: the step's time over sizes, tokens, dtypes and loss scaling.

    python -m benchmarks.defaults --csv FILE [--models small,gpt2] [--tokens 32,128,512,1024] [--modes bf16,fp32]

A byte-level GPT (GPT-2 124M for `gpt2`) is trained by stock accumulation and by FusedAccumulator with its defaults, on
windows of four micro-batches of one sample. They take turns, and a window's time is held against that of the window
before or after it: the median of these ratios, above 1 where FusedAccumulator is faster, and their quartiles. Rows that
the file has are not measured again, so that a long run may be cut. `--options` also measures `cache_casts` and
other choices of `release` and fusion, which is how the defaults were found.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES
from .harness.machine import environment
from .harness.measure import wall_seconds
from .harness.results import Row, read_csv, write_csv
from .harness.tables import Table, progress
from .methods.training import SIZES, STOCK, Fused, Loop, Method, Size, Stock, batches, build

# Autocast's dtype, and whether the loss is scaled. fp16 is not trained on CPUs, where its products are slow.
MODES = {"bf16": ("bf16", False), "bf16 scaled": ("bf16", True), "fp32": ("fp32", False)}
MODELS = ("small", "little", "medium", "large", "gpt2")
MICRO_BATCHES = 4
FEWEST = 5  # pairs of windows
DEFAULTS = "defaults"
OPTIONS: dict[str, dict[str, object]] = {
    DEFAULTS: {},
    "cache_casts": {"cache_casts": True},
    "microbatch": {"release": "microbatch"},
    "buckets": {"fuse_weight_gradients": False},
    "fused": {"fuse_weight_gradients": True},
}
COLUMNS = (
    *("model", "parameters", "tokens_per_micro_batch", "mode", "options", "speed_to_stock", "quartile_1", "quartile_3"),
    *("windows", "ms_median", "stock_ms_median", "fused", "in_16_bits", "device", "threads", "instruction_set"),
    *("torch", "commit", "date"),
)


def _loops(size: Size, mode: str, options: Sequence[str], device: torch.device) -> dict[str, Loop]:
    dtype, scaled = MODES[mode]
    methods = [Method(STOCK, Stock, {}), *(Method(name, Fused, OPTIONS[name]) for name in options)]
    return {
        m.name: build(m._replace(options={**m.options, "scale_loss": scaled}), size.model, DTYPES[dtype], device)
        for m in methods
    }


def measure(size: Size, mode: str, options: Sequence[str], device: torch.device, seconds: float) -> list[Row]:
    """A row for each of `options`, after windows for so many seconds; not all of `COLUMNS`."""
    data = batches(size, MICRO_BATCHES, device)
    loops = _loops(size, mode, options, device)
    for loop in loops.values():
        for _ in range(2):
            loop.window(data)
    times: dict[str, list[float]] = {name: [] for name in loops}
    names, windows, begin = list(loops), 0, time.perf_counter()
    while windows < FEWEST or time.perf_counter() - begin < seconds:
        for turn in range(len(names)):
            name = names[(windows + turn) % len(names)]  # nobody always goes first
            times[name].append(wall_seconds(functools.partial(loops[name].window, data), device))
        windows += 1
    rows: list[Row] = []
    for name in options:
        ratios = [stock / ours for stock, ours in zip(times[STOCK], times[name], strict=True)]
        first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
        row: Row = {"mode": mode, "options": name, "windows": windows}
        row.update(speed_to_stock=round(median, 3), quartile_1=round(first, 3), quartile_3=round(third, 3))
        for column, found in (("ms_median", times[name]), ("stock_ms_median", times[STOCK])):
            row[column] = float(f"{statistics.median(found) * 1e3:.4g}")
        row.update((way, float(f"{part:.3f}")) for way, part in loops[name].ways().items())
        rows.append(row)
    return rows


def _key(row: Row) -> tuple[str, ...]:
    return tuple(
        str(row[c]) for c in ("model", "tokens_per_micro_batch", "mode", "options", "device", "instruction_set")
    )


def show(rows: Sequence[Row]) -> None:
    """A line per model, tokens and mode; a column for each choice of options."""
    options = list(dict.fromkeys(str(row["options"]) for row in rows))
    table = Table("times as fast as stock: median and quartiles", ("parameters", "tokens", "mode", *options))
    lines: dict[tuple[object, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["parameters"], row["tokens_per_micro_batch"], row["mode"]), {})
        line[str(row["options"])] = f"{row['speed_to_stock']} ({row['quartile_1']} to {row['quartile_3']})"
    for (parameters, *rest), cells in lines.items():
        table.add(f"{int(str(parameters)):,}", *rest, *(cells.get(option) for option in options))
    table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="32,128,512,1024", help="of a micro-batch, which is one sample")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--options", default=DEFAULTS, help=f"comma-separated: {', '.join(OPTIONS)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="of windows, per cell")
    arguments = parser.parse_args(argv)
    models = listed(parser, "models", arguments.models, SIZES)
    modes = listed(parser, "modes", arguments.modes, MODES)
    options = listed(parser, "options", arguments.options, OPTIONS)
    device = usable(arguments.device, arguments.threads)
    about = environment(device)
    found: list[Row] = [*read_csv(arguments.csv)] if arguments.csv and arguments.csv.exists() else []
    for model in models:
        for tokens in map(int, arguments.tokens.split(",")):
            for mode in modes:
                size = SIZES[model]._replace(length=tokens, samples=1)
                common: Row = {"model": model, "parameters": size.parameters, "tokens_per_micro_batch": tokens, **about}
                done = set(map(_key, found))
                missing = [o for o in options if _key({**common, "mode": mode, "options": o}) not in done]
                if missing:
                    progress(f"{model}, {tokens} tokens, {mode}")
                    measured = measure(size, mode, missing, device, arguments.seconds)
                    found += [{column: {**common, **row}.get(column) for column in COLUMNS} for row in measured]
                    write_csv(arguments.csv, found)
    progress("")
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
