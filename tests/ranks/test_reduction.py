"""Data parallel windows on 2 and 4 gloo ranks: data_parallel_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

import types

import pytest
import torch

import accumkernels as ak
from accumkernels.accumulator import parts_of
from accumkernels.ranks import reduction
from tests.support import coupled_scenarios as coupled
from tests.support import data_parallel_metrics_scenarios as metrics
from tests.support import data_parallel_scenarios as training
from tests.support import data_parallel_state_scenarios as checkpoints
from tests.support.ranks import check

TWO_RANKS = training.TWO_RANKS + metrics.TWO_RANKS + checkpoints.TWO_RANKS + coupled.TWO_RANKS
FOUR_RANKS = training.FOUR_RANKS + checkpoints.FOUR_RANKS


def test_two_ranks(two, scenario):
    """See the function of that name."""
    check(two, scenario)


def test_four_ranks(four, scenario):
    """See the function of that name."""
    check(four, scenario)


class Alone:
    """A group of one rank: what is sent is there when somebody waits for it."""

    size, rank, own, comm_dtype = 1, 0, False, torch.float32

    def __init__(self):
        self.events = []

    def send(self, piece, dtype):
        number = sum(kind == "send" for kind, _ in self.events)
        self.events.append(("send", number))
        return piece, types.SimpleNamespace(wait=lambda: self.events.append(("wait", number)))

    def share(self):
        """No module buffers."""


@pytest.mark.parametrize("layers", [1, 2, 3, 20])
def test_chunks_are_looked_at_by_halves(layers, monkeypatch):
    """Each sum once, after it has come, in few looks; the last one is of one chunk, which alone is waited for."""
    monkeypatch.setattr(reduction, "CHUNK_BYTES", 512)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    acc = ak.FusedAccumulator(model, process_group=False)
    acc.backward(model(torch.ones(2, 16)).sum())
    buffers = parts_of(acc).store.buffers
    group, looks = Alone(), []
    ranks = reduction.Reduction(group, 2 * layers, early=False)
    ranks.follow(buffers)
    ranks._list_chunks()
    chunks = len(ranks._chunks)

    def look(buffer, parts):
        waited = sum(kind == "wait" for kind, _ in group.events)
        looks.append((waited, sorted((p.storage_offset(), p.numel()) for p in parts)))

    ranks.reduce(look)
    assert [number for kind, number in group.events if kind == "wait"] == list(range(chunks))
    assert len(looks) <= chunks.bit_length() + 1
    assert looks[-1][0] - (looks[-2][0] if len(looks) > 1 else 0) == 1
    end = 0
    for offset, numel in (span for _, spans in looks for span in spans):
        assert offset >= end
        end = offset + numel
    seen = sum(numel for _, spans in looks for _, numel in spans)
    assert seen == sum(p.numel() for p in model.parameters())
