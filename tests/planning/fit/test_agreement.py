"""find_batch_size on several gloo ranks: the smallest answer counts, and no rank waits for one that failed."""

from __future__ import annotations

import pickle
import socket
import unittest.mock
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from accumkernels.planning.costs import measure_step_costs

pytestmark = pytest.mark.starts

WORLD_SIZE = 2


class Bug(Exception):
    """A rank's own."""


class Limited(nn.Module):
    """Out of memory, or another error, beyond `limit` samples."""

    def __init__(self, limit, error=torch.OutOfMemoryError):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.limit, self.error = limit, error

    def forward(self, x):
        """Run, or do not."""
        if len(x) > self.limit:
            raise self.error("CUDA out of memory")
        return self.layer(x)


def _answer(**kwargs):
    """The result, or the error by class and text."""
    try:
        found = ak.find_batch_size(
            device="cpu", input_shape=(2,), output_shape=(2,), num_iterations=2, mode="binsearch", **kwargs
        )
        return int(found), [trial[0] for trial in found.tried], found.reason, found.fastest <= found
    except Exception as error:
        return type(error).__name__, str(error)


def _collectives(call):
    """How many collectives a call begins."""
    gather = torch.distributed.all_gather_object
    with unittest.mock.patch.object(torch.distributed, "all_gather_object", side_effect=gather) as counted:
        call()
    return counted.call_count


def _costs(model):
    return measure_step_costs(model, "cpu", 4, input_shape=2, output_shape=2, num_iterations=2, duration=1e-3)


def _rank(rank, port, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), world_size=WORLD_SIZE, rank=rank
    )
    wrapped = DistributedDataParallel(Limited(9))
    answers = {
        "limits": _answer(model=Limited(11 if rank else 37), dataset_size=64),
        "caps": _answer(model=Limited(100), dataset_size=64 if rank else 50),
        "nothing": _answer(model=Limited(0 if rank else 5), dataset_size=8),
        "bug": _answer(model=Limited(3 if rank else 100, Bug), dataset_size=8),
        "argument": _answer(model=Limited(9), dataset_size=-1 if rank else 8),
        "alone": _answer(model=Limited(3 + rank), dataset_size=8, process_group=False),
        "accumulate": _answer(model=Limited(3 + rank), dataset_size=8, accumulate=2),
        "ddp": _answer(model=DistributedDataParallel(Limited(5 - rank)), dataset_size=8),
        "collectives": _collectives(lambda: _answer(model=Limited(11 if rank else 37), dataset_size=64)),
        "costs": _costs(wrapped) if rank else None,
    }
    with open(f"{path}.{rank}", "wb") as file:
        pickle.dump(answers, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Per rank, what each case gave."""
    path = tmp_path_factory.mktemp("ranks") / "answers"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(path)), nprocs=WORLD_SIZE)
    return [pickle.loads((path.parent / f"answers.{rank}").read_bytes()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize(
    ("case", "size", "reason"),
    [("limits", 11, "oom"), ("caps", 50, "dataset"), ("accumulate", 3, "oom"), ("ddp", 4, "oom")],
)
def test_smallest(answers, case, size, reason):
    """The smallest answer of all, with its reason; no rank names a larger size as its fastest."""
    for found, _, why, fastest in (answer[case] for answer in answers):
        assert (found, why, fastest) == (size, reason, True)


def test_each_tries_alone(answers):
    """A rank tries the sizes that it would try alone, and communicates once."""
    assert [answer["limits"][1] for answer in answers] == [
        [1, 2, 4, 8, 16, 32, 64, 48, 40, 36, 38, 37],
        [1, 2, 4, 8, 16, 12, 10, 11],
    ]
    assert [answer["collectives"] for answer in answers] == [1, 1]


@pytest.mark.parametrize(
    ("case", "failing", "own", "text"),
    [
        ("bug", 1, "Bug", ""),
        ("argument", 1, "ValueError", "dataset_size must be at least 1, got -1"),
        ("nothing", 1, "RuntimeError", "not even the smallest batch fits"),
    ],
)
def test_one_fails(answers, case, failing, own, text):
    """Its own error comes out as it is; the others do not wait, and name the rank."""
    assert answers[failing][case][0] == own
    assert text in answers[failing][case][1]
    expected = f"find_batch_size: rank {failing} failed; its own error says why"
    assert answers[1 - failing][case] == ("RuntimeError", expected)


def test_costs(answers):
    """A rank measures its costs alone, whatever the others do, and also of a DistributedDataParallel module."""
    assert answers[0]["costs"] is None
    assert answers[1]["costs"].samples_per_second[4] > 0
    assert answers[1]["costs"].reduction_seconds == 0.0


def test_alone(answers):
    """With process_group=False each rank answers for itself."""
    assert [answer["alone"][0] for answer in answers] == [3, 4]
