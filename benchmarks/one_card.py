"""All of a large GPT on one card: with sums, masters and moments on the card, and in host memory.

    python -m benchmarks.one_card --device cuda [--layers 24] [--width 2048] [--csv FILE]

examples/one_card.py trains, in bf16 with recomputed activations: tokens per second, the card's peak, and how long a
window waited for the host. A card that is too small for the first is what the second is for, and the row is left out.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from .harness.arguments import command_line, usable
from .harness.machine import environment
from .harness.measure import median_and_spread
from .harness.results import Row, write_csv
from .harness.tables import Table

COLUMNS = (
    *("what", "parameters", "tokens_per_second", "to_on_the_card", "peak_GB", "weights_GB", "offload_wait_seconds"),
    *("loss_first", "loss_last", "tokens", "micro_batches", "windows", "cpu_cores"),
    *("device", "driver", "cuda", "threads", "torch", "python", "commit", "date"),
)
SHOWN = COLUMNS[2:9]


def example() -> ModuleType:
    """examples/one_card.py, which is no package."""
    path = Path(__file__).parents[1] / "examples" / "one_card.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(given: Namespace, device: torch.device) -> list[Row]:
    """Train both ways. The first window makes the optimizer's state and does not count."""
    one_card = example()
    count = sum(p.numel() for p in one_card.GPT(given.layers, given.width, given.tokens, "meta").parameters())
    found: list[Row] = []
    speeds: dict[bool, float] = {}
    for offloaded in (False, True):
        what = "in host memory" if offloaded else "on the card"
        try:
            windows = one_card.train(given, device, cpu_offload=offloaded)[1:]
        except torch.OutOfMemoryError as error:
            print(f"{what}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        finally:
            gc.collect()
            torch.accelerator.empty_cache()
        speeds[offloaded], *_ = median_and_spread([window.tokens_per_second for window in windows])
        wait, *_ = median_and_spread([window.offload_wait for window in windows])
        row: Row = {"what": what, "parameters": count, "tokens_per_second": float(f"{speeds[offloaded]:.4g}")}
        row["to_on_the_card"] = round(speeds[offloaded] / speeds[False], 3) if False in speeds else None
        row["peak_GB"] = round(max(window.peak_bytes for window in windows) / 1e9, 3)
        row["weights_GB"], row["offload_wait_seconds"] = round(2 * count / 1e9, 3), round(wait, 3)
        row["loss_first"], row["loss_last"] = round(windows[0].loss, 3), round(windows[-1].loss, 3)
        row.update({name: getattr(given, name) for name in ("tokens", "micro_batches")})
        row["windows"], row["cpu_cores"] = len(windows), os.cpu_count()
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a window")
    parser.add_argument("--windows", type=int, default=5, help="per method; the first does not count")
    parser.add_argument("--lr", type=float, default=3e-4)
    given = parser.parse_args(argv)
    device = usable(given.device, given.threads)
    if device.type == "cpu":
        parser.error("needs an accelerator; benchmarks.offload measures the host's part without one")
    device = torch.device(device.type, torch.accelerator.current_device_index())
    about = environment(device)
    rows = [{column: {**about, **row}.get(column) for column in COLUMNS} for row in measure(given, device)]
    table = Table("a GPT on one card", ["", *(name.replace("_", " ") for name in SHOWN)])
    for row in rows:
        table.add(row["what"], *(row[name] for name in SHOWN))
    table.print()
    write_csv(given.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
