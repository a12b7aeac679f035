"""The demo's picture: loss curves, and bars for gradient error, gradient time and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Run

# Okabe and Ito's colours suit any colour vision; line styles differ, since two of the curves coincide.
COLOURS = ("#999999", "#0072B2", "#D55E00")
STYLES: tuple[dict[str, Any], ...] = (
    {"linewidth": 5.0, "alpha": 0.6},
    {"linewidth": 1.6},
    {"linewidth": 1.6, "linestyle": (0, (3, 2))},
)


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for run, colour, style in zip(runs, COLOURS, STYLES, strict=True):
        windows = range(1, len(run.losses) + 1)
        label = f"{run.name} (validation {run.final_loss:.3f})"
        axes.plot(windows, run.losses, color=colour, label=label, **style)
    axes.set_title("Training loss")
    axes.set_xlabel("window (optimizer step)")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(axes: Axes, runs: Sequence[Run], values: Sequence[float], title: str, label: str) -> None:
    bars = axes.bar([re.sub(r"(?<=d)(?=A)| ", "\n", run.name) for run in runs], values, color=COLOURS, width=0.65)
    axes.bar_label(bars, fmt="{:.3g}", padding=2)
    axes.margins(y=0.12)  # room for the number above the highest bar
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def draw(path: Path, runs: Sequence[Run], title: str) -> None:
    """Write the picture of the three `runs` as a PNG of 1920 x 520 pixels."""
    figure = Figure(figsize=(16, 4.33), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    losses, errors, times, memory = figure.subplots(1, 4, width_ratios=(2, 1, 1, 1))
    _losses(losses, runs)
    last = [100 * run.gradient_errors["last"] for run in runs]
    _bars(errors, runs, last, "Gradient error, short last window", "% of the float64 gradient of the big batch")
    _bars(times, runs, [run.gradient_seconds * 1e3 for run in runs], "Time in gradient handling", "ms per window")
    _bars(memory, runs, [run.peak_bytes / 1e6 for run in runs], "Peak memory", "MB")
    figure.savefig(path, format="png")
