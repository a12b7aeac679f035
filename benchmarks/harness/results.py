"""Rows of results and the files they go to."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, object]


def write_csv(path: Path | None, rows: Sequence[Row]) -> None:
    """Rows with their columns in order, if there is a path; None is an empty cell."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path | None, rows: Sequence[Row]) -> None:
    """A list of objects, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def read_csv(path: Path) -> list[dict[str, str]]:
    """As `write_csv` wrote it, every cell a string."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def groups(rows: Iterable[Row], *keys: str) -> dict[tuple[object, ...], list[Row]]:
    """Rows that agree in `keys`, in order of appearance."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found
