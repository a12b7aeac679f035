"""A rank, or the machine of a rank, is killed inside a window, and torchrun goes on from what was saved inside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]
JOIN = timedelta(seconds=200)


def torchrun(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start torchrun with the example, which saves in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    split = arguments.index("--")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", *arguments[:split]]
        + [str(ROOT / "examples" / "elastic.py"), "--folder", str(folder / "checkpoints"), *arguments[split + 1 :]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[list[str], float, float, float]:
    """Wait for it: where it went on, and how far its parameters are from an uninterrupted run's, fp64's, the start."""
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.terminate()  # if it still runs, torchrun ends its ranks
    assert process.returncode == 0, output
    found = re.search(r"differs by (\S+) from a run .* by (\S+)\nfrom fp64; .* by (\S+)", output)
    assert found, output
    return re.findall(r"(. ranks go on from .*)", output), *map(float, found.groups())


def test_as_many_ranks(tmp_path):
    """To the last bit, in numbers whose sums depend on their order; fp64 says that it is the right result."""
    process = torchrun(tmp_path, "--standalone", "--nproc-per-node", "4", "--", "--kill", "rank")
    went_on, uninterrupted, fp64, moved = result(process)
    assert went_on == ["4 ranks go on from window 1, after 8 micro-batches, saved by 4 ranks"]
    assert uninterrupted == 0
    assert 0 < fp64 < 1e-5 * moved


def test_one_rank_fewer(tmp_path):
    """Two agents, of three ranks and one: torchrun goes on without the other. To the last bit, where sums are exact."""
    rendezvous = tmp_path / "rendezvous"  # a file: no port that somebody else may take
    elastic = ["--nnodes", "1:2", "--local-addr", "127.0.0.1", "--rdzv-id", "test", "--rdzv-backend", "c10d"]
    elastic += ["--rdzv-endpoint", str(rendezvous), "--rdzv-conf"]
    conf = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout="
    lost = torchrun(
        tmp_path, *elastic, conf + "200", "--nproc-per-node", "1", "--", "--whole-numbers", "--kill", "machine"
    )
    try:
        # The first to come sets how long the others may take: 200 s here, and 1 s when the one that is left is alone.
        torch.distributed.FileStore(str(rendezvous)).wait(["torch.rendezvous.test"], JOIN)
        left = torchrun(tmp_path, *elastic, conf + "1", "--nproc-per-node", "3", "--", "--whole-numbers")
        went_on, uninterrupted, fp64, moved = result(left)
    finally:
        lost.terminate()
        lost.communicate()
    assert lost.returncode < 0
    assert went_on == ["3 ranks go on from window 1, after 8 micro-batches, saved by 4 ranks"]
    assert (uninterrupted, fp64) == (0, 0)
    assert moved > 0.1
