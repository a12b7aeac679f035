"""What tests/ranks/test_fsdp2.py runs on four ranks: HSDP, tensor parallel, experts on a mesh of their own."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss

import accumkernels as ak
from tests.support.frozen import KINDS, trainable
from tests.support.fsdp2_overflow_scenarios import poisoned
from tests.support.fsdp2_scenarios import (
    UNEQUAL,
    assert_close,
    full,
    micro_batches,
    net,
    run_window,
    set_factor,
    shard,
    total_norm,
    true_grads,
    window,
)


def hybrid_sharding(rank, size):
    """Replicated over two pairs of ranks: norms do not count replicas twice, an overflow in one pair skips in both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = shard(net(), mesh), net()
    acc = ak.FusedAccumulator(model, noise_scale=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=True)
    stock = torch.optim.AdamW(twin.parameters(), lr=0.1, fused=True)
    run_window(acc, model)
    norm = acc.step(optimizer, max_norm=0.5)
    true_grads(window(), twin)
    assert_close([norm], [torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)])
    stock.step()
    assert_close(full(model.parameters()), twin.parameters())
    assert acc.noise_scale().windows == 1
    for step, (x, y) in enumerate(micro_batches(dist.get_rank(), [2] * 3)):
        model.set_requires_all_reduce(step == 2)
        acc.backward(mse_loss(model(x), y), 2)
    assert acc.micro_batches == 3
    acc.finalize(optimizer)
    stock.zero_grad()
    assert_close(full(p.grad for p in model.parameters()), true_grads(window([2] * 3), twin))
    acc.zero_()
    poisoned(model, acc, {1}, rank=3)
    acc.step(optimizer)
    assert acc.step_was_skipped
    for order in (1.0, math.inf):
        run_window(acc, model)
        acc.finalize(optimizer)
        stock.zero_grad()
        expected = total_norm(true_grads(window(), twin), order)
        assert acc.clip_grad_norm_(1e9, order).item() == pytest.approx(expected, rel=1e-12)
        acc.zero_()


def tensor_parallel_too(rank, size):
    """Two dimensions of sharding, and parameters that are cut along one of them alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 1)).double()
    twin = copy.deepcopy(model)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for x, y in micro_batches(mesh.get_local_rank("data")):
        acc.backward(mse_loss(model(x), y), len(x))
    acc.finalize(optimizer)
    expected = true_grads(window(world_size=2), twin)
    assert_close(full(p.grad for p in model.parameters()), expected)
    for order in (2.0, math.inf, 1.0):
        assert acc.clip_grad_norm_(1e9, order).item() == pytest.approx(total_norm(expected, order), rel=1e-12)
    acc.remove()
    with pytest.raises(ValueError, match="'0.weight' and '2.bias' are not, as in tensor parallel models"):
        ak.FusedAccumulator(model, noise_scale=True)
    parallelize_module(twin, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with pytest.raises(ValueError, match="'0.weight' and '2.bias' are not, as in tensor parallel models"):
        ak.FusedAccumulator(twin, noise_scale=True)


def unequal_weights_of_replicas(rank, size):
    """HSDP, reduced over shards and replicas in each micro-batch, over replicas in the last, or over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = true_grads([part for r in range(size) for part in micro_batches(r, UNEQUAL[r])])
    ways = (None, "set_requires_all_reduce", "set_requires_gradient_sync")
    for late, factor in [(way, None) for way in ways] + [(None, 1.0), (None, 2.0)]:
        model = shard(net(), mesh)
        set_factor(model.modules(), factor)
        acc = ak.FusedAccumulator(model)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for step, (x, y) in enumerate(micro_batches(rank, UNEQUAL[rank])):
            if late is not None:
                getattr(model, late)(step == 2)
            acc.backward(mse_loss(model(x), y), len(x))
        acc.finalize(optimizer)
        assert_close(full(p.grad for p in model.parameters()), expected)
        norm = acc.clip_grad_norm_(1e9).item()
        assert norm == pytest.approx(total_norm(expected), rel=1e-12)


class Normed(nn.Module):
    """Linear layers to cut, and a norm that is left as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 1]`."""
        return self.last(torch.tanh(self.norm(torch.tanh(self.first(x)))))


