"""find_batch_size on several gloo ranks: they agree, and none hangs when one runs out or fails."""

from __future__ import annotations

import pickle
import socket
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
        return int(found), [trial[:3] for trial in found.tried], found.reason, found.fastest
    except Exception as error:
        return type(error).__name__, str(error)


def _costs(model, **kwargs):
    """The same for measure_step_costs."""
    try:
        return measure_step_costs(
            model, "cpu", 4, input_shape=2, output_shape=2, num_iterations=2, duration=1e-3, **kwargs
        )
    except Exception as error:
        return type(error).__name__, str(error)


def _rank(rank, port, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), world_size=WORLD_SIZE, rank=rank
    )
    answers = {
        "limits": _answer(model=Limited(11 if rank else 37), dataset_size=64),
        "caps": _answer(model=Limited(100), dataset_size=64 if rank else 50),
        "nothing": _answer(model=Limited(0 if rank else 5), dataset_size=8),
        "bug": _answer(model=Limited(3 if rank else 100, Bug), dataset_size=8),
        "argument": _answer(model=Limited(9), dataset_size=-1 if rank else 8),
        "alone": _answer(model=Limited(3 + rank), dataset_size=8, process_group=False),
        "accumulate": _answer(model=Limited(3 + rank), dataset_size=8, accumulate=2),
        "costs": _costs(DistributedDataParallel(Limited(9))),
        "costs alone": _costs(Limited(9), process_group=False),
        "costs bug": _costs(Limited(3 if rank else 9)),
        "ddp": _answer(model=DistributedDataParallel(Limited(5 - rank)), dataset_size=8),
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
def test_agree(answers, case, size, reason):
    """The smallest limit, or cap, of all; all that was tried is the same everywhere."""
    first, second = (answer[case] for answer in answers)
    assert first == second
    assert (first[0], first[2]) == (size, reason)


def test_nothing_fits_one(answers):
    """Then it fits none, and all say so."""
    for answer in answers:
        assert answer["nothing"][0] == "RuntimeError"
        assert "not even the smallest batch fits" in answer["nothing"][1]


@pytest.mark.parametrize(
    ("case", "own", "where"), [("bug", "Bug", "batch size 4"), ("argument", "ValueError", "its arguments")]
)
def test_one_fails(answers, case, own, where):
    """Its own error comes out as it is; the others do not wait, and name the rank."""
    assert answers[1][case][0] == own
    assert answers[0][case] == (
        "RuntimeError",
        f"find_batch_size: rank 1 failed at {where}; its own error says why",
    )


def test_costs(answers):
    """All ranks have the slowest's costs, and a reduction's; a rank alone has none. None waits for one that failed."""
    first, second = (answer["costs"] for answer in answers)
    assert first == second
    assert first.reduction_seconds > 0
    assert [answer["costs alone"].reduction_seconds for answer in answers] == [0.0, 0.0]
    assert answers[0]["costs bug"] == (
        "RuntimeError",
        "measure_step_costs: rank 1 failed at its trials; its own error says why",
    )
    assert "a micro-batch of 4 does not fit on cpu" in answers[1]["costs bug"][1]


def test_alone(answers):
    """With process_group=False each rank answers for itself."""
    assert [answer["alone"][0] for answer in answers] == [3, 4]
