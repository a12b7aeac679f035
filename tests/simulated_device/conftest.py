"""Runs the tests of this folder in a process of their own, which has the device for its accelerator and nothing else.

Each process of pytest starts one when it comes to the first of these tests, tells it which test to run, and reports
what happened there. With SIMULATED_DEVICE=1 in the environment everything happens in pytest's own process, for a
debugger.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_device import build

FOLDER = Path(__file__).parent
INSIDE = bool(os.environ.get("SIMULATED_DEVICE"))
CHANNEL = "SIMULATED_DEVICE_CHANNEL"  # in the environment of the process: the pipes of its tasks and answers
ANSWER: dict[str, str] = {}  # of the test that runs


def _here(item: pytest.Item | None) -> bool:
    return item is not None and FOLDER in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests, and skip them where nothing compiles."""
    for item in filter(_here, items):
        item.add_marker("starts")  # at least a compiler
        if build.compiler() is None:
            item.add_marker(pytest.mark.skip(reason="the simulated device needs g++, or a compiler named in CXX"))


# ---- in pytest's process


class Process:
    """The other process, which runs one test after the other."""

    def __init__(self, root: Path) -> None:
        self._output = tempfile.TemporaryFile("w+")
        (tasks, writing), (reading, answers) = os.pipe(), os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        environment |= {"SIMULATED_DEVICE": "1", CHANNEL: f"{tasks} {answers}", "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch warns that kernels of collectives are replaced
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", FOLDER],
            cwd=root,
            env=environment,
            pass_fds=[tasks, answers],
            stdout=self._output,
            stderr=self._output,
        )
        os.close(tasks)
        os.close(answers)
        self._tasks, self._answers = os.fdopen(writing, "w"), os.fdopen(reading)

    def run(self, test: str, following: str | None) -> dict[str, str]:
        """The outcome of a test and its text. What `following` does not need is torn down after it."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([test, following]), file=self._tasks, flush=True)
        answer = self._answers.readline()
        if answer:
            return dict(json.loads(answer))
        self._output.seek(0)
        return {"outcome": "died", "text": f"the process of the device ended:\n{self._output.read()[-5000:]}"}

    def end(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks.close()
        self._process.wait()
        self._answers.close()
        self._output.close()


running = pytest.StashKey[Process]()
following = pytest.StashKey[str | None]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Set up nothing here."""
    if not INSIDE and _here(item):
        item.fixturenames.clear()  # type: ignore[attr-defined]
        item.stash[following] = nextitem.nodeid if nextitem is not None and _here(nextitem) else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report what happens to the test in the other process."""
    if INSIDE or not _here(pyfuncitem):
        return None
    stash = pyfuncitem.session.stash
    if running not in stash:
        stash[running] = Process(pyfuncitem.config.rootpath)
    found = stash[running].run(pyfuncitem.nodeid, pyfuncitem.stash[following])
    if found["outcome"] == "died":
        stash[running].end()
        del stash[running]  # the next test starts another
    if found["outcome"] == "skipped":
        pytest.skip(found["text"])
    if found["outcome"] != "passed":
        pytest.fail(found["text"], pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the other process."""
    if running in session.stash:
        session.stash[running].end()


# ---- in the other process

if INSIDE:

    def pytest_configure(config: pytest.Config) -> None:
        """The device must be there before autograd starts its threads."""
        from tests import simulated_device

        if build.compiler() is not None:
            simulated_device.load()

    def pytest_runtestloop(session: pytest.Session) -> bool | None:
        """Run what the first process asks for."""
        if CHANNEL not in os.environ:
            return None
        items = {item.nodeid: item for item in session.items}
        tasks, answers = map(int, os.environ[CHANNEL].split())
        with os.fdopen(tasks) as reading:
            for line in reading:
                test, after = json.loads(line)
                ANSWER.clear()
                session.config.hook.pytest_runtest_protocol(item=items[test], nextitem=items.get(after))
                os.write(answers, f"{json.dumps(ANSWER)}\n".encode())
        return True

    def pytest_runtest_logreport(report: Any) -> None:
        """Keep the first of set-up, call and tear-down that did not pass."""
        if ANSWER.get("outcome", "passed") == "passed":
            skipped = isinstance(report.longrepr, tuple)
            ANSWER["outcome"], ANSWER["text"] = report.outcome, str(report.longrepr[2] if skipped else report.longrepr)
