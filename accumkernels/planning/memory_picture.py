"""Memory reports as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import expect_iterable
from .memory import PARTS, MemoryReport


def draw_memory(path: Path | str, reports: Iterable[MemoryReport], limit: int | None = None) -> None:
    """Draw reports as stacked bars over batch sizes, with a device's limit as a line; a PNG of 1080 x 600 pixels.

    Args:
        path: Where to write it.
        reports: One for each bar.
        limit: Bytes of the device; None for no line.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: `reports` is no iterable, or empty.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "accumkernels[demo]"') from error
    bars = sorted(
        expect_iterable(reports, "reports", "an iterable of MemoryReports"), key=lambda report: report.batch_size
    )
    if not bars:
        raise ValueError("reports is empty: there is nothing to draw")
    colours = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#999999")  # Okabe and Ito
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels = [str(report.batch_size) for report in bars]
    bottom = [0.0] * len(bars)
    for part, colour in zip(PARTS, colours, strict=True):
        heights = [getattr(report, part) / 1e6 for report in bars]
        if any(heights):
            axes.bar(labels, heights, bottom=bottom, color=colour, label=part, width=0.7)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    if limit is not None:
        axes.axhline(limit / 1e6, color="#D55E00", linestyle="--", label=f"limit: {limit / 1e6:,.0f} MB")
    axes.set_title("Memory of a training step")
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel("MB")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left")
    figure.savefig(path, format="png")
