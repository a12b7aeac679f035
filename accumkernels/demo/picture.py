"""The demo's picture: tokens per second, gradient errors, the loss over tokens, and memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Run, percent, speedup

# Okabe and Ito's colours suit any colour vision.
COLOURS = ("#888888", "#0072B2", "#D55E00")
LABELS = ("one\nbig batch", "stock\naccumulation", "Fused\nAccumulator")
SMOOTH = 10  # windows: a window's own loss says more of its text than of the model


def _smooth(losses: Sequence[float]) -> list[float]:
    """Means over the last `SMOOTH` windows."""
    return [sum(part) / len(part) for part in (losses[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(losses)))]


def _bars(axes: Axes, values: Sequence[float], texts: Sequence[str], title: str) -> None:
    bars = axes.bar(LABELS, values, color=COLOURS, width=0.65)
    axes.bar_label(bars, texts, padding=2, fontweight="bold")
    _frame(axes, title)


def _frame(axes: Axes, title: str) -> None:
    axes.margins(y=0.18)  # room for the number above the highest bar
    axes.set_title(title, fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _errors(axes: Axes, runs: Sequence[Run]) -> None:
    """Two groups of bars: every method in the full window, and in the short one."""
    for offset, (run, colour) in enumerate(zip(runs, COLOURS, strict=True), start=-1):
        values = [run.gradient_errors[window] for window in ("full", "short")]
        bars = axes.bar([place + 0.3 * offset for place in (0, 1)], [100 * v for v in values], 0.27, color=colour)
        axes.bar_label(bars, [percent(value) for value in values], padding=2, fontsize=9, fontweight="bold")
    axes.set_xticks([0, 1], ["full window,\nunequal micro-batches", "short\nlast window"])
    axes.set_ylabel("% of the exact gradient")
    _frame(axes, "Gradient error")


def _losses(axes: Axes, runs: Sequence[Run], seeds: Sequence[Run]) -> None:
    tokens = [total / 1000 for total in itertools.accumulate(runs[0].tokens)]
    curves = [_smooth(run.losses) for run in seeds]
    lowest, highest = ([bound(at) for at in zip(*curves, strict=True)] for bound in (min, max))
    axes.fill_between(tokens, lowest, highest, color=COLOURS[0], alpha=0.35, linewidth=0)
    for run, colour, style in zip(runs[1:], COLOURS[1:], ("-", "--"), strict=True):
        axes.plot(tokens, _smooth(run.losses), style, color=colour, linewidth=2)
    axes.annotate(
        f"grey: one big batch,\n{len(seeds)} seeds", (0.97, 0.9), xycoords="axes fraction", ha="right", va="top"
    )
    axes.set_xlabel("tokens seen (thousands)")
    axes.set_ylabel("nats per byte")
    _frame(axes, "Training loss")


def draw(path: Path, runs: Sequence[Run], seeds: Sequence[Run], title: str) -> None:
    """Write the picture as a PNG of 1200 x 840 pixels.

    Args:
        path: The file.
        runs: The big batch, stock accumulation, FusedAccumulator.
        seeds: The big batch from several seeds.
        title: A line about the run.
    """
    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=9, color="#555555")
    (rates, errors), (losses, memory) = figure.subplots(2, 2)
    faster = speedup(runs[2], runs[1])
    texts = [f"{run.tokens_per_second:,.0f}" for run in runs]
    texts[2] += f"\n{faster:.2f} x stock"
    _bars(rates, [run.tokens_per_second for run in runs], texts, "Tokens per second")
    _errors(errors, runs)
    _losses(losses, runs, seeds)
    _bars(
        memory, [run.peak_bytes / 1e6 for run in runs], [f"{r.peak_bytes / 1e6:,.0f}" for r in runs], "Peak memory (MB)"
    )
    figure.savefig(path, format="png")
