"""Shows progress: live bars on a terminal, an occasional line in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A bar per method with its loss and the time left; `stage` names the current activity.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = "while setting up"
        self._steps = 0
        self._done = 0
        self._begin = 0.0
        self._bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]:<11}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin_training(self, names: Sequence[str], steps: int) -> None:
        """Announce `steps` windows for each of `names`."""
        self._steps = steps
        self._done = 0
        self._begin = time.perf_counter()
        self.stage = f"after 0 of {steps} windows"
        self._tasks = {name: self._bars.add_task(name, total=steps, note="") for name in names}

    def trained(self, losses: dict[str, float]) -> None:
        """Count one window; `losses` are by name."""
        self._done += 1
        self.stage = f"after {self._done} of {self._steps} windows"
        for name, loss in losses.items():
            self._bars.update(self._tasks[name], advance=1, note=f"loss {loss:.3f}")
        tenth = self._done * 10 // self._steps
        if not self.console.is_terminal and tenth > (self._done - 1) * 10 // self._steps:
            left = (time.perf_counter() - self._begin) / self._done * (self._steps - self._done)
            values = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            self.console.print(f"window {self._done}/{self._steps}, {left:.0f} s left, loss: {values}", soft_wrap=True)

    def begin_measuring(self, total: int) -> None:
        """Announce `total` measurements."""
        self.stage = "while measuring"
        self._measuring = self._bars.add_task("measurements", total=total, note="")
        if not self.console.is_terminal:
            self.console.print("measuring gradient errors and memory")

    def measured(self) -> None:
        """Count one measurement."""
        self._bars.advance(self._measuring)
