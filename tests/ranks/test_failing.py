"""Ranks that stop: the others get torch.distributed's error within the group's timeout, and never step."""

from __future__ import annotations

import os
import re
import unittest.mock
from datetime import timedelta

import pytest
import torch

import accumkernels as ak
from tests.support.models import mlp
from tests.support.ranks import message, parameters, run

pytestmark = pytest.mark.starts

TIMEOUT = timedelta(seconds=6)  # more than a clean window takes on a busy machine


def _window(rank, group):
    """A model whose ranks have run a clean window, and the first micro-batch of the next."""
    model = mlp()
    acc = ak.FusedAccumulator(model, process_group=group)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(model(torch.full((1, 5), rank + 1.0)).sum())
    acc.step(optimizer)
    acc.backward(model(torch.full((1, 5), rank + 1.0)).sum())
    return model, acc, optimizer


def meets(rank, size):
    """Rank 1 says whether rank 0 had made its accumulator before rank 1 had connected to the library's own group."""
    store, original = torch.distributed.distributed_c10d._get_default_store(), torch.distributed.new_group
    early = []

    def new_group(*args, **kwargs):
        group = original(*args, **kwargs)
        if rank == 1:
            early.append(message(store.wait, ["made"], timedelta(milliseconds=300)) == ("", ""))
        return group

    with unittest.mock.patch.object(torch.distributed, "new_group", new_group):
        acc = ak.FusedAccumulator(mlp(), process_group=torch.distributed.group.WORLD)
    store.set("made", "")
    acc.remove()
    return early


def raises(rank, size):
    """Rank 1 raises before it communicates, and does not come back."""
    model, acc, optimizer = _window(rank, torch.distributed.new_group(timeout=TIMEOUT))
    before = parameters(model)
    if rank == 1:
        model[0].weight.data = model[0].weight.data.double()
    errors = [message(acc.step, optimizer), message(acc.step, optimizer)]
    if rank == 0:
        acc.zero_()
    torch.distributed.barrier()
    return errors, rank == 1 or all(map(torch.equal, before, parameters(model)))


def dies(rank, size):
    """Rank 1 is gone in the middle of a window."""
    model, acc, optimizer = _window(rank, torch.distributed.new_group(timeout=TIMEOUT))
    before = parameters(model)
    if rank == 1:
        os._exit(0)
    return message(acc.step, optimizer), all(map(torch.equal, before, parameters(model)))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Per scenario, what each rank found."""
    return run(2, tmp_path_factory.mktemp("failing"), [meets, raises, dies])


def test_meets(found):
    """Nobody goes on, and perhaps ends, while another rank still connects to the group that was made."""
    assert found["meets"] == [[], [False]]


def test_raises(found):
    """Its own error there, the timeout's here; nothing was stepped, and the sums are lost."""
    ((first, again), unchanged), (raised, _) = found["raises"]
    assert "was torch.float32 at construction and is torch.float64 now" in raised[0][1]
    assert first[0] in ("RuntimeError", "DistBackendError")
    assert re.search("time", first[1], re.IGNORECASE)
    assert "ending this window failed, in its sum over ranks" in again[1]
    assert unchanged


def test_dies(found):
    """The others hear of it, and nothing was stepped."""
    (error, unchanged), gone = found["dies"]
    assert gone == "not reached"
    assert error[0] in ("RuntimeError", "DistBackendError", "DistNetworkError")
    assert unchanged
