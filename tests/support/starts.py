"""The marker `starts` keeps tests that start a process out of `make test`; no other test may start one."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
from collections.abc import Generator

import pytest

_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_READERS = {"git", "nm", "readelf", "uname"}  # they answer in milliseconds
_unmarked: list[str] = []  # the running test, unless it may start processes
_owner = os.getpid()  # forked processes inherit the interpreter's hooks


def _refuse() -> None:
    if _unmarked and os.getpid() == _owner:
        raise RuntimeError(f"{_unmarked[0]} starts a process: mark it with `pytest.mark.starts`")


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in _EVENTS and str(arguments[0] if arguments else "") not in _READERS:
        _refuse()


def install() -> None:
    """From now on, watch this process."""
    sys.addaudithook(_audit)
    start = multiprocessing.process.BaseProcess.start  # it raises no audit event

    def checked(process: multiprocessing.process.BaseProcess) -> None:
        _refuse()
        start(process)

    multiprocessing.process.BaseProcess.start = checked  # type: ignore[method-assign]


def mark(items: list[pytest.Item]) -> None:
    """Mark tests whose fixtures start ranks, without a look at the tests themselves."""
    for item in items:
        if {"two", "four"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("starts")


def watched(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test with its fixtures, from a hook, and refuse processes that it may not start."""
    if item.get_closest_marker("starts") is None:
        _unmarked.append(item.nodeid)
    try:
        return (yield)
    finally:
        _unmarked.clear()
