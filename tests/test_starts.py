"""Tests without the marker `starts` start no process: `make test` stays quick."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

__test__ = not torch.cuda.is_available()  # see conftest.py

STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "--version"], check=True),
    "shell": lambda: os.system("true"),
    "fork": os.fork,
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process().start(),
    "torch": lambda: torch.multiprocessing.spawn(print),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_is_refused(start: Callable[[], object]) -> None:
    """And the error says what to do."""
    with pytest.raises(RuntimeError, match=r"test_is_refused.* starts a process: mark it with `pytest.mark.starts`"):
        start()


@pytest.mark.starts
def test_is_left_alone() -> None:
    """With the marker."""
    assert subprocess.run([sys.executable, "--version"]).returncode == 0
