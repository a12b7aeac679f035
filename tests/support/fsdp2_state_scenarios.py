"""What tests/ranks/test_fsdp2.py runs on every rank about checkpoints of FSDP2's DTensors."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support import ranks
from tests.support.fsdp2_scenarios import assert_close, data, full, micro_batches, net, run_window, shard, true_grads


def half_a_window(acc, model, dtype=torch.float64, begin=0, end=2) -> None:
    """Some of the micro-batches."""
    for x, y in micro_batches(dist.get_rank(), dtype=dtype)[begin:end]:
        acc.backward(mse_loss(model(x), y), len(x))


def build(dtype=torch.float64, seed=0, mesh=None, **kwargs):
    """Model, accumulator and optimizer."""
    model = shard(net(dtype, seed), mesh)
    acc = ak.FusedAccumulator(model, noise_scale=True, **kwargs)
    return model, acc, torch.optim.SGD(acc.parameters(), lr=0.1)


def through_a_file(state):
    """As torch.save and torch.load(weights_only=True) hand it back, on every rank."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_dcp(state, template, name):
    """As torch.distributed.checkpoint hands it back, in place of a template."""
    dcp.save({"acc": state}, checkpoint_id=ranks.shared / name)
    dcp.load({"acc": template}, checkpoint_id=ranks.shared / name)
    return template


def continue_mid_window(rank, size):
    """Sums, masters, weights, noise scale: from files of each rank's own, and from one DCP checkpoint, in place."""
    for name in ("file", "dict", "stateful"):
        for dtype, masters in ((torch.float64, False), (torch.bfloat16, True)):
            model, acc, optimizer = build(dtype, master_weights=masters)
            assert isinstance(acc, Stateful)
            half_a_window(acc, model, dtype)
            other, resumed, theirs = build(dtype, seed=9, master_weights=masters)
            if name == "file":
                resumed.load_state_dict(through_a_file(acc.state_dict()))
            elif name == "dict":
                resumed.load_state_dict(through_dcp(acc.state_dict(), resumed.state_dict(), f"dict {dtype}"))
            else:
                through_dcp(acc, resumed, f"stateful {dtype}")
            other.load_state_dict(model.state_dict())
            assert resumed.micro_batches == 2
            assert resumed.weight == acc.weight
            cpu = torch.device("cpu")
            squares = [one.engine.window.squares.sums(cpu) for one in (resumed, acc)]
            assert torch.equal(*squares), "each rank has its own"
            norms = []
            for m, a, o in ((model, acc, optimizer), (other, resumed, theirs)):
                half_a_window(a, m, dtype, 2, 3)
                norms.append(a.step(o, max_norm=0.5).item())
            assert norms[0] == norms[1]
            assert str(acc.noise_scale()) == str(resumed.noise_scale())
            assert acc.noise_scale().windows == 1
            ours, loaded = [*acc.parameters(), *model.parameters()], [*resumed.parameters(), *other.parameters()]
            for p, q in zip(ours, loaded, strict=True):
                assert torch.equal(p.to_local(), q.to_local())


def the_same_keys_at_any_moment(rank, size):
    """Whatever was touched, also with buffers released; tensors are DTensors; plain values are those of all ranks."""
    model, acc, optimizer = build()
    empty = acc.state_dict()
    acc.release_buffers()
    released = acc.state_dict()
    half_a_window(acc, model)
    if dist.get_rank() == 1:
        acc.main_grad(model.first.weight)[0] = float("nan")
        acc._store.buffers[0].flags[0] = 7
        acc._store.states[acc._store.layout.device][1] = 1
    inside = acc.state_dict()
    for state in (empty, released, inside):
        assert state.keys() == empty.keys()
        assert state["sums"].keys() == empty["sums"].keys()
        assert all(isinstance(tensor, DTensor) for tensor in state["sums"].values())
        assert state["world_size"] == 2
    assert empty["touched"] == released["touched"] == []
    assert len(inside["touched"]) == 6
    assert inside["flags"][0][1] == 7
    assert inside["state"][1] == 1
    everyone = [None, None]
    plain = {key: value for key, value in inside.items() if key not in ("sums", "state")}
    dist.all_gather_object(everyone, plain)
    assert everyone[0] == everyone[1]


def what_does_not_fit(rank, size):
    """Another rank's file inside a window; plain tensors; parts that are cut otherwise."""
    model, acc, _ = build()
    half_a_window(acc, model)
    state = acc.state_dict()
    torch.save(state, ranks.shared / f"rank {rank}")
    dist.barrier()
    other = torch.load(ranks.shared / f"rank {1 - rank}", weights_only=True)
    with pytest.raises(RuntimeError, match=rf"saved by the rank at \({1 - rank},\) of the mesh.*this is rank {rank}"):
        acc.load_state_dict(other)
    plain = {name: tensor.full_tensor() for name, tensor in state["sums"].items()}
    with pytest.raises(RuntimeError, match=r"sums that are sharded differently .*first\.weight"):
        acc.load_state_dict({**state, "sums": plain})
    alone = ak.FusedAccumulator(net(), process_group=False)
    with pytest.raises(RuntimeError, match=r"sums that are sharded differently .*first\.weight"):
        alone.load_state_dict(state)
    acc.zero_()
    between = acc.state_dict()
    acc.load_state_dict({**between, "world_size": 3})
    assert acc.micro_batches == 0


