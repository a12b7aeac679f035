"""What a stage is made of, and what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

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
