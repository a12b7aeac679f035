"""Two ranks, each on its own simulated device, whose collectives run on streams of the group's."""

from __future__ import annotations

import importlib
import pickle
import socket
from pathlib import Path

import pytest
import torch.multiprocessing as mp

SCENARIOS = "tests.support.simulated_rank_scenarios"
NAMES = [
    "sums_in_fp32",
    "sent_early",
    "sent_early_when_fused",
    "sums_in_bf16",
    "sent_early_in_bf16",
    "whole_micro_batches",
    "without_a_wait",
    "stock_ddp",
]


def _rank(rank: int, size: int, port: int, folder: str) -> None:
    """Load the device first: a backward starts autograd's threads, one for each device that is there."""
    from tests import simulated_device

    simulated_device.load()
    from tests.support import ranks

    module = importlib.import_module(SCENARIOS)
    ranks._rank(rank, size, port, folder, [getattr(module, name) for name in NAMES])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each scenario returned on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (2, port, str(folder)), 2)
    by_rank = [pickle.loads(Path(folder, f"2.{rank}").read_bytes()) for rank in range(2)]
    return {name: [of_rank.get(name, "not reached") for of_rank in by_rank] for name in NAMES}


@pytest.mark.parametrize("scenario", NAMES)
def test_ranks(found, scenario):
    """See tests/support/simulated_rank_scenarios.py."""
    from tests.support import ranks

    ranks.check(found, scenario)
