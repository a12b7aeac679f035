"""The table, JSON file and picture of the demo and of `compare`."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

# ---- Writes the results: a table, what it says in a sentence, and a JSON file

DEFINITIONS = {
    "rate": """\
[bold]{unit} per second[/]: trained on per second, optimizer step included: the median over windows. How many times as \
fast is the median over windows trained in turn. A machine that is busy with other things spoils both.""",
    "errors": """\
[bold]gradient error against the big batch in {exact}[/]: L2 distance of a window's averaged gradient to the {exact} \
gradient of the same window {how}, relative to the length of the latter{where}. The short window has {short} of {full} \
micro-batches; stock divides each loss by {full} there, too. Rounding of {amp} is in every row.""",
    "validation": """\
[bold]validation loss[/]: nats per byte, on files that were not trained on. The big batch from {seeds} seeds of \
initial weights ends between {lowest:.3f} and {highest:.3f}: that much is chance.""",
    "memory": """\
[bold]peak memory[/]: {memory}, while training {batch}: weights, gradients, accumulators, optimizer state, \
activations.""",
}

YOUR_LOOP = """\
Before your own loop, and in it:
    acc = accumkernels.FusedAccumulator(model{options})
    acc.backward(loss, weight={unit})  # for {backward}
    acc.step(optimizer{clips})  # {steps}, zeroes"""


@dataclass
class Run:
    """One method's numbers; gradient errors are keyed "full" and "short", after the window they were measured on.

    Attributes:
        losses, tokens, step_seconds: Of each window.
        ends_short: Whether the last window is a short one, whose speed says nothing.
        fits: Whether it fits into the budget, where it was trained with one.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    final_loss: float = math.nan
    gradient_errors: dict[str, float] = field(default_factory=dict)
    gradient_errors_without_autocast: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    ends_short: bool = True
    fits: bool = True

    def full_windows(self, values: list[float]) -> list[float]:
        """The values of windows that are not short, or of the only window if there is just one."""
        return (values[:-1] if self.ends_short else values) or values

    @property
    def tokens_per_second(self) -> float:
        """The median over full windows; nan if none was trained."""
        rates = [tokens / seconds for tokens, seconds in zip(self.tokens, self.step_seconds, strict=True)]
        return statistics.median(self.full_windows(rates)) if rates else math.nan

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds, bytes, nats per byte; what was not measured is left out."""
        values = {
            "name": self.name,
            "seconds": sum(self.step_seconds),
            "final_loss": self.final_loss,
            "losses": self.losses,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "gradient_errors": {window: error for window, error in self.gradient_errors.items() if error == error},
            "gradient_errors_without_autocast": self.gradient_errors_without_autocast,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }
        return {key: value for key, value in values.items() if value not in ([], {}) and value == value}


def speedup(run: Run, other: Run) -> float:
    """How many times the tokens per second of `other`: the median of windows that were trained one after the other."""
    ratios = [theirs / ours for ours, theirs in zip(run.step_seconds, other.step_seconds, strict=True)]
    return statistics.median(run.full_windows(ratios))


def percent(error: float) -> str:
    """Two digits, as "0.42 %" or "61 %"; three from 100 % on."""
    return f"{100 * error:.0f} %" if error >= 0.1 else f"{100 * error:.2g} %"


def rate(per_second: float) -> str:
    """Four digits, and all of a large number, as "12,345"."""
    return f"{per_second:,.0f}" if per_second >= 1e4 else f"{per_second:,.4g}"


def megabytes(nbytes: int) -> str:
    """Whole MB, as "1,234"; three digits below 100."""
    return f"{nbytes / 1e6:,.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"


