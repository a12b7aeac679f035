"""Writes the demo's results: a table, what it says in a sentence, and a JSON file."""

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
[bold]tokens per second[/]: bytes trained on per second, optimizer step included (median over windows).
[bold]gradient error against the big batch in float64[/]: L2 distance of a window's averaged gradient to the float64 \
gradient of the same window in one batch, relative to the length of the latter; at the weights that the big batch \
ended with. The micro-batches of a full window hold unequal numbers of bytes; the short window has {short} of {full} \
micro-batches. Rounding of {amp} is in every row.
[bold]validation loss[/]: nats per byte, on files that were not trained on. The big batch from {seeds} seeds of \
initial weights ends between {lowest:.3f} and {highest:.3f}: that much is chance.
[bold]peak memory[/]: {memory} while a fresh copy trains: weights, gradients, accumulators, optimizer state, \
activations."""

YOUR_LOOP = """\
In your own loop:
    acc = accumkernels.FusedAccumulator(model{options})   # before the loop
    acc.backward(loss, weight=tokens)            # for {backward}
    acc.step(optimizer, max_norm=1.0)            # clips, steps, zeroes"""


@dataclass
class Run:
    """One method's numbers; gradient errors are keyed "full" and "short", after the window they were measured on."""

    name: str
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    final_loss: float = float("nan")
    gradient_errors: dict[str, float] = field(default_factory=dict)
    gradient_errors_without_autocast: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """The median over full windows, or of the only window if there is just one."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.step_seconds, strict=True)]
        return statistics.median(rates[:-1] or rates)

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes, nats per byte."""
        return {
            "name": self.name,
            "seconds": sum(self.step_seconds),
            "final_loss": self.final_loss,
            "losses": self.losses,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "gradient_errors": self.gradient_errors,
            "gradient_errors_without_autocast": self.gradient_errors_without_autocast,
            "peak_bytes": self.peak_bytes,
        }


def speedup(run: Run, other: Run) -> float:
    """How many times the tokens per second of `other`: the median of windows that were trained one after the other."""
    ratios = [theirs / ours for ours, theirs in zip(run.step_seconds, other.step_seconds, strict=True)]
    return statistics.median(ratios[:-1] or ratios)


def percent(error: float) -> str:
    """Two digits, as "0.42 %" or "61 %"; three from 100 % on."""
    return f"{100 * error:.0f} %" if error >= 0.1 else f"{100 * error:.2g} %"


def print_table(console: Console, runs: Sequence[Run], **settings: Any) -> None:
    """Print a row per run, and what the columns mean; it fits into 80 columns.

    Args:
        console: Where to print.
        runs: The rows.
        **settings: The values that `DEFINITIONS` names.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for header in (
        "tokens per\nsecond",
        "gradient error,\nfull window",
        "gradient error,\nshort window",
        "validation\nloss",
        "peak memory\n(MB)",
    ):
        table.add_column(header, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.tokens_per_second:,.0f}",
            percent(run.gradient_errors["full"]),
            percent(run.gradient_errors["short"]),
            f"{run.final_loss:.3f}",
            f"{run.peak_bytes / 1e6:,.0f}",
        )
    console.print(table)
    console.print(DEFINITIONS.format(**settings), style="dim", highlight=False)


def print_conclusion(console: Console, stock: Run, fused: Run, amp: str) -> None:
    """Print in a sentence what was seen on this machine, and what to change in one's own loop."""
    faster = speedup(fused, stock)
    seen = f"{faster:.2f} times as many tokens per second as stock accumulation"
    if faster < 1:
        seen += " (a machine that is busy with other things spoils the comparison)"
    ours, theirs = fused.gradient_errors, stock.gradient_errors
    console.print(
        f"\nOn this machine FusedAccumulator trained {seen}, with a gradient error of {percent(ours['full'])} where "
        f"stock's was {percent(theirs['full'])}, and of {percent(ours['short'])} where it was "
        f"{percent(theirs['short'])} in a short window.\n",
        style="bold",
        highlight=False,
    )
    scaled = amp == "float16"
    text = YOUR_LOOP.format(
        options=(", scaler=scaler" if scaled else "") + (", cache_casts=True" if amp != "float32" else ""),
        backward="scaler.scale(loss / K).backward()" if scaled else "(loss / K).backward()",
    )
    console.print(text, highlight=False, markup=False)


def write_json(path: Path, runs: Sequence[Run], seeds: Sequence[Run], **more: Any) -> None:
    """Write `{"runs": [...], "seeds": [...], **more}`."""
    content = {"runs": [run.as_json() for run in runs], "seeds": [run.losses for run in seeds], **more}
    path.write_text(json.dumps(content, indent=1) + "\n")
