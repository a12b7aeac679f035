"""What tests/ranks/test_reduction.py runs on every rank: states of data parallel ranks, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support import ranks
from tests.support.data_parallel_scenarios import assert_close, build, data, half, of_all, sgd, true_grads
from tests.support.models import mlp
from tests.support.ranks import message, parameters


def states_of_other_ranks(rank, size):
    """Inside a window each rank loads its own; between windows any; windows that differ are an error on all ranks."""
    model, acc = build(release="microbatch")
    optimizer = sgd(acc)
    between = acc.state_dict()
    half(acc, model, rank)
    own = acc.state_dict()
    everyones = [None] * size
    dist.all_gather_object(everyones, own)
    other = everyones[(rank + 1) % size]
    kind, text = message(acc.load_state_dict, other)
    assert kind == "RuntimeError"
    assert f"saved by rank {(rank + 1) % size} after 2 micro-batches" in text
    assert "state_dict(reduced=True)" in text
    alone = ak.FusedAccumulator(mlp(torch.float64), process_group=False)
    kind, text = message(alone.load_state_dict, everyones[0])
    assert kind == "RuntimeError"
    assert f"a window that {size} ranks shared, here are 1" in text
    acc.load_state_dict(own)
    half(acc, model, rank, 2, 3)
    acc.finalize(optimizer)
    assert_close([p.grad for p in model.parameters()], true_grads(copy.deepcopy(model), of_all(size)))
    averaged = acc.state_dict()
    dist.all_gather_object(everyones, averaged)
    acc.load_state_dict(everyones[0])
    acc.finalize(optimizer)
    acc.zero_()
    # Rank 0 goes back to the first window, the others are in the second.
    if rank == 0:
        acc.load_state_dict(between)
    before = parameters(model)
    half(acc, model, rank)
    text = message(acc.step, optimizer)[1]
    assert f"different windows, by rank {[0] + [1] * (size - 1)}" in text
    assert_close(parameters(model), before, rtol=0, atol=0)
    acc.zero_()
    acc.load_state_dict(between)
    half(acc, model, rank)
    acc.step(optimizer)
    assert not acc.step_was_skipped


def reduced_states(rank, size):
    """The same on all ranks; one process, and as many ranks, go on from it inside the window."""
    for noise in (False, True):
        model, acc = build(release="microbatch", noise_scale=noise)
        half(acc, model, rank, end=2 if rank == 0 else 1)
        state = acc.state_dict(reduced=True)
        everyones = [None] * size
        dist.all_gather_object(everyones, state)
        for other in everyones:
            assert state.keys() == other.keys()
            assert_close(other["sums"].values(), state["sums"].values(), rtol=0, atol=0)
            assert {k: v for k, v in other.items() if k not in ("sums", "state")} == {
                k: v for k, v in state.items() if k not in ("sums", "state")
            }
        assert state["window"]["micro_batches"] == 2

        used = [part for r in range(size) for part in data(r)[: 2 if r == 0 else 1]] + data(0)[2:]
        expected = true_grads(mlp(torch.float64), used)
        resumed_model, resumed = build(release="microbatch", noise_scale=noise)
        alone_model = mlp(torch.float64)
        alone = ak.FusedAccumulator(alone_model, process_group=False, noise_scale=noise)
        scales = []
        for m, a in ((resumed_model, resumed), (alone_model, alone)):
            a.load_state_dict(state)
            assert a.micro_batches == 2
            if rank == 0 or a is alone:
                half(a, m, 0, 2, 3)
            a.finalize(sgd(a))
            assert_close([p.grad for p in m.parameters()], expected)
            if noise:
                scales.append(float(a.noise_scale()))
        if noise:
            assert scales[0] == pytest.approx(scales[1], rel=1e-9)


def through_dcp(rank, size):
    """A reduced state, saved and loaded by torch.distributed.checkpoint inside a window."""
    model, acc = build(release="microbatch")
    half(acc, model, rank)
    path = ranks.shared / "reduced"
    dcp.save({"acc": acc.state_dict(reduced=True)}, checkpoint_id=path)
    other, resumed = build(release="microbatch")
    template = resumed.state_dict(reduced=True)
    dcp.load({"acc": template}, checkpoint_id=path)
    resumed.load_state_dict(template)
    half(resumed, other, rank, 2, 3)
    resumed.finalize(sgd(resumed))
    assert_close([p.grad for p in other.parameters()], true_grads(mlp(torch.float64), of_all(size)))


def loaded_on_more(rank, size):
    """What two ranks saved inside a window, four go on from: it holds the micro-batches of all."""
    model, acc = build(release="microbatch")
    template = acc.state_dict(reduced=True)
    dcp.load({"acc": template}, checkpoint_id=ranks.shared / "reduced")
    acc.load_state_dict(template)
    half(acc, model, rank, 2, 3)
    acc.finalize(sgd(acc))
    used = [part for r in range(2) for part in data(r)[:2]] + [data(r)[2] for r in range(4)]
    assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), used))


def one_state_for_all(rank, size):
    """dcp.save would keep one rank's sums: refused inside a window; what is saved between windows, all load."""

    class Saved:
        """`torch.distributed.checkpoint` fills in what this returns, and hands it back."""

        def __init__(self, acc):
            self.state_dict, self.load_state_dict = acc.state_dict, acc.load_state_dict

    model = DistributedDataParallel(mlp(torch.float64))
    acc = ak.FusedAccumulator(model)
    path = ranks.shared / "of one rank"
    dcp.save({"acc": acc}, checkpoint_id=path)
    half(acc, model, rank)
    before = [buffer.clone() for buffer in acc.flat_buffers]
    for saved in (acc, Saved(acc)):
        kind, text = message(dcp.save, {"acc": saved}, checkpoint_id=ranks.shared / "refused")
        assert kind == "RuntimeError"
        assert "after 2 micro-batches of a window" in text
        assert "reduced=True" in text
        assert_close(acc.flat_buffers, before, rtol=0, atol=0)
    acc.zero_()
    dcp.load({"acc": acc}, checkpoint_id=path)
    half(acc, model, rank, end=3)
    acc.finalize(sgd(acc))
    assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), of_all(size)))
    kind, text = message(dcp.save, {"acc": acc}, checkpoint_id=ranks.shared / "averages")
    assert kind == "RuntimeError"  # they are the same on all ranks, but not among the entries that a new one loads
    assert "reduced=True" in text


TWO_RANKS = [states_of_other_ranks, reduced_states, through_dcp, one_state_for_all]
FOUR_RANKS = [loaded_on_more]