def print_table(console: Console, runs: Sequence[Run], **settings: Any) -> None:
    """Print a row per run, and what the columns mean; it fits into 80 columns.

    Args:
        console: Where to print.
        runs: The rows. The column of validation losses is there if they have one.
        **settings: The values that `DEFINITIONS` names.
    """
    columns = {
        "rate": [("{unit} per\nsecond", lambda run: rate(run.tokens_per_second))],
        "errors": [
            ("gradient error,\nfull window", lambda run: percent(run.gradient_errors["full"])),
            ("gradient error,\nshort window", lambda run: percent(run.gradient_errors["short"])),
        ],
        "validation": [("validation\nloss", lambda run: f"{run.final_loss:.3f}")],
        "memory": [("peak memory\n(MB)", lambda run: megabytes(run.peak_bytes) + ("" if run.fits else " over"))],
    }
    if math.isnan(runs[0].final_loss):
        del columns["validation"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    shown = [column for group in columns.values() for column in group]
    for header, _ in shown:
        table.add_column(header.format(**settings), justify="right")
    for run in runs:
        table.add_row(run.name, *("-" if cell.startswith("nan") else cell for cell in (show(run) for _, show in shown)))
    console.print(table)
    for group in columns:
        console.print(DEFINITIONS[group].format(**settings), style="dim", highlight=False)


def print_conclusion(
    console: Console,
    stock: Run,
    fused: Run,
    unit: str,
    *,
    scaled: bool,
    cache_casts: bool,
    clips: bool,
    mode: str = "",
    loop: bool = True,
) -> None:
    """Print in a sentence what was seen on this machine, and what to change in one's own loop.

    Args:
        console: Where to print.
        stock: What it is compared to.
        fused: What is compared.
        unit: What is counted per second, and weighs a micro-batch.
        scaled: Whether there was a GradScaler.
        cache_casts: Whether FusedAccumulator kept autocast's copies.
        clips: Whether gradients were clipped.
        mode: Where gradients were compared, as " in eval mode".
        loop: Whether to say what to change.
    """
    seen = f"{speedup(fused, stock):.2f} times as many {unit} per second as stock accumulation"
    ours, theirs = fused.gradient_errors, stock.gradient_errors
    console.print(
        f"\nOn this machine FusedAccumulator trained {seen}, with a gradient error{mode} of {percent(ours['full'])} "
        f"where stock's was {percent(theirs['full'])}, and of {percent(ours['short'])} where it was "
        f"{percent(theirs['short'])} in a short window.\n",
        style="bold",
        highlight=False,
    )
    if not loop:
        return
    text = YOUR_LOOP.format(
        options=(", scaler=scaler" if scaled else "") + (", cache_casts=True" if cache_casts else ""),
        unit="len(x)" if unit == "samples" else unit,
        backward="scaler.scale(loss / K).backward()" if scaled else "(loss / K).backward()",
        clips=", max_norm=1.0" if clips else "",
        steps="clips, steps" if clips else "steps",
    )
    console.print(text, highlight=False, markup=False)


def write_json(path: Path, runs: Sequence[Run], **more: Any) -> None:
    """Write `{"runs": [...], **more}`."""
    content = {"runs": [run.as_json() for run in runs], **more}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


# ---- The picture: a panel each for tokens per second, gradient errors, the loss over tokens, and memory
#
# Each panel has its message for a title, and the methods in the same places and colours.

# Okabe and Ito's colours suit any colour vision.
COLOURS = ("#888888", "#0072B2", "#D55E00")
LABELS = ("one\nbig batch", "stock\naccumulation", "Fused\nAccumulator")
SMOOTH = 10  # windows: a window's own loss says more of its text than of the model


def _smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last `SMOOTH` windows."""
    return [sum(part) / len(part) for part in (losses[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(losses)))]


def _bars(axes: Axes, values: Sequence[float], texts: Sequence[str]) -> None:
    bars = axes.bar(LABELS, values, color=COLOURS, width=0.65)
    axes.bar_label(bars, texts, padding=2, fontweight="bold")


def _frame(axes: Axes, message: str, quantity: str) -> None:
    axes.margins(y=0.18)  # room for the number above the highest bar
    axes.set_title(textwrap.fill(message, 34), fontweight="bold", fontsize=11)
    axes.set_ylabel(quantity)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _rates(axes: Axes, runs: Sequence[Run], unit: str) -> None:
    rates = [run.tokens_per_second for run in runs]
    texts = ["does not fit" if math.isnan(value) else rate(value) for value in rates]
    _bars(axes, [0 if math.isnan(value) else value for value in rates], texts)
    _frame(axes, f"{speedup(runs[2], runs[1]):.2f} times stock's speed", f"{unit} per second")


def _errors(axes: Axes, runs: Sequence[Run]) -> None:
    """Two bars per method: in the full window, and in the short one."""
    for place, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        for offset, window in ((-0.18, "full"), (0.18, "short")):
            error = run.gradient_errors[window]
            known = not math.isnan(error)
            bars = axes.bar([place + offset], [100 * error if known else 0], 0.33, color=colour)
            axes.bar_label(bars, [percent(error) if known else "-"], padding=2, fontsize=8, fontweight="bold")
            axes.annotate(
                window, (place + offset, 0), (0, -3), textcoords="offset points", ha="center", va="top", fontsize=9
            )
    axes.set_xticks(range(len(runs)), [f"\n{label}" for label in LABELS])
    axes.tick_params(axis="x", length=0)
    errors = [run.gradient_errors for run in runs]
    stock, ours = (max(errors[index].values()) for index in (1, 2))
    _frame(
        axes, f"Its gradient is off by {percent(ours)}, stock's by up to {percent(stock)}", "% of the exact gradient"
    )


def _losses(axes: Axes, runs: Sequence[Run], seeds: Sequence[Run]) -> None:
    tokens = [total / 1000 for total in itertools.accumulate(runs[0].tokens)]
    curves = [_smooth(run.losses) for run in seeds]
    lowest, highest = ([bound(at) for at in zip(*curves, strict=True)] for bound in (min, max))
    axes.fill_between(tokens, lowest, highest, color=COLOURS[0], alpha=0.35, linewidth=0)
    for run, colour, style in zip(runs[1:], COLOURS[1:], ("-", "--"), strict=True):
        axes.plot(tokens, _smooth(run.losses), style, color=colour, linewidth=2)
    names = (f"one big batch, {len(seeds)} seeds", *(run.name for run in runs[1:]))
    for row, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        where = (0.97, 0.93 - 0.09 * row)
        axes.annotate(name, where, xycoords="axes fraction", ha="right", va="top", color=colour, fontweight="bold")
    axes.set_xlabel("tokens seen (thousands)")
    _frame(axes, "Both train like the big batch", "training loss, nats per byte")


def _memory(axes: Axes, runs: Sequence[Run], batch: str, budget: int | None) -> None:
    _bars(axes, [run.peak_bytes / 1e6 for run in runs], [megabytes(run.peak_bytes) for run in runs])
    message = f"Peak memory of {batch}"
    if budget is not None:
        axes.axhline(budget / 1e6, color="black", linewidth=1.5)
        axes.annotate(
            f"budget: {megabytes(budget)} MB", (1, budget / 1e6), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right",
        )  # fmt: skip
        if runs[0].peak_bytes > budget >= max(run.peak_bytes for run in runs[1:]):
            message = "Over the budget at once, below it in micro-batches"
    _frame(axes, message, f"peak MB, {batch}")


def draw(
    path: Path,
    runs: Sequence[Run],
    title: str,
    *,
    unit: str,
    batch: str,
    budget: int | None,
    seeds: Sequence[Run] = (),
) -> None:
    """Write the picture as a PNG of 1200 or 1560 pixels' width.

    Args:
        path: The file.
        runs: The big batch, stock accumulation, FusedAccumulator.
        title: A line about the run.
        unit: What is counted per second.
        batch: What memory was measured with, as "64 samples".
        budget: Bytes; a line in the panel of memory. None: no line.
        seeds: The big batch from several seeds; without them there is no panel of losses.
    """
    figure = Figure(figsize=(10, 7) if seeds else (13, 4.5), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=9, color="#555555")
    panels = figure.subplots(*((2, 2) if seeds else (1, 3))).flat
    _memory(next(panels), runs, batch, budget)
    _rates(next(panels), runs, unit)
    _errors(next(panels), runs)
    if seeds:
        _losses(next(panels), runs, seeds)
    figure.savefig(path, format="png")
