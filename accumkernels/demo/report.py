"""Writes the demo's results, as a table and a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

DEFINITIONS = """\
[bold]final validation loss[/]: nats per byte, on files that were not trained on.
[bold]gradient error against the big batch in float64[/]: L2 distance of a window's averaged, unscaled gradient to the \
float64 gradient of the same window in one batch, relative to the length of the latter; at the weights that the big \
batch ended with. In a full window the micro-batches hold unequal numbers of bytes; the last window has {last} of \
{full} micro-batches. Rounding of {amp} autocast is in every row; without autocast the errors are {exact}.
[bold]time in gradient handling[/]: ms per window (median of {timed}) from gradients as layers make them to the \
optimizer: autocast's casts to fp32 or what replaces them, accumulation, average, unscaling, check, clipping and \
zeroing, measured around those calls; not the optimizer's step.
[bold]step time[/]: ms per window (median over training), everything included.
[bold]peak memory[/]: MB of {memory} while a fresh copy trains: weights, gradients, accumulators, optimizer state, \
activations."""


@dataclass
class Run:
    """One method's numbers; gradient errors are keyed "full" and "last", after the window they were measured on."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    final_loss: float = float("nan")
    gradient_errors: dict[str, float] = field(default_factory=dict)
    gradient_errors_without_autocast: dict[str, float] = field(default_factory=dict)
    gradient_seconds: float = float("nan")
    peak_bytes: int = 0

    @property
    def median_step_seconds(self) -> float:
        """The median over full windows, or the only window if there is just one."""
        return statistics.median(self.step_seconds[:-1] or self.step_seconds)

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes, nats per byte."""
        return {
            "name": self.name,
            "seconds": sum(self.step_seconds),
            "final_loss": self.final_loss,
            "losses": self.losses,
            "gradient_errors": self.gradient_errors,
            "gradient_errors_without_autocast": self.gradient_errors_without_autocast,
            "gradient_seconds_per_window": self.gradient_seconds,
            "step_seconds": self.median_step_seconds,
            "peak_bytes": self.peak_bytes,
        }


def print_table(console: Console, runs: Sequence[Run], **settings: Any) -> None:
    """Print a row per run, and what the columns mean.

    Args:
        console: Where to print.
        runs: The rows.
        **settings: The values that `DEFINITIONS` names, except `exact`.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for header in (
        "final\nvalidation\nloss",
        "gradient\nerror, full\nwindow",
        "gradient\nerror, last\nwindow",
        "gradient\nhandling\n(ms)",
        "step\ntime\n(ms)",
        "peak\nmemory\n(MB)",
    ):
        table.add_column(header, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.final_loss:.4f}",
            f"{run.gradient_errors['full']:.1e}",
            f"{run.gradient_errors['last']:.1e}",
            f"{run.gradient_seconds * 1e3:.2f}",
            f"{run.median_step_seconds * 1e3:.0f}",
            f"{run.peak_bytes / 1e6:.1f}",
        )
    console.print(table)
    exact = ", ".join(
        f"{errors['full']:.0e} and {errors['last']:.0e} ({run.name})"
        for run in runs
        for errors in [run.gradient_errors_without_autocast]
    )
    console.print(DEFINITIONS.format(exact=exact, **settings), style="dim", highlight=False)


def write_json(path: Path, runs: Sequence[Run], **more: Any) -> None:
    """Write `{"runs": [...], **more}`."""
    path.write_text(json.dumps({"runs": [run.as_json() for run in runs], **more}, indent=1) + "\n")