def plain_norms(rank, size):
    """Tensor parallel alone: plain parameters, the same on all ranks, count once in one clip over all.

    Frozen ones of any kind, of which the first is on the meta device, are left alone.
    """
    model, twin = Normed().double(), Normed().double()
    for kind in sorted(KINDS, key="meta".__ne__):
        model.register_parameter(f"frozen_{kind}", nn.Parameter(KINDS[kind](), requires_grad=False))
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(
        model,
        mesh,
        {"first": ColwiseParallel(output_layouts=Replicate()), "last": RowwiseParallel(input_layouts=Replicate())},
    )
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    for x, y in micro_batches(0):
        acc.backward(mse_loss(model(x), y), len(x))
    expected = true_grads(micro_batches(0), twin)
    norm = acc.step(optimizer, max_norm=0.1)
    assert norm.item() == pytest.approx(total_norm(expected), rel=1e-12)
    nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    actual = [p.full_tensor() if isinstance(p, DTensor) else p for p in trainable(model)]
    assert_close(actual, twin.parameters())


def checkpoint_after_construction(rank, size):
    """Plain parameters that differ by rank until a checkpoint is loaded are copies; a frozen one may always differ."""
    model, twin = Normed().double(), Normed().double()
    parallelize_module(
        model,
        init_device_mesh("cpu", (size,)),
        {"first": ColwiseParallel(output_layouts=Replicate()), "last": RowwiseParallel(input_layouts=Replicate())},
    )
    model.register_parameter("scale", nn.Parameter(torch.full((3,), float(rank)), requires_grad=False))
    plain = [p for p in trainable(model) if not isinstance(p, DTensor)]
    loaded = [p.detach().clone() for p in plain]
    with torch.no_grad():
        for p in plain:
            p.normal_(generator=torch.Generator().manual_seed(rank))
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    with torch.no_grad():
        for p, value in zip(plain, loaded, strict=True):
            p.copy_(value)
    stock = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in micro_batches(0):
            acc.backward(mse_loss(model(x), y), len(x))
        stock.zero_grad()
        expected = total_norm(true_grads(micro_batches(0), twin))
        assert acc.step(optimizer, max_norm=0.1).item() == pytest.approx(expected, rel=1e-12)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        stock.step()


class OwnParts(nn.Module):
    """A layer to cut, and plain layers: one that is the same on all ranks, and one that is each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        torch.manual_seed(rank)
        self.own = nn.Linear(8, 1)
        nn.init.zeros_(self.own.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 1]`."""
        return self.own(self.norm(torch.tanh(self.cut(x))))


def plain_parts(rank, size):
    """Plain parameters of which each rank has its own, some of them with the same values, count on each."""
    model = OwnParts(rank).double()
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"cut": ColwiseParallel(output_layouts=Replicate())})
    acc = ak.FusedAccumulator(model)
    for x, y in micro_batches(0):
        acc.backward(mse_loss(model(x), y), len(x))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    shared = [p.grad.full_tensor() for p in model.cut.parameters()]
    norms = sum(p.grad.square().sum() for p in model.norm.parameters()) / size  # of other losses on each rank here
    squares = sum(p.grad.square().sum() for p in model.own.parameters()) + norms
    dist.all_reduce(squares)
    expected = math.sqrt(total_norm(shared) ** 2 + squares)
    assert acc.clip_grad_norm_(1e9).item() == pytest.approx(expected, rel=1e-12)


def masters_of_cut_and_plain_parts(rank, size):
    """Cut and plain bf16 parameters of one optimizer: fp32 masters of both are stepped as by hand, and rounded back."""
    mesh, plan = init_device_mesh("cpu", (size,)), {"cut": ColwiseParallel(output_layouts=Replicate())}
    model, twin = (parallelize_module(OwnParts(0).bfloat16(), mesh, plan) for _ in range(2))
    acc = ak.FusedAccumulator(model, master_weights=True, fuse_weight_gradients=False)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.5, momentum=0.9)
    masters = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    stock = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    for number in range(2):
        for x, y in micro_batches(number, (2, 2), torch.bfloat16):
            acc.backward(mse_loss(model(x), y))
            grads = torch.autograd.grad(mse_loss(twin(x), y), list(twin.parameters()))
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float() / 2 + (0 if master.grad is None else master.grad)
        acc.step(optimizer)
        stock.step()
        stock.zero_grad()
        with torch.no_grad():
            for ours, p, master in zip(model.parameters(), twin.parameters(), masters, strict=True):
                p.copy_(master)
                assert torch.equal(ours, p)


