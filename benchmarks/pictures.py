"""Pictures of results, from a CSV file alone.

    python -m benchmarks.pictures benchmarks/results/kernels_cpu.csv [--out DIR]

Of a file of benchmarks.kernels: `NAME-accumulate.png` and `NAME-window.png` with a bar per method, `NAME-size.png` with
GB/s against size and the limit, where the file has several sizes of equal tensors. Of one of benchmarks.training:
`NAME.png`, tokens per second and peak memory. Of one of benchmarks.demo: `NAME.png`, tokens per second and gradient
error. Of a timeline of benchmarks.memory: `NAME.png`, memory over a window. Of benchmarks.ranks --simulate: `NAME.png`,
the modelled time on the link and the host's, against the number of ranks. Of benchmarks.fits: `NAME-light.png` and
`NAME-dark.png`, memory by kind beside a card's limit, which are README's.

FusedAccumulator, stock torch and the limit have each a colour of their own in every picture, which the demo and the
notebook share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .harness.results import read_csv
from .harness.timeline import KINDS

Rows = list[dict[str, str]]

# Okabe and Ito's colours, told apart with any colour vision.
OURS_COLOUR, LIMIT_COLOUR, PEER_COLOUR = "#D55E00", "#999999", "#0072B2"
STACK = ("#999999", "#F0E442", "#BBBBBB", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")  # kinds of memory
LINES = ("#009E73", "#0072B2", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # the second is DistributedDataParallel's
PANELS = ("stock accumulation", "FusedAccumulator, defaults", 'FusedAccumulator, release="microbatch"')  # of a timeline
# What a step holds: (columns of benchmarks.fits, colour).
HELD = {
    "weights, gradients, Adam's state": (("parameters_GB", "gradients_GB", "optimizer_GB"), "#999999"),
    "fp32 sums": (("accumulators_GB",), "#009E73"),
    "activations": (("activations_GB",), "#56B4E9"),
    "temporaries": (("workspace_GB",), "#CC79A7"),
}
INK = {"light": "#1f2328", "dark": "#e6edf3"}  # of text, on GitHub's page


def _colour(method: str) -> str:
    if method.startswith("limit:"):
        return LIMIT_COLOUR
    return OURS_COLOUR if method.startswith(("accumkernels", "FusedAccumulator")) else PEER_COLOUR


def _distinct(rows: Iterable[dict[str, str]], *keys: str) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def _matching(rows: Rows, keys: Sequence[str], values: Sequence[str]) -> Rows:
    return [row for row in rows if [row[key] for key in keys] == list(values)]


def _bars(axes: Axes, rows: Rows, column: str, title: str, label: str) -> None:
    """Horizontal bars, the first row on top, with the spread where the column is a time."""
    rows = [row for row in rows if row[column]]
    values = [float(row[column]) for row in rows]
    axes.barh(range(len(rows)), values, color=[_colour(row["method"]) for row in rows])
    if column == "ms_median":
        ends = [[v - float(r["ms_p10"]), float(r["ms_p90"]) - v] for r, v in zip(rows, values, strict=True)]
        lower, upper = zip(*ends, strict=True)
        spread = [[max(0.0, v) for v in lower], [max(0.0, v) for v in upper]]
        axes.errorbar(values, range(len(rows)), xerr=spread, fmt="none", ecolor="#333333", elinewidth=0.8)
    for index, value in enumerate(values):
        text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        axes.annotate(f" {text}", (value, index), va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=8)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _grid(path: Path, panels: Sequence[tuple[Rows, str]], column: str, label: str, title: str) -> Path:
    """A panel of bars each, at most two beside each other."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(7.5 * columns, 3.4 * lines), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=9)
    for index, (rows, subtitle) in enumerate(panels):
        _bars(figure.add_subplot(lines, columns, index + 1), rows, column, subtitle, label)
    figure.savefig(path, format="png")
    return path