def saved_on_two(rank, size):
    """Checkpoints that four ranks load next."""
    model, acc, optimizer = build()
    run_window(acc, model)
    acc.step(optimizer)
    dcp.save({"acc": acc}, checkpoint_id=ranks.shared / "between windows")
    model, acc, optimizer = build()
    half_a_window(acc, model)
    dcp.save({"acc": acc}, checkpoint_id=ranks.shared / "inside a window")


def loaded_on_four(rank, size):
    """Any number of ranks will do, inside a window too."""
    model, acc, optimizer = build()
    dcp.load({"acc": acc}, checkpoint_id=ranks.shared / "between windows")
    assert acc.noise_scale().windows == 1
    run_window(acc, model)
    acc.step(optimizer)
    # Two micro-batches of two ranks, of equal sizes there, and one of four; not from the parameters of then.
    model, acc, optimizer = build()
    dcp.load({"acc": acc}, checkpoint_id=ranks.shared / "inside a window")
    assert acc.micro_batches == 2
    x, y = data(1 + rank, 70 + rank)
    acc.backward(mse_loss(model(x), y), len(x))
    acc.finalize(optimizer)
    batches = [part for r in range(2) for part in micro_batches(r)[:2]]
    batches += [data(1 + r, 70 + r) for r in range(4)]
    assert_close(full(p.grad for p in model.parameters()), true_grads(batches))


def cut_otherwise(rank, size):
    """The same four ranks in two pairs, and in one row: DCP cuts the sums of an open window anew."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row = init_device_mesh("cpu", (4,))
    for number, (one, another) in enumerate(((pairs, row), (row, pairs))):
        model, acc, optimizer = build(mesh=one)
        half_a_window(acc, model)
        other, resumed, theirs = build(seed=9, mesh=another)
        dcp.save({"acc": acc, "model": model.state_dict()}, checkpoint_id=ranks.shared / f"cut {number}")
        values = other.state_dict()
        dcp.load({"acc": resumed, "model": values}, checkpoint_id=ranks.shared / f"cut {number}")
        other.load_state_dict(values)
        for m, a, o in ((model, acc, optimizer), (other, resumed, theirs)):
            half_a_window(a, m, begin=2, end=3)
            a.step(o)
        assert_close(full(other.parameters()), full(model.parameters()))
        assert float(resumed.noise_scale()) == pytest.approx(float(acc.noise_scale()), rel=1e-9)


def of_kind(kind, seed=0):
    """Model, accumulator and this rank's number among those with samples of their own, of how many."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = net(seed=seed)
    if kind == "alone":  # all train the same
        return model, ak.FusedAccumulator(model, process_group=False), 0, 1
    if kind == "data parallel":
        return model, ak.FusedAccumulator(model, process_group=dist.group.WORLD), rank, size
    if kind == "tensor parallel":
        plan = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "last": RowwiseParallel(input_layouts=Replicate()),
        }
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        return model, ak.FusedAccumulator(model), mesh.get_local_rank("data"), 2
    shape, names = ((size,), ("shard",)) if kind == "one row" else ((2, size // 2), ("replicate", "shard"))
    shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model, ak.FusedAccumulator(model), rank, size


def whole(param):
    """Its gradient, as one process would have it."""
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


def another_kind_of_ranks(rank, size):
    """A window begun by ranks of one kind and ended by those of another, which take totals for means otherwise."""
    kinds = [
        "one row",
        "data parallel",
        "pairs",
        "tensor parallel",
        "data parallel",
        "alone",
        "tensor parallel",
        "one row",
    ]
    for here, there in itertools.pairwise(kinds):
        model, acc, number, before = of_kind(here)
        for x, y in micro_batches(number)[:2]:
            acc.backward(mse_loss(model(x), y), len(x))
        name = ranks.shared / f"{here} to {there}"
        dcp.save({"acc": acc.state_dict(reduced=True)}, checkpoint_id=name)
        model, acc, number, after = of_kind(there)
        state = acc.state_dict(reduced=True)
        dcp.load({"acc": state}, checkpoint_id=name)
        acc.load_state_dict(state)
        x, y = micro_batches(number)[2]
        acc.backward(mse_loss(model(x), y), len(x))
        acc.finalize()
        window = [part for n in range(before) for part in micro_batches(n)[:2]]
        window += [micro_batches(n)[2] for n in range(after)]
        assert_close(map(whole, model.parameters()), true_grads(window))


def of_the_format_before(rank, size):
    """States of version 2 said how many ranks had saved them, of whatever kind."""
    for kind in ("one row", "tensor parallel", "data parallel"):
        model, acc, number, before = of_kind(kind)
        for x, y in micro_batches(number)[:2]:
            acc.backward(mse_loss(model(x), y), len(x))
        state = {**acc.state_dict(reduced=True), "version": 2, "world_size": size}
        resumed = of_kind(kind)[1]
        resumed.load_state_dict(state)
        for one in (acc, resumed):
            one.finalize()
        assert_close(map(whole, resumed.parameters()), list(map(whole, acc.parameters())))
        weights = [one.metrics()["weight"].item() for one in (acc, resumed)]
        assert weights[0] == weights[1], (kind, weights)


TWO_RANKS = [continue_mid_window, the_same_keys_at_any_moment, what_does_not_fit, saved_on_two]
FOUR_RANKS = [loaded_on_four, cut_otherwise, another_kind_of_ranks, of_the_format_before]
