"""One of four ranks is killed, or hangs: the others get torch's own error, have taken no wrong step, and end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.killed_ranks import CASES, RANKS

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]
TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the ranks of all cases have left."""
    folder = tmp_path_factory.mktemp("killed")
    script = ROOT / "tests" / "support" / "killed_ranks.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def survivors(folder, name):
    """What each of them noted."""
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(RANKS) if rank != CASES[name].rank]


@each_case
def test_they_end_by_the_error(folder, name):
    """The interpreter's status of an uncaught exception: no deadlock at exit, no crash of a thread that is left."""
    expected = [-signal.SIGKILL if rank == CASES[name].rank else 1 for rank in range(RANKS)]
    assert json.loads((folder / name).read_text()) == expected


@each_case
def test_the_error_is_torchs(folder, name):
    """Not one of ours that hides it; where a rank hangs it is the timeout's, until the first who gets it has gone.

    Where one was killed, ranks are told that its connections ended, but for one whose message was cut in the middle.
    """
    texts = []
    for found in survivors(folder, name):
        kind, text = found["error"]
        assert kind in ("RuntimeError", "DistBackendError", "DistNetworkError")
        assert "gloo" in text or TIMEOUT.search(text)
        texts.append(text)
    if CASES[name].stops:
        assert any(map(TIMEOUT.search, texts))
    elif not CASES[name].again:
        assert not all(map(TIMEOUT.search, texts))


@each_case
def test_no_wrong_step(folder, name):
    """Parameters are those before the window, to the bit; or those after it, where the rank had sent all its sums."""
    for found in survivors(folder, name):
        whole = CASES[name].begun and found["windows"] == 1
        assert found["windows"] == int(whole)
        assert found["as_after" if whole else "as_before"]


def test_it_died_while_sums_were_sent(folder):
    """The case of the last backward is that."""
    assert json.loads((folder / f"last_backward.{CASES['last_backward'].rank}").read_text()) == {"begun": True}
    assert json.loads((folder / f"backward.{CASES['backward'].rank}").read_text()) == {"begun": False}


@pytest.mark.parametrize("name", ["step", "step_between_chunks", "buffers"])
def test_a_lost_window_says_so(folder, name):
    """A loop that catches the error and calls step() again steps nothing."""
    for found in survivors(folder, name):
        assert "ending this window failed, in its sum over ranks or later, and its sums are lost" in found["again"][1]


def test_own_state_is_left(folder):
    """A rank whose state_dict(reduced=True) failed still saves its own, with the micro-batches that it had."""
    for found in survivors(folder, "state_dict"):
        assert found["saved"] == [2, True]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.model == "bare"])
def test_hooks_come_off(folder, name):
    """After remove() the model trains as stock torch trains it."""
    for found in survivors(folder, name):
        assert found["removed"]


def test_survivors_go_on(folder):
    """In a new world, with a new accumulator on the same model, and the right result."""
    for found in survivors(folder, "again"):
        assert found["went_on"]
