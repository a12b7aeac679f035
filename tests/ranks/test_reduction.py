"""Data parallel windows on 2 and 4 gloo ranks: data_parallel_*scenarios.py and coupled_scenarios.py."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import accumkernels as ak
from accumkernels.ranks import sender as chunks
from accumkernels.ranks.sender import _IN_FLIGHT, ChunkSender, Sent, cut
from tests.support import coupled_scenarios as coupled
from tests.support import data_parallel_metrics_scenarios as metrics
from tests.support import data_parallel_scenarios as training
from tests.support import data_parallel_state_scenarios as checkpoints
from tests.support import data_parallel_torch_scenarios as around
from tests.support.ranks import check

TWO_RANKS = training.TWO_RANKS + around.TWO_RANKS + metrics.TWO_RANKS + checkpoints.TWO_RANKS + coupled.TWO_RANKS
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
    group, looks, sent = OneRank(comm_dtype), [], Sent()
    sender = ChunkSender(group, early=False)
    sender.follow(acc.engine.store.buffers)
    sender.send_before_stats(sent)

    def look(_, parts):
        looks.append((group.sent, len(group.waited), [(p.storage_offset(), p.numel()) for p in parts]))

    sender.send_rest(sent, look)
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


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_chunks_with_an_fp32_parameter_are_sent_in_fp32(dtypes):
    """comm_dtype="auto" narrows the sums of bf16 parameters alone."""
    mixed = ak.FusedAccumulator([nn.Parameter(torch.zeros(40, dtype=dtype)) for dtype in dtypes])
    alike = ak.FusedAccumulator([nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))])
    for acc, expected in ((mixed, torch.float32), (alike, torch.bfloat16)):
        (buffer,) = acc.engine.store.buffers
        assert {chunk.sent_in for chunk in cut(buffer, "auto")} == {expected}


class Doubled:
    """A process group of two ranks with the same sums."""

    own, comm_dtype = True, torch.float32

    def send(self, piece, dtype):
        piece.mul_(2)
        return piece, self

    def wait(self):
        """Nothing is on its way."""


class Negated(torch.autograd.Function):
    """Its gradient has the negative bit, so that no product is made from its address."""

    @staticmethod
    def forward(ctx, x):
        return -x

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(grad)


def test_a_weight_that_gets_its_gradient_in_two_ways_is_sent_once(monkeypatch):
    """One product is added where it is made, and the other's gradient is made first, and handed over before."""
    monkeypatch.setattr("accumkernels.ranks.sender.CHUNK_BYTES", 256)
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(16, 16))
    x = torch.randn(4, 16, requires_grad=True)

    def loss():
        return Negated.apply(x.mm(w).tanh().mm(w)).square().sum()

    expected = torch.autograd.grad(loss(), w)[0]
    engine = ak.FusedAccumulator([w], fuse_weight_gradients=True, release="backward", bucket_bytes=1).engine
    sender = ChunkSender(Doubled(), early=True)
    sender.follow(engine.store.buffers)
    sender.note_same_layout()
    monkeypatch.setattr(engine.runner, "_sender", sender)
    engine.backward(loss(), engine.micro_batch(1.0, last=True))
    sender.send_rest(engine.window.sent, lambda buffer, parts: None)
    torch.testing.assert_close(engine.store.buffers[0].views[0], 2 * expected)