def _machine(row: dict[str, str]) -> str:
    where = f"{row['device']}, {row['threads']} threads" if row["instruction_set"] != "cuda" else row["device"]
    return f"{where}, torch {row['torch']}, commit {row['commit']}, {row['date']}"


def _times(rows: Rows, path: Path, keys: Sequence[str], subtitle: str, title: str) -> Path | None:
    """Milliseconds, a panel for every combination of `keys`; None where there are no rows."""
    if not rows:
        return None
    panels = [(_matching(rows, keys, values), subtitle.format(*values)) for values in _distinct(rows, *keys)]
    return _grid(path, panels, "ms_median", "ms (p10 to p90)", f"{title}; {_machine(rows[0])}")


def accumulate(rows: Rows, path: Path) -> Path | None:
    """Milliseconds of one accumulate, a panel per list of shapes, dtype and state of the gradients."""
    rows = [row for row in rows if row["table"] == "accumulate" and row["shapes"] != "uniform"]
    return _times(rows, path, ("shapes", "dtype", "gradients"), "{}, {}, gradients {}", "One accumulate")


def windows(rows: Rows, path: Path) -> Path | None:
    """Milliseconds of a window, a panel per list of shapes, dtype and length."""
    rows = [row for row in rows if row["table"] == "window" and row["micro_batches"]]
    keys = ("shapes", "dtype", "micro_batches")
    return _times(rows, path, keys, "{}, {}, {} micro-batches", "Gradient side of a window")


