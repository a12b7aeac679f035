"""What tests/ranks/test_fsdp2.py runs on every rank: FusedAccumulator over `fully_shard`ed models.

The truth is one process on all ranks' data, in fp64. Widths are odd, so that shards are uneven, and the last layer has
one output: only rank 0 has any of its elements.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.integrations.window import TrainerWindow
from tests.support.frozen import KINDS
from tests.support.ranks import logged, message

SIZES = [2, 1, 3]  # of the micro-batches of a window, on every rank
EXACT = {"rtol": 1e-12, "atol": 1e-14}


class Net(nn.Module):
    """Three layers, and one whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.middle = nn.Linear(9, 9)
        self.last = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 1]`."""
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(x)))))


def net(dtype: torch.dtype = torch.float64, seed: int = 0) -> Net:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Net().to(dtype)


def shard(model: nn.Module, mesh=None, **kwargs) -> nn.Module:
    """`fully_shard` the layers, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for layer in (model.first, model.middle):
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def data(n: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A batch `[n, 5]`, `[n, 1]`."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 5, generator=generator), torch.randn(n, 1, generator=generator)
    return x.to(dtype), y.to(dtype)


def micro_batches(rank: int, sizes=None, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """A rank's share of a window."""
    sizes = SIZES if sizes is None else sizes
    return [data(n, 10 * rank + i, dtype) for i, n in enumerate(sizes)]


def window(sizes=None, world_size=None) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of all ranks, joined."""
    world_size = dist.get_world_size() if world_size is None else world_size
    ranks = [micro_batches(rank, sizes) for rank in range(world_size)]
    return [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in zip(*ranks, strict=True)]


def true_grads(batches: list[tuple[Tensor, Tensor]], model: nn.Module | None = None) -> list[Tensor]:
    """Gradients of the mean over all samples, by one process."""
    model = net() if model is None else model
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


def full(tensors) -> list[Tensor]:
    """DTensors as one process would have them."""
    return [t.detach().full_tensor() for t in tensors]


def assert_close(actual, expected, **tolerance) -> None:
    """Compare lists of tensors; fp64 rounding unless said otherwise."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **(tolerance or EXACT))


def total_norm(grads: list[Tensor], order: float = 2.0) -> float:
    """The norm by torch, of whole tensors."""
    return torch.nn.utils.get_total_norm(grads, order).item()


def run_window(acc, model, sizes=None, dtype=torch.float64) -> None:
    """All micro-batches of this rank, weighted by their samples."""
    for x, y in micro_batches(dist.get_rank(), sizes, dtype):
        acc.backward(mse_loss(model(x), y), len(x))


# ---- one process on all data


def equals_one_process(rank, size):
    """Parameters, norms and clipping after steps, with fused, foreach and plain optimizers, in both release modes."""
    for release in ("microbatch", "backward"):
        for optimizer_class, kwargs in (
            (torch.optim.SGD, {"foreach": False}),
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": True}),
        ):
            model, twin = shard(net()), net()
            acc = ak.FusedAccumulator(model, release=release, bucket_bytes=300)
            assert acc.main_grad(model.first.weight).shape == model.first.weight.to_local().shape
            optimizer = optimizer_class(acc.parameters(), lr=0.1, **kwargs)
            stock = optimizer_class(twin.parameters(), lr=0.1, **kwargs)
            for _ in range(2):
                run_window(acc, model)
                assert all(p.grad is None for p in model.parameters())
                norm = acc.step(optimizer, max_norm=0.5)
                stock.zero_grad()
                grads = true_grads(window(), twin)
                expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
                assert expected > 0.5, "the test must clip"
                stock.step()
                assert_close([norm], [expected])
                assert all(p.grad is None for p in model.parameters())
            assert grads
            assert_close(full(model.parameters()), twin.parameters())


def parts_are_clipped(rank, size):
    """Each by the norm of its whole tensors; what is in no part is left."""
    for release, fused in itertools.product(("microbatch", "backward"), (False, True)):
        model = shard(net())
        acc = ak.FusedAccumulator(model, release=release)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=fused)
        twin = net()
        for p, grad in zip(twin.parameters(), true_grads(window()), strict=True):
            p.grad = grad

        def parts(module):
            params = list(module.parameters())
            return [(params[:2], 1e-3), (params[3:], 1e3)]

        run_window(acc, model)
        norms = acc.step(optimizer, max_norm=parts(model))
        for norm, (params, limit) in zip(norms, parts(twin), strict=True):
            expected = nn.utils.clip_grad_norm_(params, limit)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        assert norms[0] > 1e-3
        torch.optim.AdamW(twin.parameters(), lr=0.1).step()
        # AdamW divides by roots of squares.
        assert_close(full(model.parameters()), list(twin.parameters()), rtol=1e-9, atol=1e-12)
        acc.remove()


def windows_that_differ(rank, size):
    """Ranks that load states of different windows: an error on every rank at the next step, and nothing is stepped."""
    model = shard(net())
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    first = acc.state_dict()
    run_window(acc, model)
    acc.step(optimizer)
    second = acc.state_dict()
    acc.load_state_dict(first if rank == 0 else second)
    before = [p.clone() for p in full(model.parameters())]
    run_window(acc, model)
    kind, text = message(acc.step, optimizer)
    assert kind == "RuntimeError"
    assert f"different windows, by rank {[0] + [1] * (size - 1)}" in text
    assert_close(full(model.parameters()), before, rtol=0, atol=0)
    acc.load_state_dict(second)
    run_window(acc, model)
    acc.step(optimizer)
    assert not acc.step_was_skipped


def long_form_hands_out_dtensors(rank, size):
    """After finalize, `.grad` is a DTensor like the parameter, a view; every order of norm is that of whole tensors."""
    model = shard(net())
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    run_window(acc, model)
    acc.finalize(optimizer)
    expected = true_grads(window())
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        assert (p.grad.placements, p.grad.shape, p.grad.stride()) == (p.placements, p.shape, p.stride())
        assert p.grad.to_local().data_ptr() == acc.main_grad(p).data_ptr()
    assert_close(full(p.grad for p in model.parameters()), expected)
    for order in (2.0, 1.0, 0.0, 3.0, -1.0, math.inf, -math.inf):
        norm = acc.clip_grad_norm_(1e9, order).item()
        assert norm == pytest.approx(total_norm(expected, order), rel=1e-12), order
    acc.clip_grad_norm_(0.01)
    assert_close(
        full(p.grad for p in model.parameters()), [g * (0.01 / (total_norm(expected) + 1e-6)) for g in expected]
    )
    kept, before = [p.grad for p in model.parameters()], full(p.grad for p in model.parameters())
    acc.zero_()
    run_window(acc, model)
    assert_close(full(kept), before, rtol=0, atol=0)


def tied_parameters(rank, size):
    """A weight in two modules of one fully_shard group is summed once."""
    model, twin = net(), net()
    for m in (model, twin):
        m.extra = nn.Linear(9, 9).double()
        m.extra.weight = m.middle.weight
        m.extra.bias.data.zero_()
        m.middle.forward = lambda x, m=m: m.extra(nn.functional.linear(x, m.middle.weight, m.middle.bias))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    acc = ak.FusedAccumulator(model)
    run_window(acc, model)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert_close(full(p.grad for p in model.parameters()), true_grads(window(), twin))


def frozen_and_unused(rank, size):
    """What is frozen takes no memory; what got no gradient keeps None; what is unfrozen joins."""
    model = net()
    model.middle.register_parameter("codes", nn.Parameter(KINDS["uint8"](), requires_grad=False))  # as in QLoRA
    shard(model)
    for p in model.middle.parameters():
        p.requires_grad_(False)
    model.register_parameter("unused", None)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    run_window(acc, model)
    acc.finalize(optimizer)
    twin = net()
    twin.middle.requires_grad_(False)
    expected = true_grads(window(), twin)
    params = [p for name, p in model.named_parameters() if not name.endswith("codes")]
    for p, grad in zip(params, expected, strict=True):
        assert (p.grad is None) == (grad is None)
    assert_close(full(p.grad for p in params if p.grad is not None), [g for g in expected if g is not None])


def frozen_again(rank, size):
    """Shards of layers that are frozen again give their segments back; a state has the same names before and after."""
    model, twin = shard(net()), net()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    of_stock = torch.optim.SGD(twin.parameters(), lr=0.1)
    everything = sum(buffer.numel() for buffer in acc.flat_buffers)
    held = []
    for trained in (("first", "middle"), ("first",), ("first",), ("middle",), ("first", "middle")):
        for m in (model, twin):
            for name, p in m.named_parameters():
                p.requires_grad_(name.startswith(trained))
        run_window(acc, model)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert set(acc.state_dict()["sums"]) == names
        acc.step(optimizer)
        held.append(sum(buffer.numel() for buffer in acc.flat_buffers))
        true_grads(window(), twin)
        of_stock.step()
        of_stock.zero_grad()
        assert_close(full(model.parameters()), list(twin.parameters()))
    assert held[0] == everything
    assert held[1] == held[2] < everything / 2
    assert held[2] < held[3] == held[4] <= everything  # without the last layer, of which rank 1 has nothing


def frozen_on_one_rank_mostly(rank, size):
    """A layer that is a third of all, and half of what rank 0 has, stays on both."""
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    held = sum(buffer.numel() for buffer in acc.flat_buffers)
    model[1].requires_grad_(False)
    acc.backward(model(torch.ones(1, 2)).sum())
    acc.step(optimizer)
    assert sum(buffer.numel() for buffer in acc.flat_buffers) == held
    acc.state_dict()


# ---- unequal weights


UNEQUAL = [[1, 4, 2], [3, 1, 1], [2, 2, 5], [1, 1, 1]]  # samples of the micro-batches, by rank


def unequal_weights(rank, size):
    """The mean over all samples of all ranks, reduced in each micro-batch or in the last, however large the weights."""
    expected = true_grads([part for r in range(size) for part in micro_batches(r, UNEQUAL[r])])
    for release, sync, unit in itertools.product(("microbatch", "backward"), (True, False), (1, 0.3, 1000)):
        model = shard(net())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        acc = ak.FusedAccumulator(model, release=release, scaler=scaler)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for window_number in range(3):
            for step, (x, y) in enumerate(micro_batches(rank, UNEQUAL[rank])):
                model.set_requires_gradient_sync(sync or step == 2)
                acc.backward(mse_loss(model(x), y), unit * len(x))
            samples = sum(map(sum, UNEQUAL[:size]))
            assert acc.weight.item() == pytest.approx(unit * sum(UNEQUAL[rank]), rel=1e-14)
            acc.finalize(optimizer)
            assert acc.weight.item() == pytest.approx(unit * samples / size, rel=1e-14)
            assert acc.found_inf == 0, window_number
            assert_close(full(p.grad for p in model.parameters()), expected)
            acc.zero_()


def units_of_accumulators(rank, size):
    """Each counts weights near its own, so that a loss with the default weight is left as it is beside larger ones."""
    for weight, unit in ((1000, 512), (1, 1)):
        model = shard(net())
        acc = ak.FusedAccumulator(model)
        x, y = data(2, rank)
        acc.backward(mse_loss(model(x), y), weight)
        assert acc.engine.runner._weighting._unit == unit
        acc.zero_()


def set_factor(modules, factor) -> None:
    """Make FSDP2 divide the gradients of these modules by `factor`."""
    for module in modules:
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)


def weights_under_a_divide_factor(rank, size):
    """Weighted means are those of all samples, whatever FSDP2 divides by; factors that differ are an error."""
    expected = true_grads([part for r in range(size) for part in micro_batches(r, UNEQUAL[r])])
    model = shard(net())
    for params in (model, list(model.named_parameters())):
        acc = ak.FusedAccumulator(params)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for factor in (1.0, 3.0, float(size), None):  # it may change between windows
            set_factor(model.modules(), factor)
            for x, y in micro_batches(rank, UNEQUAL[rank]):
                acc.backward(mse_loss(model(x), y), len(x))
            acc.finalize(optimizer)
            assert_close(full(p.grad for p in model.parameters()), expected)
            assert acc.clip_grad_norm_(1e9).item() == pytest.approx(total_norm(expected), rel=1e-12)
            acc.zero_()

        # torchtitan's loss: a sum, divided by the number of targets on all ranks
        samples = sum(map(sum, UNEQUAL[:size]))
        set_factor(model.modules(), 1.0)
        for x, y in micro_batches(rank, UNEQUAL[rank]):
            acc.backward(mse_loss(model(x), y, reduction="sum") / samples)
        acc.finalize(optimizer, divisor=1)
        assert_close(full(p.grad for p in model.parameters()), expected)
        acc.zero_()

        set_factor([model.middle], None)
        run_window(acc, model)
        with pytest.raises(RuntimeError, match=r"'first\.weight' to 2\.0 times .* 'middle\.weight' to 1\.0 times"):
            acc.step(optimizer)
        acc.zero_()
        set_factor([model.middle], 1.0)
        acc.noise_scale()
        run_window(acc, model)
        with pytest.raises(RuntimeError, match="noise_scale needs gradients that are means over ranks"):
            acc.step(optimizer)
        acc.remove()


def a_rank_without_weight(rank, size):
    """It takes part, and counts nothing."""
    model = shard(net())
    acc = ak.FusedAccumulator(model)
    for x, y in micro_batches(rank, [2, 3]):
        acc.backward(mse_loss(model(x), y), len(x) if rank == 0 else 0)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert_close(full(p.grad for p in model.parameters()), true_grads(micro_batches(0, [2, 3])))


def what_ranks_disagree_about(rank, size):
    """Divisors, limits, weights that come after FSDP2's mean: an error on every rank, in the window it happens in."""
    model = shard(net())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    for _ in range(4):
        before = full(model.parameters())
        for x, y in micro_batches(rank, [1 + rank]):
            scaler.scale(mse_loss(model(x), y)).backward()
            acc.accumulate(len(x))
        with pytest.raises(RuntimeError, match=r"sum, by rank, to \[1\.0, 2\.0\].*acc\.backward"):
            acc.step(optimizer)
        acc.zero_()
        # Something else has put zeros into `.grad`, to which FSDP2 adds what has no weight in its loss.
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for x, y in micro_batches(rank, [1 + rank]):
            acc.backward(mse_loss(model(x), y), len(x))
        with pytest.raises(RuntimeError, match=r"sum, by rank, to \[1\.0, 2\.0\].*no \.grad is left"):
            acc.step(optimizer)
        acc.zero_()
        for weight in (1, 3) if rank else (3, 1):  # with equal sums
            scaler.scale(mse_loss(model(x), y)).backward()
            acc.accumulate(weight)
        with pytest.raises(RuntimeError, match="other weights on other ranks, though their sums are equal"):
            acc.step(optimizer)
        acc.zero_()
        for _ in (1, 2):  # what comes after it has the same ones
            scaler.scale(mse_loss(model(x), y)).backward()
            acc.accumulate(3)
        acc.finalize(optimizer)
        acc.zero_()
        run_window(acc, model, [2])
        with pytest.raises(RuntimeError, match=r"divisors of this window are, by rank, \[4\.0, 5\.0\]"):
            acc.step(optimizer, divisor=4 + rank)
        acc.zero_()
        run_window(acc, model, [2])
        with pytest.raises(RuntimeError, match=r"divisors of this window are, by rank, \[0\.0, 5\.0\]"):
            acc.step(optimizer, divisor=5 if rank else None)
        acc.zero_()
        for limits, text in (((1.0, None), "1.0, none"), ((1.0, 2.0), "1.0, 2.0")):
            run_window(acc, model, [2])
            with pytest.raises(RuntimeError, match=f"max_norm must be the same on all ranks; by rank it is {text}"):
                acc.step(optimizer, max_norm=limits[rank])
            acc.zero_()
        assert_close(full(model.parameters()), before, rtol=0, atol=0)
        run_window(acc, model, [2])
        acc.step(optimizer)
        assert not acc.step_was_skipped
        assert scaler.get_scale() == 2.0**10


def unequal_micro_batches_by_sums(rank, size):
    """Sum-reduced losses and one divisor are exact for any sizes: FSDP2's mean, or its sum with divide factor 1."""
    sizes = [[1, 4, 2], [3, 1, 1]]
    ranks = [micro_batches(rank, sizes[rank]) for rank in range(2)]
    expected = true_grads([part for parts in ranks for part in parts])
    samples = sum(map(sum, sizes))
    for factor in (None, 1.0):
        model = shard(net())
        if factor is not None:
            set_factor(model.modules(), factor)
        acc = ak.FusedAccumulator(model)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        for x, y in ranks[dist.get_rank()]:
            acc.backward(mse_loss(model(x), y, reduction="sum"))
        acc.finalize(optimizer, divisor=samples / (2 if factor is None else 1))
        assert_close(full(p.grad for p in model.parameters()), expected)


# ---- precision


def mixed_precision_policy(rank, size):
    """bf16 parameters in compute, fp32 shards and reduction: the bits of a stock FSDP2 loop, which adds up `.grad`."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, stock = (shard(net(torch.float32), mp_policy=policy) for _ in range(2))
    acc = ak.FusedAccumulator(model)
    for x, y in micro_batches(dist.get_rank(), dtype=torch.float32):
        acc.backward(mse_loss(model(x).float(), y))
        mse_loss(stock(x).float(), y).backward()
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad.to_local(), q.grad.to_local() / len(SIZES))


def autocast_is_left_alone(rank, size):
    """FSDP2 casts parameters itself, and gradients are those of a stock loop."""
    model, stock = shard(net(torch.float32)), shard(net(torch.float32))
    acc = ak.FusedAccumulator(model)
    for x, y in micro_batches(dist.get_rank(), dtype=torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            loss, stock_loss = mse_loss(model(x).float(), y), mse_loss(stock(x).float(), y)
        acc.backward(loss)
        stock_loss.backward()
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local() / len(SIZES))


def master_weights(rank, size):
    """Sharded bf16 parameters: masters are fp32 DTensors, stepped as whole fp32 tensors would be, and rounded back.

    What a loop writes to shards is taken over.
    """
    model = shard(net(torch.bfloat16))
    model.last.bias.requires_grad_(False)
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1)
    masters = [p.clone().requires_grad_() for p in full(model.parameters())]
    masters = [m.float().detach().requires_grad_() for m in masters]
    stock = torch.optim.AdamW(masters, lr=0.1)
    for trains in (True, False, True):
        model.last.bias.requires_grad_(trains)
        run_window(acc, model, dtype=torch.bfloat16)
        acc.finalize(optimizer)
        for master, ours in zip(masters, acc.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            assert ours.dtype == torch.float32
            master.grad = None if ours.grad is None else ours.grad.full_tensor()
        optimizer.step()
        stock.step()
        acc.zero_()
        assert_close(full(acc.parameters()), masters, rtol=0, atol=0)
        assert_close(full(model.parameters()), [m.bfloat16() for m in masters], rtol=0, atol=0)
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                (p if trains else p.to_local()).mul_(0.5)
                (edited,) = full([p])
                master.copy_(torch.where(edited == master.bfloat16(), master, edited.float()))


# ---- measuring


def noise_scale(rank, size):
    """As one process measures whose micro-batches are those of all ranks joined."""
    model, twin = shard(net()), net()
    acc, alone = (ak.FusedAccumulator(m, noise_scale=True, process_group=g) for m, g in ((model, None), (twin, False)))
    optimizers = [torch.optim.SGD(a.parameters(), lr=0.01) for a in (acc, alone)]
    for _ in range(2):
        run_window(acc, model)
        for (x, y), weight in zip(window(), SIZES, strict=True):
            alone.backward(mse_loss(twin(x), y), weight)
        acc.step(optimizers[0])
        alone.step(optimizers[1])
    assert acc.noise_scale().windows == 2
    for what in ("trace", "grad_squared_norm"):
        assert getattr(acc.noise_scale(), what) == pytest.approx(getattr(alone.noise_scale(), what), rel=1e-11)


def noise_scale_of_unequal_weights(rank, size):
    """A window whose micro-batches weigh otherwise on other ranks does not count, though sums of weights are equal."""
    model = shard(net())
    acc = ak.FusedAccumulator(model, noise_scale=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.01)
    with logged() as texts:
        for sizes, counted in (([3, 5], 0), ([4, 4], 1), ([1, 7], 1), ([2, 5], 2)):
            swapped = sizes[0] % 2 == 1 and rank == 1
            for on_device, n in enumerate(reversed(sizes) if swapped else sizes):
                x, y = data(n, rank)
                acc.backward(mse_loss(model(x), y), torch.tensor(n) if on_device else n)
            acc.step(optimizer)
            assert acc.noise_scale().windows == counted
    assert len([text for text in texts if "noise_scale" in text]) == 1


# ---- refusals


def what_is_refused(rank, size):
    """Arguments that are not for DTensors, mixtures, other engines."""
    for kwargs, error, match in (
        ({"process_group": dist.group.WORLD}, ValueError, "process_group must be None"),
        ({"process_group": False}, ValueError, "process_group must be None"),
    ):
        with pytest.raises(error, match=match):
            ak.FusedAccumulator(shard(net()), **kwargs)

    scaler = torch.amp.GradScaler("cpu")
    for mine, text in (
        ({"overflow": "microbatch"}, "overflow='window', rank 1 has 'microbatch'"),
        ({"scaler": scaler}, "scaler=False, rank 1 has True"),
        ({"noise_scale": True}, "noise_scale=False, rank 1 has True"),
        ({"master_weights": True}, "master_weights=False, rank 1 has True"),
    ):
        with pytest.raises(RuntimeError, match=f"meshes of params: rank 0 has {text}; all ranks must be alike"):
            ak.FusedAccumulator(shard(net()), **(mine if rank else {}))

    mixed = net()
    mixed = shard(mixed, ignored_params={mixed.last.bias})
    with pytest.raises(RuntimeError, match=r"'last\.bias' is not a DTensor, though other parameters are"):
        ak.FusedAccumulator(mixed)
    mixed.last.bias.requires_grad_(False)
    with ak.FusedAccumulator(mixed) as acc:
        mixed.last.bias.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'last\.bias' is not a DTensor"):
            run_window(acc, mixed)

    adapted = shard(net()).requires_grad_(False)
    adapted.adapter = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match=r"'adapter\.weight' is not a DTensor.*added after fully_shard"):
        TrainerWindow([adapted], torch.optim.SGD(adapted.adapter.parameters(), lr=1.0), None)

    unsharded = net()
    fully_shard(unsharded)
    unsharded(data(2, 0)[0])
    with pytest.raises(RuntimeError, match=r"'first\.weight' is not sharded.*model\.reshard"):
        ak.FusedAccumulator(unsharded)
    unsharded.reshard()
    ak.FusedAccumulator(unsharded)

    for use_orig_params in (False, True):
        fsdp1 = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        for params in (fsdp1, fsdp1.parameters()):
            with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
                ak.FusedAccumulator(params)


def drift_is_seen(rank, size):
    """A parameter that is replaced, or whose shard is, is named; unsharded parameters in its place are not drift."""
    model = shard(net())
    acc = ak.FusedAccumulator(model)
    model.set_reshard_after_backward(False)
    run_window(acc, model)
    acc.zero_()
    run_window(acc, model)
    acc.zero_()
    model.first.reshard()
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'first\.weight' was replaced"):
        acc.load_state_dict({})


TWO_RANKS = [
    equals_one_process,
    parts_are_clipped,
    windows_that_differ,
    long_form_hands_out_dtensors,
    tied_parameters,
    frozen_and_unused,
    frozen_again,
    frozen_on_one_rank_mostly,
    unequal_weights,
    units_of_accumulators,
    weights_under_a_divide_factor,
    a_rank_without_weight,
    what_ranks_disagree_about,
    unequal_micro_batches_by_sums,
    mixed_precision_policy,
    autocast_is_left_alone,
    master_weights,
    noise_scale,
    noise_scale_of_unequal_weights,
    what_is_refused,
    drift_is_seen,
]
