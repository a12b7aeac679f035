"""What a stage found, as a table, and what to do next."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.tables import Table

from .parts import CUT, FAILED, LEFT_OUT, NOT_RUN, Outcome

GOAL = 0.92  # of the rate of a copy on the device, for an accumulate of 64 million elements and more
_LARGE = 64_000_000
SIMULATED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kernels_simulated.csv"
_OURS = "accumkernels"


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """A line per part."""
    found = Table(title, ("part", "result", "seconds", "why"))
    for outcome in outcomes:
        found.add(outcome.name, outcome.status, f"{outcome.seconds:.0f}", outcome.why)
    return found


def next_steps(stage: int, outcomes: Sequence[Outcome], folder: Path, commit: str, rehearse: bool) -> list[str]:
    """What to do now, the most important first."""
    by_status: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_status.setdefault(outcome.status, []).append(outcome)
    steps = []
    for outcome in by_status.get(FAILED, []):
        if outcome.name == "build":
            steps.append(
                f"Mend the build first ({folder / 'build.log'}): all that follows used an older library or none."
            )
        else:
            steps.append(f"Look at {folder / outcome.name}.log: {outcome.why}")
    for outcome in (*by_status.get(CUT, []), *by_status.get(NOT_RUN, [])):
        steps.append(f"Run what is missing: make gpu-check STAGE={stage} PARTS={outcome.name} ({outcome.why}).")
    for outcome in by_status.get(LEFT_OUT, []):
        if not rehearse:
            steps.append(f"{outcome.name} is left out: {outcome.why}.")
    if not rehearse:
        steps += figures(folder)
    if commit == "unknown":
        steps.append("Say which commit this is: ACCUMKERNELS_COMMIT=$(git rev-parse --short HEAD).")
    following = "" if stage == 4 else f"make gpu-check STAGE={stage + 1} comes next; "
    steps.append(f"{following}commit the CSVs that are worth it to benchmarks/results.")
    return steps


def headlines(folder: Path) -> list[str]:
    """Ours and the best peer of each large list and of the tiny one, as far as they are measured."""
    found = []
    for path in sorted(folder.glob("kernels_*.csv")):
        with path.open(newline="") as file:
            rows = [r for r in csv.DictReader(file) if (r["table"], r["gradients"]) == ("accumulate", "cold")]
        for ours in (r for r in rows if r["method"] == _OURS):
            same = [r for r in rows if all(r[k] == ours[k] for k in ("shapes", "dtype", "elements"))]
            peers = [r for r in same if not r["method"].startswith((_OURS, "limit:"))]
            text = f"{ours['shapes']}, {ours['dtype']}, {int(ours['elements']):,} elements: {_times(ours)}, "
            text += f"{ours['GB_per_s']} GB/s, {ours['fraction_of_copy']} of a copy"
            if peers:
                best = min(peers, key=lambda r: float(r["ms_median"]))
                text += f"; {best['method']}: {_times(best)}"
            found.append(text)
    return found


def beside_simulation(folder: Path, simulated: Path = SIMULATED) -> Iterator[str]:
    """Each row that tests/cuda_device has timed, and what a simulator says of it: a GPU tests both."""
    with simulated.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["kernels"] in ("any", "now")]
    for path in sorted(folder.glob("device_time_*.csv")):
        with path.open(newline="") as file:
            for measured in csv.DictReader(file):
                said = [f"{r['fraction_of_copy']} ({r['gpu']})" for r in rows if r["row"] == measured["row"]]
                text = f"{measured['row']}: {measured['fraction_of_copy']} measured"
                yield f"{text}; simulated: {', '.join(said)}" if said else text


def _times(row: dict[str, str]) -> str:
    text = f"{row['ms_median']} ms"
    if row["host_ms"]:
        text += f" (host {row['host_ms']}, device {row['device_ms'] or 'unknown'})"
    return text


def figures(folder: Path) -> Iterator[str]:
    """What the results say that should not be so."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if rows and {"table", "fraction_of_copy"} <= rows[0].keys():
            yield from _kernels(rows)
        elif rows and "store_sectors_per_request" in rows[0]:
            yield from _counters(rows)


def _kernels(rows: list[dict[str, str]]) -> Iterator[str]:
    for row in rows:
        case = f"{row['table']}, {row['shapes']}, {row['dtype']}"
        large = int(row["elements"] or 0) >= _LARGE
        if row["method"] == _OURS and row["table"] == "accumulate" and large and row["fraction_of_copy"]:
            if float(row["fraction_of_copy"]) < GOAL:
                yield (
                    f"{case}, gradients {row['gradients']}: {row['fraction_of_copy']} of the copy, {GOAL} is the goal: "
                    "stage 4 says why."
                )
        peer = row["table"] in ("accumulate", "window") and not row["method"].startswith((_OURS, "limit:"))
        if peer and row["ratio_to_ours"] and float(row["ratio_to_ours"]) < 1:
            length = f", {row['micro_batches']} micro-batches" if row["table"] == "window" else ""
            yield f"{case}{length}: {row['method']} takes {row['ratio_to_ours']} of our time."


def _counters(rows: list[dict[str, str]]) -> Iterator[str]:
    for row in rows:
        percent = float(row["dram_percent"] or 0)
        if float(row["us"] or 0) > 50 and percent < 70:
            sectors = f"{row['load_sectors_per_request']} and {row['store_sectors_per_request']} sectors"
            yield (
                f"{row['backend']} {row['kernel'][:80]}: {percent:g} % of DRAM's rate, {sectors} per load and store "
                "request (16 at best for 16 bytes a thread)."
            )
