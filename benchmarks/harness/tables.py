"""Results as text, and how far a run is: what is printed, with nothing but Python's standard library."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Table:
    """Cells in columns, the first to the left and all others to the right.

    Args:
        title: The line above.
        headers: One per column.
    """

    def __init__(self, title: str, headers: Sequence[str]) -> None:
        self._title = title
        self._lines = [list(headers)]

    def add(self, *cells: object) -> None:
        """Add a line; None is an empty cell."""
        self._lines.append(["" if cell is None else str(cell) for cell in cells])

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._lines, strict=True)]
        lines = []
        for cells in self._lines:
            padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
            lines.append("  ".join(padded).rstrip())
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self._title, lines[0], rule, *lines[1:], ""])

    def print(self) -> None:
        """Print it at once: a run that is cut has shown what it had."""
        print(self, flush=True)


def progress(text: str) -> None:
    """Show on a terminal's standard error what runs now; an empty text takes it away."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def track(items: Sequence[_T], what: str) -> Iterator[_T]:
    """Go over items and show how far that is."""
    for number, item in enumerate(items, 1):
        progress(f"{what}: {number} of {len(items)}")
        yield item
    progress("")
