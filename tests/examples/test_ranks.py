"""The examples that torchrun starts on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", ["data_parallel", "pipeline"])
def test_torchrun(example):
    """As its docstring says to run it: on two ranks as on one, but for rounding."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(ROOT / "examples" / f"{example}.py"), "--windows", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    apart, moved = map(float, re.search(r"differ by (\S+) at most; .* by (\S+)", done.stdout).groups())
    assert moved > 0
    assert apart < 1e-4 * moved  # fp32, two steps
