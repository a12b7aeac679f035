"""A progress bar on a terminal while sizes are tried, if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def trial_progress(show: bool | None) -> Iterator[Callable[[int, int, int], None]]:
    """Show how far the size being tried has come.

    Args:
        show: Whether to show it; None: on a terminal, if rich is installed.

    Yields:
        A function to call after each step with the size, the steps done and the steps in all.

    Raises:
        ImportError: `show` is True and rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        if show:
            raise ImportError('progress needs rich: pip install "accumkernels[demo]"') from error
        show = False
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda size, done, steps: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("trying batch sizes", total=None)

    def on_step(size: int, done: int, steps: int) -> None:
        bar.update(task, description=f"trying batch size {size}", completed=done, total=steps)

    with bar:
        yield on_step