def sizes(rows: Rows, path: Path) -> Path | None:
    """GB/s against the number of elements: the limit, ours, and whoever is best beside it; gradients cold."""
    rows = [r for r in rows if (r["table"], r["shapes"], r["gradients"]) == ("accumulate", "uniform", "cold")]
    dtypes = _distinct(rows, "dtype")
    if not rows:
        return None
    figure = Figure(figsize=(max(6.4, 4.2 * len(dtypes)), 3.4), dpi=110, layout="constrained")
    figure.suptitle(f"16 equal tensors, gradients cold; {_machine(rows[0])}", fontsize=7)
    for index, (dtype,) in enumerate(dtypes):
        axes = figure.add_subplot(1, len(dtypes), index + 1)
        best: dict[str, dict[int, float]] = {LIMIT_COLOUR: {}, PEER_COLOUR: {}, OURS_COLOUR: {}}
        of_dtype = [row for row in rows if row["dtype"] == dtype and row["GB_per_s"]]
        for row in of_dtype:
            elements, rate = int(row["elements"]), float(row["GB_per_s"])
            line = best[_colour(row["method"])]
            line[elements] = max(line.get(elements, 0.0), rate)
        peers = {row["method"] for row in of_dtype if _colour(row["method"]) == PEER_COLOUR}
        names = ("limit: fastest loop over memory", f"best of {len(peers)} other ways, at each size", "accumkernels")
        for (colour, points), name in zip(best.items(), names, strict=True):
            if points:
                width = 4 if colour == LIMIT_COLOUR else 1.5
                axes.plot(list(points), list(points.values()), color=colour, linewidth=width, marker="o", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(dtype, fontsize=9)
        axes.set_xlabel("elements", fontsize=8)
        axes.set_ylabel("GB/s", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, format="png")
    return path


def fits(rows: Rows, path: Path, theme: str) -> Path:
    """A bar per way to see a batch, by kind of memory, with the card's limit; for a light or a dark page."""
    ink, limit = INK[theme], float(rows[0]["limit_GB"])
    figure = Figure(figsize=(8, 0.62 * len(rows) + 1.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for name, (columns, colour) in HELD.items():
        widths = [sum(float(row[column]) for column in columns) for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=name, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.axvline(limit, color=ink, linestyle="--", linewidth=1.5)
    axes.annotate(f" {limit:.0f} GB card", (limit, -0.6), color=ink, fontsize=9, va="center")
    for place, row in enumerate(rows):
        total = float(row["total_GB"])
        text = f" {total:.1f} GB" + (": out of memory" if total > limit else "")
        axes.annotate(text, (total, place), va="center", fontsize=10, fontweight="bold", color=ink)
    axes.set_yticks(range(len(rows)), [row["way"].replace(", ", "\n") for row in rows], fontsize=10)
    axes.set_ylim(len(rows) - 0.55, -0.85)
    axes.set_xlim(0, 1.32 * max(left))
    axes.set_xticks([])
    axes.tick_params(colors=ink, length=0)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(OURS_COLOUR if "accumkernels" in row["way"] else ink)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(HELD), fontsize=8, frameon=False, labelcolor=ink)
    figure.savefig(path, format="png", transparent=True)
    return path


def training(rows: Rows, path: Path) -> Path | None:
    """Tokens per second and peak memory, a line of two panels per dtype and length of windows."""
    rows = [row for row in rows if row["tokens_per_second"]]
    keys = ("model", "dtype", "micro_batches")
    cases = _distinct(rows, *keys)
    if not cases:
        return None
    figure = Figure(figsize=(15, 2.6 * len(cases)), dpi=110, layout="constrained")
    figure.suptitle(f"Training; {_machine(rows[0])}", fontsize=9)
    for index, values in enumerate(cases):
        of_case, title = _matching(rows, keys, values), "{}, {}, {} micro-batches".format(*values)
        for column, label, place in (("tokens_per_second", "tokens per second", 1), ("peak_MB", "peak memory, MB", 2)):
            _bars(figure.add_subplot(len(cases), 2, 2 * index + place), of_case, column, title, label)
    figure.savefig(path, format="png")
    return path


def timeline(rows: Rows, path: Path, machine: str) -> Path:
    """Three panels on the same scale: stock, ours by default, and ours with whole micro-batches; of the last model.

    Args:
        rows: As written, every cell a string.
        path: Of the PNG.
        machine: What to say about where it was measured.
    """
    model, dtype = rows[-1]["model"], rows[-1]["dtype"]
    rows = _matching(rows, ("model", "dtype"), (model, dtype))
    names = [name for (name,) in _distinct(rows, "method") if name in PANELS]
    figure = Figure(figsize=(8, 2.8), dpi=110, layout="constrained")
    figure.suptitle(f"{model}, {dtype}: bytes of tensors alive over one window, op by op\n{machine}", fontsize=7)
    top = 1.05 * max(sum(float(row[kind]) for kind in KINDS) for row in rows if row["method"] in names)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        points = _matching(rows, ["method"], [name])
        heights = [[float(row[kind]) for row in points] for kind in KINDS]
        axes.stackplot(range(len(points)), heights, colors=STACK, labels=KINDS)
        peak = max(map(sum, zip(*heights, strict=True)))
        axes.set_title(f"{name}\npeak {peak:,.1f} MB", fontsize=7)
        axes.set_ylim(0, top)
        axes.tick_params(labelsize=6, labelbottom=False)
    panels[0].set_ylabel("MB", fontsize=7)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(KINDS), fontsize=6, frameon=False)
    figure.savefig(path, format="png")
    return path


def demo(rows: Rows, out: Path) -> Path:
    """A bar per method: its tokens per second in the median run, with its gradient error beside it."""
    names = [name for (name,) in _distinct(rows, "method")]
    labels = {"big batch": "one big batch", "stock accumulation": "stock: loss / K", "FusedAccumulator": "accumkernels"}
    figure = Figure(figsize=(8, 2.3), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        runs = _matching(rows, ["method"], [name])
        rates = [float(row["tokens_per_second"]) for row in runs]
        rate, error = statistics.median(rates), max(float(row["error_full_percent"]) for row in runs)
        colour = LIMIT_COLOUR if name == names[0] else _colour(name)
        axes.barh(place, rate, color=colour, height=0.7)
        peak = statistics.median(float(row["peak_MB"]) for row in runs)
        text = f" {rate:,.0f} tokens/s, {peak:,.0f} MB\n gradient error {error:.2g} %"
        axes.annotate(text, (rate, place), va="center", fontsize=11, fontweight="bold", color="#222222")
    axes.set_yticks(range(len(names)), [labels.get(name, name) for name in names], fontsize=12)
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    first = rows[0]
    size = f"GPT of {int(first['parameters']) / 1e6:.0f} M parameters"
    what = f"{size}, windows of 64 lines, 8 at a time, {first['autocast']}"
    where = f"{first['threads']} threads of {first['device']}, torch {first['torch']}"
    axes.set_title(f"{what}\n{where}", fontsize=8, color="#555555")
    figure.savefig(out)
    return out


def simulated(rows: Rows, path: Path) -> Path:
    """Against the number of ranks: the link's time by its model, of two sizes, and the host's at a window's end."""
    rows = [row for row in rows if row["micro_batches"] == rows[-1]["micro_batches"]]
    first = rows[0]
    figure = Figure(figsize=(15, 4.2), dpi=110, layout="constrained")
    figure.suptitle(
        f"SIMULATED ranks (fake process group, one process), a window of {first['micro_batches']} micro-batches; link "
        f"modelled: {first['alpha_us']} us per hop of a tree, {first['rate_GB_per_s']} GB/s, nothing overlapped\n"
        f"{_machine({**first, 'threads': '1'})}",
        fontsize=9,
    )
    panels = (
        ("link_ms_1e9", "link, ms per window, of 1e9 parameters (model)"),
        ("link_ms", f"link, ms per window, of {int(first['parameters']):,} parameters (model)"),
        ("end_host_ms", "end of a window on the host, ms of process time (measured)"),
    )
    methods = _distinct(rows, "method")
    for index, (column, title) in enumerate(panels):
        axes = figure.add_subplot(1, 3, index + 1)
        for number, (method,) in enumerate(methods):
            points: dict[int, float] = {}
            for row in _matching(rows, ["method"], [method]):
                if row[column]:
                    points[int(row["ranks"])] = points.get(int(row["ranks"]), 0.0) + float(row[column])
            ours = _colour(method) == OURS_COLOUR  # on top, dashed where it covers what it is compared with
            colour, style = (OURS_COLOUR if number == 0 else "#000000", "--") if ours else (LINES[number], "-")
            line = {"color": colour, "linestyle": style, "zorder": 2 + ours, "marker": "o", "markersize": 3}
            if points:
                axes.plot(list(points), list(points.values()), label=method, **line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("ranks", fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    figure.savefig(path, format="png")
    return path


def draw(csv: Path, out: Path) -> list[Path]:
    """Draw what a file has; the answer is the pictures."""
    rows = read_csv(csv)
    out.mkdir(parents=True, exist_ok=True)
    if rows and "point" in rows[0]:
        drawn: list[Path | None] = [timeline(rows, out / f"{csv.stem}.png", _machine(rows[0]))]
    elif rows and "error_full_percent" in rows[0]:
        drawn = [demo(rows, out / f"{csv.stem}.png")]
    elif rows and "limit_GB" in rows[0]:
        drawn = [fits(rows, out / f"{csv.stem}-{theme}.png", theme) for theme in INK]
    elif rows and "link_ms_1e9" in rows[0]:
        drawn = [simulated(rows, out / f"{csv.stem}.png")]
    elif rows and "tokens_per_second" in rows[0]:
        drawn = [training(rows, out / f"{csv.stem}.png")]
    else:
        drawn = [
            accumulate(rows, out / f"{csv.stem}-accumulate.png"),
            windows(rows, out / f"{csv.stem}-window.png"),
            sizes(rows, out / f"{csv.stem}-size.png"),
        ]
    return [path for path in drawn if path is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, help="folder (default: that of the CSV)")
    arguments = parser.parse_args(argv)
    for path in draw(arguments.csv, arguments.out or arguments.csv.parent):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
