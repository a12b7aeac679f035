"""A run is killed and resumed in a new process, from behind every micro-batch and every step: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.resume_run import MICRO_BATCHES, MODES, WINDOWS

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]


def start(what: str, mode: str, folder: Path) -> list[tuple[int, str]]:
    """Run tests/support/resume_run.py on every rank; returns exit status and output of each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests" / "support" / "resume_run.py", what, mode, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for rank in range(MODES[mode].ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_killed_and_resumed(mode, tmp_path):
    """Parameters, optimizer, scaler, norms and noise scale, on all ranks."""
    for status, output in start("kill", mode, tmp_path):
        assert status == 9, output
    for status, output in start("resume", mode, tmp_path):
        assert status == 0, output
        assert f"resumed from {WINDOWS * (MICRO_BATCHES + 1) - 1} cuts" in output
