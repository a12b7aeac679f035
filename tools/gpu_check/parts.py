"""What a stage is made of, and what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import machine

ROOT = Path(__file__).resolve().parents[2]

PASSED, FAILED, CUT, LEFT_OUT, NOT_RUN = "passed", "failed", "cut", "left out", "not run"


@dataclasses.dataclass(frozen=True)
class Part:
    """A command that a stage runs.

    Attributes:
        name: In the summary, and of its log.
        command: The program and its arguments.
        seconds: After so many it is cut; what it has written by then stays.
        environment: Variables on top of the stage's.
        missing: Why it cannot run on this machine; None where it can. Asked when its turn comes.
        then: Called with the part's log when it has ended, to write what the log holds as results.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: Callable[[], str | None] = lambda: None
    then: Callable[[str], None] = lambda log: None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Attributes:
        status: One of the constants above.
        why: Of what did not pass, in one line.
    """

    name: str
    status: str
    seconds: float
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a stage runs with.

    Attributes:
        python: The interpreter that has torch.
        rehearse: On the CPU with tiny sizes.
        capability: Of the GPU, for instance "9.0"; None in a rehearsal.
        gpus: How many there are.
        folder: Where results go.
        environment: To look for programs in.
    """

    python: str
    rehearse: bool
    capability: str | None
    gpus: int
    folder: Path
    environment: Mapping[str, str]

    @property
    def device(self) -> str:
        """Of the benchmarks."""
        return "cpu" if self.rehearse else "cuda"

    def file(self, name: str) -> str:
        """A result's path; `{}` in its name is the device."""
        return str(self.folder / name.format(self.device))

    def missing(self, *modules: str) -> Callable[[], str | None]:
        """Why what needs all these modules cannot run."""

        def ask() -> str | None:
            lacking = [name for name in modules if not machine.has_module(self.python, name)]
            return f"{', '.join(lacking)} not installed" if lacking else None

        return ask