class Adapted(nn.Module):
    """Layers to cut, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 1]`."""
        return self.head(self.base(x))


def frozen_on_another_mesh(rank, size):
    """A tensor parallel base under a head that is sharded along the other dimension alone: frozen, or refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, twin = Adapted().double(), Adapted().double()
    for part in (model.base, twin.base):
        part.requires_grad_(False)
    parallelize_module(model.base, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model.head, mesh=mesh["data"])
    acc = ak.FusedAccumulator(model)
    assert acc.engine.ranks.size == 2
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    for x, y in micro_batches(mesh.get_local_rank("data")):
        acc.backward(mse_loss(model(x), y), len(x))
    x, y = (torch.cat(parts) for parts in zip(*window(world_size=2), strict=True))
    mse_loss(twin(x), y).backward()
    norm = acc.step(optimizer, max_norm=0.1)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(twin.head.parameters(), 0.1).item(), rel=1e-12)
    torch.optim.SGD(twin.head.parameters(), lr=0.1).step()
    assert_close(full(model.head.parameters()), twin.head.parameters())
    model.base.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'base.0.weight' was frozen when the accumulator was built"):
        acc.backward(mse_loss(model(x), y))
    acc.remove()
    with pytest.raises(ValueError, match=r"'base.0.weight' and 'head.weight' are on meshes that overlap"):
        ak.FusedAccumulator(model)


def experts(rank, size):
    """Layers on a mesh of their own, other ones in each pair of ranks, though some begin alike: one norm on all."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    for begin_alike in (True, False):
        model = net()
        if not begin_alike:
            with torch.no_grad():
                for p in model.middle.parameters():
                    p.mul_(1 + pairs.get_local_rank("expert"))
        fully_shard(model.middle, mesh=pairs["shard"])
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        acc = ak.FusedAccumulator(model)
        run_window(acc, model)
        acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
        dense, expert = {}, {}
        for name, p in model.named_parameters():
            (expert if name.startswith("middle") else dense)[name] = p.grad.full_tensor()
        everyones = [None] * size
        dist.all_gather_object(everyones, expert)
        parts = [*dense.values(), *everyones[0].values(), *everyones[1].values()]
        norms = [None] * size
        dist.all_gather_object(norms, {order: acc.clip_grad_norm_(1e9, order).item() for order in (2.0, math.inf)})
        for norm in norms:
            assert norm == norms[0]
        for order, norm in norms[0].items():
            assert norm == pytest.approx(total_norm(parts, order), rel=1e-12)


def dtensor_losses(rank, size):
    """A loss of `loss_parallel` trains by every call and counts in metrics; one that is not reduced yet does not."""
    mesh = init_device_mesh("cpu", (size,))
    for how in ("backward", "accumulate", "scaled", "weight on the device", "partial"):
        torch.manual_seed(0)
        model, twin = nn.Linear(5, 8).double(), nn.Linear(5, 8).double()
        twin.load_state_dict(model.state_dict())
        parallelize_module(model, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if how == "scaled" else None
        acc = ak.FusedAccumulator(model, scaler=scaler)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        labels = [torch.arange(len(x)) for x, _ in micro_batches(0)]
        for (x, _), y in zip(micro_batches(0), labels, strict=True):
            with loss_parallel():
                loss = cross_entropy(model(x), y)
                if how == "partial":
                    loss = DTensor.from_local(loss.to_local() / size, mesh, [Partial()])
                if how == "accumulate":
                    loss.backward()
                    acc.accumulate(len(x), loss=loss)
                else:
                    acc.backward(loss, torch.tensor(len(x)) if how == "weight on the device" else len(x))
        norm = acc.step(optimizer, max_norm=1e9)
        mean = cross_entropy(twin(torch.cat([x for x, _ in micro_batches(0)])), torch.cat(labels))
        mean.backward()
        if how == "partial":
            assert math.isnan(acc.metrics()["loss"])
            continue
        assert acc.metrics()["loss"].item() == pytest.approx(mean.item(), rel=1e-12)
        assert norm.item() == pytest.approx(total_norm([p.grad for p in twin.parameters()]), rel=1e-12)


FOUR_RANKS = [
    hybrid_sharding,
    tensor_parallel_too,
    unequal_weights_of_replicas,
    plain_norms,
    checkpoint_after_construction,
    plain_parts,
    masters_of_cut_and_plain_parts,
    frozen_on_another_mesh,
    experts,
    dtensor_losses,
]
