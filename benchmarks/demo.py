"""The demo's table as a file: tokens per second, gradient errors, loss and memory, in several runs.

    python -m benchmarks.demo --csv benchmarks/results/demo_cpu.csv [--runs 3]

`python -m accumkernels demo` itself, so that figures in README are what a reader sees; one seed per run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .harness.arguments import command_line, usable
from .harness.machine import environment
from .harness.results import Row, write_csv

COLUMNS = (
    *("run", "method", "tokens_per_second", "speed_to_stock", "error_full_percent", "error_short_percent"),
    *("final_loss", "peak_MB", "parameters", "windows", "autocast", "device", "threads", "instruction_set", "torch"),
    *("python", "commit", "date"),
)
STOCK = "stock accumulation"


def rows(found: dict[str, object], run: int, about: Row) -> list[Row]:
    """One per method, from what the demo has written."""
    runs, settings = found["runs"], found["settings"]
    assert isinstance(runs, list)
    assert isinstance(settings, dict)
    stock = next(r["tokens_per_second"] for r in runs if r["name"] == STOCK)
    made: list[Row] = []
    for r in runs:
        row: Row = {**about, "run": run, "method": r["name"], "windows": settings["steps"]}
        row.update({name: settings[name] for name in ("parameters", "autocast", "threads")})
        row["tokens_per_second"] = float(f"{r['tokens_per_second']:.4g}")
        row["speed_to_stock"] = round(r["tokens_per_second"] / stock, 3)
        for window in ("full", "short"):
            row[f"error_{window}_percent"] = float(f"{100 * r['gradient_errors'][window]:.2g}")
        row["final_loss"], row["peak_MB"] = round(r["final_loss"], 4), round(r["peak_bytes"] / 1e6, 1)
        made.append({column: row.get(column) for column in COLUMNS})
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="windows of the demo")
    arguments = parser.parse_args(argv)
    about = environment(usable(arguments.device, arguments.threads))
    found: list[Row] = []
    for run in range(arguments.runs):
        with tempfile.TemporaryDirectory() as out:
            options = ["--device", arguments.device, "--seed", str(run), "--out", out]
            if arguments.steps is not None:
                options += ["--steps", str(arguments.steps)]
            # A process for each run: what one has freed, the next one's allocations would find.
            subprocess.run([sys.executable, "-m", "accumkernels", "demo", *options], check=True)
            found += rows(json.loads((Path(out) / "demo.json").read_text()), run, about)
        write_csv(arguments.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
