"""Data parallel windows on 2 and 4 gloo ranks: data_parallel_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

import types

import pytest
import torch

import accumkernels as ak
from accumkernels.ranks import sender as chunks
from accumkernels.ranks.sender import _IN_FLIGHT, ChunkSender
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


class OneRank:
    """A group of one rank: what is sent is there when somebody waits for it."""

    size, rank, own = 1, 0, False

    def __init__(self, comm_dtype):
        self.comm_dtype = comm_dtype
        self.sent, self.waited = 0, []

    def send(self, piece, dtype):
        number = self.sent
        self.sent += 1
        return piece.to(dtype), types.SimpleNamespace(wait=lambda: self.waited.append(number))


def looks_at_the_end(layers, comm_dtype, monkeypatch):
    """The number of chunks; for each look, how many were sent and had come, and offset and size of what it got."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    acc = ak.FusedAccumulator(model, process_group=False)
    acc.backward(model(torch.ones(2, 16)).sum())
    group, looks = OneRank(comm_dtype), []
    sender = ChunkSender(group, early=False)
    sender.follow(acc.engine.store.buffers)
    sender.send_before_stats()

    def look(_, parts):
        looks.append((group.sent, len(group.waited), [(p.storage_offset(), p.numel()) for p in parts]))

    sender.send_rest(look)
    end = 0
    for offset, numel in (span for _, _, spans in looks for span in spans):  # each sum once
        assert offset >= end
        end = offset + numel
    assert sum(numel for _, _, spans in looks for _, numel in spans) == sum(p.numel() for p in model.parameters())
    count = len(sender._chunks)
    assert group.waited == list(range(count))
    return count, looks


@pytest.mark.parametrize("layers", [1, 2, 3, 20])
def test_chunks_are_looked_at_by_halves(layers, monkeypatch):
    """After they have come, in few looks; the last one is of one chunk. No look keeps the link waiting."""
    count, looks = looks_at_the_end(layers, torch.float32, monkeypatch)
    assert len(looks) <= count.bit_length() + 1
    assert looks[-1][1] - (looks[-2][1] if len(looks) > 1 else 0) == 1
    assert all(sent == count for sent, _, _ in looks)


@pytest.mark.parametrize("layers", [1, 20])
def test_narrower_chunks_are_looked_at_one_by_one(layers, monkeypatch):
    """With as many as may be alive on their way meanwhile."""
    count, looks = looks_at_the_end(layers, torch.bfloat16, monkeypatch)
    assert [come for _, come, _ in looks] == list(range(1, count + 1))
    assert all(sent == min(come - 1 + _IN_FLIGHT, count) for sent, come, _ in looks)
