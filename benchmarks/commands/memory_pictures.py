"""What is in memory over one window, stacked; from the file that `benchmarks.memory --timeline` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ..harness.timeline import KINDS

COLOURS = ("#0072B2", "#CC79A7", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#999999")  # Okabe and Ito's


def timeline(rows: Sequence[dict[str, str]], path: Path, machine: str) -> Path:
    """A panel per method, all of one model and dtype on the same scale; models and dtypes below each other.

    Args:
        rows: As written, every cell a string.
        path: Of the PNG.
        machine: What to say about where it was measured.
    """
    cases = list(dict.fromkeys((row["model"], row["dtype"]) for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    columns = 3
    lines = -(-len(methods) // columns)
    figure = Figure(figsize=(5 * columns, 2.6 * lines * len(cases)), dpi=100, layout="constrained")
    figure.suptitle(f"Bytes of tensors alive over one window, op by op; {machine}", fontsize=9)
    for number, case in enumerate(cases):
        of_case = [row for row in rows if (row["model"], row["dtype"]) == case]
        top = max(sum(float(row[kind]) for kind in KINDS) for row in of_case)
        for index, method in enumerate(methods):
            points = [row for row in of_case if row["method"] == method]
            axes = figure.add_subplot(lines * len(cases), columns, number * lines * columns + index + 1)
            heights = [[float(row[kind]) for row in points] for kind in KINDS]
            axes.stackplot(range(len(points)), heights, colors=COLOURS, labels=KINDS)
            peak = max(sum(float(row[kind]) for kind in KINDS) for row in points)
            axes.set_title(f"{case[0]}, {case[1]}: {method} (peak {peak:,.0f} MB)", fontsize=7)
            axes.set_ylim(0, top * 1.05)
            axes.set_ylabel("MB", fontsize=7)
            axes.tick_params(labelsize=6, labelbottom=False)
            if number == index == 0:
                axes.legend(loc="lower right", fontsize=6)
    figure.savefig(path, format="png")
    return path
