"""Runs the parts of a stage in turn. None cancels what follows, and a cut loses nothing that was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from .parts import CUT, FAILED, LEFT_OUT, NOT_RUN, PASSED, Outcome, Part

_POLL = 0.2  # seconds
_SAVE_EVERY = 20.0  # seconds: what a kill without warning may lose
_GRACE = 5.0  # seconds for a part to end by itself
SHORTEST = 5.0  # seconds: a part is not begun with less


class Stop:
    """Remembers that somebody asked this process to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def listen(self) -> None:
        """From now on SIGTERM, SIGINT and SIGHUP end the stage in order."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    @property
    def why(self) -> str:
        """For people."""
        return "" if self.signal is None else f"stopped by {signal.Signals(self.signal).name}"


def _end(process: subprocess.Popen) -> None:
    """End a part and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            continue


def run_part(
    part: Part, folder: Path, environment: Mapping[str, str], seconds: float, stop: Stop, save: Callable[[], object]
) -> Outcome:
    """Run one part; its output goes to a log as it comes.

    Args:
        part: What to run.
        folder: Where the log goes.
        environment: All variables.
        seconds: After so many, or after the part's own limit, it is cut.
        stop: Looked at while it runs.
        save: Called now and then.
    """
    cause = part.missing()
    if cause is not None:
        return Outcome(part.name, LEFT_OUT, 0.0, cause)
    start = time.monotonic()
    limit = min(part.seconds, seconds)
    path = folder / f"{part.name}.log"
    with path.open("wb") as log:
        try:
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **part.environment},
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(part.name, FAILED, 0.0, str(error))
        saved, why = start, ""
        while process.poll() is None:
            now = time.monotonic()
            why = stop.why or (f"longer than {limit:.0f} s" if now - start > limit else "")
            if why:
                break
            if now - saved > _SAVE_EVERY:
                saved = now
                save()
            try:
                process.wait(_POLL)
            except subprocess.TimeoutExpired:
                continue
        _end(process)  # also what a part that has ended left behind
    elapsed = time.monotonic() - start
    text = path.read_text(errors="replace")
    try:
        part.then(text)
    except Exception as error:  # a log in an unknown form: the log itself is there
        why = why or f"its log was not understood: {error!r}"
        return Outcome(part.name, CUT if stop.signal else FAILED, elapsed, why)
    if why:
        return Outcome(part.name, CUT, elapsed, why)
    if process.returncode:
        return Outcome(part.name, FAILED, elapsed, reason(text, process.returncode))
    return Outcome(part.name, PASSED, elapsed)


def reason(log: str, status: int) -> str:
    """The line of a log that says most about a failure."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    failing = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if failing:
        rest = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
        return failing[0].partition(" - ")[0] + rest
    return (lines or [f"exit status {status}"])[-1][:200]


def run(
    parts: Sequence[Part],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
    stop: Stop,
    save: Callable[[list[Outcome]], object],
) -> list[Outcome]:
    """Run a stage.

    Args:
        parts: In this order.
        folder: Logs and `outcomes.jsonl` go there, a line as soon as a part has ended.
        environment: All variables.
        seconds: What the whole stage may take; parts for which none are left do not run.
        stop: Ends the stage when it is asked to.
        save: Called with the outcomes so far after each part, and now and then while one runs.
    """
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, 1):
        left = deadline - time.monotonic()
        if stop.signal is not None or left < SHORTEST:
            outcome = Outcome(part.name, NOT_RUN, 0.0, stop.why or "no time was left")
        else:
            print(f"[{number}/{len(parts)}] {part.name} ...", flush=True)
            outcome = run_part(part, folder, environment, left, stop, lambda: save(outcomes))
        outcomes.append(outcome)
        why = f": {outcome.why}" if outcome.why else ""
        print(f"[{number}/{len(parts)}] {part.name}: {outcome.status} ({outcome.seconds:.0f} s){why}", flush=True)
        with (folder / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(vars(outcome)) + "\n")
        save(outcomes)
    return outcomes
