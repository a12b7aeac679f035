"""What tests/ranks/test_reduction.py runs on every rank: data parallel windows, held to fp64 in one process."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.capture import graph
from accumkernels.ranks.base import LocalStats
from accumkernels.ranks.sender import Sent
from tests.support.models import batch, mlp
from tests.support.ranks import logged, message, parameters

EXACT = {"rtol": 1e-12, "atol": 1e-14}
SIZES = [[2, 1, 3], [1, 5, 2], [4, 4, 1], [1, 1, 1]]  # samples of the micro-batches, by rank


def group():
    """Of all ranks."""
    return dist.group.WORLD


def data(rank, sizes=None, dtype=torch.float64) -> list[tuple[Tensor, Tensor]]:
    """A rank's micro-batches of one window."""
    sizes = SIZES[rank] if sizes is None else sizes
    found = (batch(n, torch.float64, seed=10 * rank + i) for i, n in enumerate(sizes))
    return [(x.to(dtype), y.to(dtype)) for x, y in found]


def of_all(size) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of all ranks, joined."""
    parts = zip(*(data(rank) for rank in range(size)), strict=True)
    return [tuple(torch.cat(tensors) for tensors in zip(*pairs, strict=True)) for pairs in parts]


def true_grads(model, batches) -> list[Tensor]:
    """Of the mean over the samples of each micro-batch and of all of them."""
    total = sum(len(x) for x, _ in batches)
    for x, y in batches:
        (mse_loss(model(x), y) * (len(x) / total)).backward()
    return [p.grad for p in model.parameters()]


def assert_close(actual, expected, **tolerance) -> None:
    """Compare lists of tensors; fp64 rounding unless said otherwise."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **(tolerance or EXACT))


def sgd(acc, lr=0.1):
    """Stateless."""
    return torch.optim.SGD(acc.parameters(), lr=lr)


# ---- weights where backward crosses ranks


class SumOverRanks(torch.autograd.Function):
    """Of which every rank's loss is a function."""

    @staticmethod
    def forward(ctx, x):
        """Sum values."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        """Sum gradients."""
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Centered(nn.Module):
    """Takes the mean over the samples of all ranks off, as SyncBatchNorm does: backward goes through all of them."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        self.alone = alone

    def forward(self, x: Tensor) -> Tensor:
        """`[n, 5]` to `[n, 3]`."""
        hidden = self.first(x)
        total, count = hidden.sum(0), torch.tensor(float(len(x)), dtype=torch.float64)
        if not self.alone:
            total = SumOverRanks.apply(total)
            dist.all_reduce(count)
        return self.last(torch.tanh(hidden - total / count))


def backward_that_crosses_ranks(rank, size):
    """Unequal numbers of samples give the big batch's gradient, in every form of a window."""
    twin = Centered(alone=True)
    expected = true_grads(twin, of_all(size))
    for release, scale, unit in itertools.product(("microbatch", "backward"), (None, 2.0**10), (1, 700, 0.3)):
        model = Centered()
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        acc = ak.FusedAccumulator(model, process_group=group(), release=release, scaler=scaler, bucket_bytes=64)
        for x, y in acc.window(data(rank)):
            acc.backward(mse_loss(model(x), y), unit * len(x))
        acc.finalize(sgd(acc))
        assert_close([p.grad for p in model.parameters()], expected)
        samples = sum(map(sum, SIZES[:size]))
        assert acc.weight.item() == pytest.approx(unit * samples, rel=1e-14)
        acc.zero_()


def equal_weights_keep_their_bits(rank, size):
    """Whether they go into losses, or come after backward; also after a backward of the loop's own."""
    for dtype, weight in itertools.product((torch.float32, torch.bfloat16), (1, 4, 0.5)):
        grads = []
        for form in ("loss", "after", "both"):
            model = mlp(dtype)
            acc = ak.FusedAccumulator(model, process_group=group())
            for x, y in data(rank, [3, 3], dtype):
                half = mse_loss(model(x), y, reduction="sum")
                if form == "loss":
                    acc.backward(half, weight)
                else:
                    half.backward()
                    if form == "after":
                        acc.accumulate(weight)
                    else:
                        acc.backward(model(x).sum() * 0, weight)
            acc.finalize(sgd(acc))
            grads.append([p.grad.clone() for p in model.parameters()])
        assert_close(grads[0], grads[1], rtol=0, atol=0)
        assert_close(grads[2], grads[1], rtol=0, atol=0)


def units_change_no_bits(rank, size):
    """Whichever power of two ranks agree on: unequal weights give the same bits; equal powers of two those of 1."""

    def grads(weights, dtype, unit=None):
        model = mlp(dtype)
        acc = ak.FusedAccumulator(model, process_group=group())
        acc.engine.runner._weighting._unit = unit
        for (x, y), weight in zip(data(rank, [3, 3], dtype), weights, strict=True):
            acc.backward(mse_loss(model(x), y), weight)
        acc.finalize(sgd(acc))
        return [p.grad.clone() for p in model.parameters()]

    for dtype in (torch.float32, torch.bfloat16):
        ones = grads((1, 1), dtype)
        for weight in (0.25, 2, 64):
            assert_close(grads((weight, weight), dtype), ones, rtol=0, atol=0)
        unequal = (3 + 4 * rank, 5)
        first = grads(unequal, dtype, 1.0)
        for unit in (0.25, 4.0, 2.0**7):
            assert_close(grads(unequal, dtype, unit), first, rtol=0, atol=0)
        # 1.25 goes into the loss and 4 into the pass, and every product rounds once.
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
        assert_close(grads((5, 5), dtype), ones, rtol=rounding, atol=rounding)


def long_form_warns_of_synchronised_norms(rank, size):
    """Once, where a weight comes after a backward that SyncBatchNorm has taken over ranks."""
    for layer, count in ((nn.SyncBatchNorm(4), 1), (nn.BatchNorm1d(4), 0)):
        model = nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, 3))
        acc = ak.FusedAccumulator(model, process_group=group())
        with logged() as texts:
            for weight in (1, 3, 4):
                model[2](model[0](batch(2)[0])).sum().backward()
                acc.accumulate(weight)
                assert len(texts) == (count if weight != 1 else 0)
        assert all("'1' is a SyncBatchNorm" in text and "acc.backward" in text for text in texts)
        acc.zero_()


class AddAuxiliaryLoss(torch.autograd.Function):
    """Passes `x` on; backward adds the gradient of an auxiliary loss, whatever gradient it gets."""

    @staticmethod
    def forward(ctx, x, loss):
        """`x`, and a loss of one element."""
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """The gradient of the sum of both losses."""
        return grad, grad.new_ones(())


def with_auxiliary_loss(model, x, y, in_backward):
    """A loss and an auxiliary one, which is in the value or only in the gradient."""
    out = model(x)
    auxiliary = 0.5 * out.square().mean()
    if in_backward:
        return mse_loss(AddAuxiliaryLoss.apply(out, auxiliary), y)
    return mse_loss(out, y) + auxiliary


def gradients_that_functions_add(rank, size):
    """Have the whole weight where all weights are 1 or one power of two, and in the long form; else a warning says so.

    Another accumulator of the job, whose weights have another unit, does not matter.
    """
    other = mlp(torch.float64)
    counts = ak.FusedAccumulator(other, process_group=group())
    counts.backward(other(data(rank)[0][0]).sum(), 12)
    counts.zero_()
    equal, unequal = [[4, 4]] * size, SIZES[:size]
    cases = [(equal, 1), (equal, 0.25), (equal, 3), (unequal, 1)]
    for (sizes, unit), form in itertools.product(cases, ("backward", "long form")):
        model, twin = mlp(torch.float64), mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=group())
        with logged() as texts:
            for x, y in data(rank, sizes[rank]):
                loss = with_auxiliary_loss(model, x, y, True)
                if form == "backward":
                    acc.backward(loss, unit * len(x))
                else:
                    loss.backward()
                    acc.accumulate(unit * len(x))
        acc.finalize(sgd(acc))
        total = sum(map(sum, sizes))
        for x, y in (part for r in range(size) for part in data(r, sizes[r])):
            (with_auxiliary_loss(twin, x, y, False) * (len(x) / total)).backward()
        found, expected = ([p.grad for p in m.parameters()] for m in (model, twin))
        if form == "backward" and (unit == 3 or sizes is unequal):
            assert len(texts) == 1, (unit, form)
            assert "has AddAuxiliaryLoss: if its backward adds a gradient of its own" in texts[0]
            with pytest.raises(AssertionError):  # nobody can know: other Functions need the weight in the loss
                assert_close(found, expected)
        else:
            assert texts == []
            assert_close(found, expected)
        acc.zero_()


def functions_of_torch(rank, size):
    """No warning, though their gradients come from other ranks."""
    reduces = (
        dist.nn.functional.all_reduce,
        lambda x: torch.distributed._functional_collectives.all_reduce(x, "sum", group()),
        lambda x: dist.nn.functional.all_gather(x)[rank],
    )
    for reduce in reduces:
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=group())
        loss = reduce(model(batch(2, torch.float64)[0])).sum()
        node, functions = loss.grad_fn, 0
        while node.next_functions and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
            functions += isinstance(node, torch.autograd.function.BackwardCFunction)
        assert functions
        with logged() as texts:
            acc.backward(loss, 3 + rank)
        assert texts == []
        acc.zero_()


def units_of_accumulators(rank, size):
    """Each has its own, near its weights, if all ranks have built it together; those of some ranks share one."""
    keys = []
    for weight, unit in ((12, 8), (1, 1), (3000, 2048)):
        model, acc = build()
        keys.append(acc._ranks.weight_key)
        acc.backward(model(data(rank)[0][0]).sum(), weight)
        assert acc.engine.runner._weighting._unit == unit
        acc.zero_()
        acc.remove()
    assert len(set(keys)) == 3
    everyones = [None] * size
    dist.all_gather_object(everyones, keys)
    assert everyones == [keys] * size
    mine = [dist.new_group([r]) for r in range(size)][rank]
    for options in ({"process_group": mine}, {"process_group": False}):
        key = build(**options)[1]._ranks.weight_key
        assert key not in keys
        assert not key[-1].isdigit()


# ---- sums that are sent in backward


def build(**options):
    """Model and accumulator with small buckets."""
    model = mlp(torch.float64)
    options = {"release": "backward", "bucket_bytes": 64, **options}
    return model, ak.FusedAccumulator(model, process_group=options.pop("process_group", group()), **options)


def half(acc, model, rank, begin=0, end=2) -> None:
    """Some micro-batches of a window."""
    for x, y in data(rank)[begin:end]:
        acc.backward(mse_loss(model(x), y), len(x))


def collectives_of_the_users(rank, size):
    """Between the last backward and the step, at another place on each rank: numbers are the user's and ours."""
    model, acc = build()
    optimizer = sgd(acc)
    expected = true_grads(mlp(torch.float64), of_all(size))
    for window in acc.windows(3 * data(rank), len(data(rank))):
        metric = torch.tensor([1000.0 * (rank + 1)])
        for x, y in window:
            acc.backward(mse_loss(model(x), y), len(x))
        dist.all_reduce(metric)
        acc.finalize(optimizer)
        assert metric.item() == 1000 * size * (size + 1) / 2
        assert_close([p.grad for p in model.parameters()], expected)
        acc.zero_()


def a_group_of_some(rank, size):
    """Ranks that are a part of the world have a group of the library's own too."""
    mine = None
    for some in ([0, 1], [2, 3]):
        made = dist.new_group(some)
        mine = made if rank in some else mine
    model, acc = build(process_group=mine)
    assert acc._ranks._group.own
    first = rank // 2 * 2
    for x, y in acc.window(data(rank)):
        acc.backward(mse_loss(model(x), y), len(x))
    acc.finalize(sgd(acc))
    batches = [part for r in (first, first + 1) for part in data(r)]
    assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), batches))


def accumulators_side_by_side(rank, size):
    """One of two has no micro-batch on one rank, which then sends the other's sums first: each has its own group."""
    gc.collect()  # not later, when it would free groups of earlier accumulators: the first free one is taken
    (model, acc), (other, acc2) = build(), build()
    assert acc._ranks._group._group is not acc2._ranks._group._group
    for _ in range(3):
        for x, y in acc.window(data(rank)) if rank == 0 else ():
            acc.backward(mse_loss(model(x), y), len(x))
        for x, y in acc2.window(data(rank)):
            acc2.backward(mse_loss(other(x), y), len(x))
        acc.finalize(sgd(acc))
        acc2.finalize(sgd(acc2))
        assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), data(0)))
        assert_close([p.grad for p in other.parameters()], true_grads(mlp(torch.float64), of_all(size)))
        acc.zero_()
        acc2.zero_()
    first = acc._ranks._group._group
    del acc
    acc = ak.FusedAccumulator(mlp(), process_group=group())
    assert acc._ranks._group._group is first  # nobody has it any more


class Mixed(nn.Module):
    """One parameter is never used, one in the middle only now and then, and half of the layers are fp64."""

    def __init__(self, shuffled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if shuffled:
            self.never = nn.ParameterList([torch.ones(3, dtype=torch.float64)])
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.sometimes = nn.ParameterList([torch.ones(16, dtype=torch.float64)])
        self.more = nn.ModuleList(nn.Linear(16, 16).double() for _ in range(8))
        self._shuffled = shuffled

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        """`[n, 16]`; shuffled: layers in another order than that of registration."""
        for layer in [*self.more, *self.layers] if self._shuffled else [*self.layers, *self.more]:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x * self.sometimes[0] if uses else x


def chunks_go_in_the_order_of_layers(rank, size):
    """All but the last are sent before backward ends, from the first window on; in other orders sums are right, too."""
    for shuffled in (False, True):
        model, twin = Mixed(shuffled), Mixed(shuffled)
        acc = ak.FusedAccumulator(model, process_group=group(), release="backward", bucket_bytes=2**20)
        optimizer, sender = sgd(acc, 0.0), acc._ranks.sender
        sent = []

        def at_the_end(grad: Tensor, acc=acc, sender=sender, sent=sent) -> Tensor:
            sent.append((acc.engine.window.sent.count, len(sender._chunks)))
            return grad

        for window in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
            x.register_hook(at_the_end)  # its gradient is the last of all
            uses = [not shuffled or (window == 3 and r == 1) for r in range(size)]
            acc.backward(model(x, uses[rank]).square().mean(), last=True)
            acc.finalize(optimizer)
            everyones = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(everyones, x.detach())
            twin.zero_grad()
            sum(twin(part, uses[r]).square().mean() / size for r, part in enumerate(everyones)).backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    assert_close([p.grad.double()], [q.grad.double()], rtol=1e-5, atol=1e-8)
            acc.zero_()
        if not shuffled:
            # What is missing is a weight and a bias in four chunks; the gradient of x may come before them.
            assert all(early >= chunks - 6 for early, chunks in sent), sent


def chunks_wait_for_no_bucket(rank, size):
    """A chunk of a weight that is fused, and of biases that are not, goes out when both are there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    acc = ak.FusedAccumulator(
        model, process_group=group(), release="backward", bucket_bytes=2**20, fuse_weight_gradients=True
    )
    optimizer, sender, sent = sgd(acc, 0.0), acc._ranks.sender, []
    for _ in range(3):
        x = torch.ones(4, 16, requires_grad=True)
        x.register_hook(lambda grad: sent.append(len(sender._chunks) - acc.engine.window.sent.count))
        acc.backward(model(x).square().mean(), last=True)
        assert "elements in the last backward: 0 fused" not in repr(acc)
        acc.step(optimizer)
    assert max(sent) <= 6, sent  # of the first layer, or cut with it


def marked_on_some_ranks_only(rank, size):
    """An error on every rank, and nothing is stepped; a rank without micro-batches need not mark any."""
    model, acc = build()
    optimizer = sgd(acc)
    for marks, runs, fails in ((rank == 0, True, True), (True, rank == 1, False), (True, True, False)):
        before = parameters(model)
        for x, y in data(rank)[:1] if runs else ():
            acc.backward(mse_loss(model(x), y), len(x), last=marks)
        kind, text = message(acc.step, optimizer)
        assert bool(text) is fails
        if fails:
            assert kind == "RuntimeError"
            assert f"on 1 ranks, and not on {size - 1} others" in text
            assert_close(parameters(model), before, rtol=0, atol=0)
            acc.zero_()


def windows_look_one_ahead(rank, size):
    """Batches come in their order, one ahead; the last is marked, where it is of use; also out of an iterator."""
    taken = []

    def batches():
        for i in range(3):
            taken.append(i)
            yield i

    for release in ("microbatch", "backward"):
        model, acc = build(release=release)
        optimizer = sgd(acc)
        for source in (batches, lambda: [0], lambda: []):
            taken.clear()
            seen = []
            for i in acc.window(source()):
                if source is batches:
                    assert taken == list(range(min(i + 2, 3)))
                seen.append(i)
                acc.backward(model(torch.ones(2, 5, dtype=torch.float64)).sum())
                assert (acc.engine.window.sent.count > 0) is (
                    release == "backward" and i == (2 if source is batches else 0)
                )
            assert seen == list(source())
            acc.step(optimizer)


def sums_in_bf16(rank, size):
    """comm_dtype="auto": bf16 parameters are sent as bf16, as DistributedDataParallel does, and others as fp32."""
    sent = []
    send = torch.distributed.all_reduce

    def spy(tensor, *args, **kwargs):
        if kwargs.get("async_op"):
            sent.append((tensor.dtype, tensor.numel()))
        return send(tensor, *args, **kwargs)

    for dtype, expected in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
    ):
        model = nn.Linear(6, 4, dtype=dtype)
        acc = ak.FusedAccumulator(model, process_group=group(), comm_dtype="auto")
        x = batch(3, seed=rank)[0].repeat(1, 2)[:, :6].to(dtype)
        acc.backward(model(x).float().sum())
        sent.clear()
        torch.distributed.all_reduce = spy
        try:
            acc.finalize(sgd(acc))
        finally:
            torch.distributed.all_reduce = send
        assert {dtype for dtype, _ in sent} == {expected}
        own = [torch.autograd.grad(model(x).float().sum(), p)[0].float() for p in model.parameters()]
        for p, g in zip(model.parameters(), own, strict=True):
            dist.all_reduce(g)
            torch.testing.assert_close(p.grad.float() * size, g, rtol=2**-7, atol=2**-7)


class Tied(nn.Module):
    """A small language model whose output layer is its embedding: a module, or a function that no module hook sees."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        """The mean over tokens of something that depends on all parameters."""
        hidden = self.embedding(ids)
        hidden = hidden + self.body(hidden)
        scores = nn.functional.linear(hidden, self.embedding.weight) if self.functional else self.head(hidden)
        return scores.logsumexp(-1).mean()


def tied_weights_in_the_last_backward(rank, size):
    """A weight whose gradient comes in two parts is sent when both are there, fused or not."""
    batches = [
        [torch.randint(11, (n,), generator=torch.Generator().manual_seed(10 * r + i)) for i, n in enumerate(SIZES[r])]
        for r in range(size)
    ]
    twin = Tied(functional=False)
    total = sum(map(sum, SIZES[:size]))
    for ids in (ids for of_rank in batches for ids in of_rank):
        (twin(ids) * (len(ids) / total)).backward()
    expected = [p.grad for p in twin.parameters()]
    for fused, functional, bucket_bytes in itertools.product((False, True), (False, True), (8, 400, 10**6)):
        model = Tied(functional)
        options = {"release": "backward", "bucket_bytes": bucket_bytes, "fuse_weight_gradients": fused}
        acc = ak.FusedAccumulator(model, process_group=group(), **options)
        for _ in range(3):
            for ids in acc.window(batches[rank]):
                acc.backward(model(ids), len(ids))
            assert acc.engine.window.sent.count
            acc.finalize(sgd(acc))
            assert_close([p.grad for p in model.parameters()], expected)
            acc.zero_()
        acc.remove()


def tied_weights_under_autocast(rank, size):
    """Nor is it sent when the output layer's 16-bit part is there, and the embedding's is still to come."""
    ids = torch.randint(11, (5,), generator=torch.Generator().manual_seed(rank))
    everyones = [torch.empty_like(ids) for _ in range(size)]
    dist.all_gather(everyones, ids)
    twin = Tied(functional=False)
    (sum(map(twin, everyones)) / size).backward()
    smallest, graph.SMALLEST_CAST = graph.SMALLEST_CAST, 0
    for functional, bucket_bytes in itertools.product((False, True), (8, 400, 10**6)):
        model = Tied(functional).float()
        options = {"release": "backward", "bucket_bytes": bucket_bytes}
        acc = ak.FusedAccumulator(model, process_group=group(), fuse_weight_gradients=False, **options)
        for _ in range(4):
            for _ in acc.window(range(2)):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(ids)
                acc.backward(loss)
            acc.finalize(sgd(acc))
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert (p.grad - q.grad).norm() <= 2**-5 * q.grad.norm()  # some roundings to 8 bits
            acc.zero_()
        assert " 0 taken in 16 bits" not in repr(acc)
        acc.remove()
    graph.SMALLEST_CAST = smallest


def what_devices_conclude(rank, size):
    """Without a look of the host's: flags stay flags, what differs between ranks is one, a dropped window is empty."""
    _, acc = build()
    segments = sum(len(buffer.segments) for buffer in acc._store.buffers)
    clean, poisoned = [2.0, 0.0, 2.0, 0.0], [2.0, 1.0, 2.0, 1.0]
    divisors = torch.tensor([3.0, 3.0 + rank], dtype=torch.float64)
    for state, options, expected in (
        (clean, {}, [2.0 * size, 0.0, 2.0 * size, 0.0]),
        (poisoned, {}, [2.0 * size, 1.0, 2.0 * size, 1.0]),
        (poisoned if rank else clean, {}, [2.0 * size, 1.0, 2.0 * size, 1.0]),
        (clean, {"divisor": divisors[0]}, [2.0 * size, 0.0, 2.0 * size, 0.0]),
        (clean, {"divisor": divisors[1]}, [2.0 * size, 1.0, 2.0 * size, 1.0]),
        (clean, {"window": rank}, [2.0 * size, 1.0, 2.0 * size, 1.0]),
        (clean, {"norms": 1, "limit": divisors[1]}, [2.0 * size, 1.0, 2.0 * size, 1.0]),
        (clean, {"dropped": rank == 1}, [0.0] * 4),
    ):
        given, sent = {"dropped": False, "squares": None, "divisor": None, **options}, Sent()
        tensor = torch.tensor(state, dtype=torch.float64)
        loss = torch.tensor([6.0, 2.0], dtype=torch.float64)
        stats = acc._ranks.all_reduce_stats(
            LocalStats(state=tensor, touched=bytes(segments), sent=sent, loss=lambda v=loss: v, **given)
        )
        acc._ranks.reduce(sent, lambda buffer, parts: None)
        assert stats.state.tolist() == expected
        assert stats.loss.tolist() == ([0.0, 0.0] if "dropped" in options else [12.0, 4.0])


def parts_are_clipped(rank, size):
    """Each by the norm of its mean over all ranks; what is in no part is left."""
    for release, fused in itertools.product(("microbatch", "backward"), (False, True)):
        model, acc = build(release=release)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1, fused=fused)
        twin = mlp(torch.float64)
        true_grads(twin, of_all(size))
        for x, y in acc.window(data(rank)):
            acc.backward(mse_loss(model(x), y), len(x))
        norms = acc.step(optimizer, max_norm=[(model[0].parameters(), 0.01), (model[2].parameters(), 1e3)])
        for norm, layer, limit in zip(norms, (twin[0], twin[2]), (0.01, 1e3), strict=True):
            expected = nn.utils.clip_grad_norm_(layer.parameters(), limit)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        assert norms[0] > 0.01
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert_close(parameters(model), parameters(twin))


TWO_RANKS = [
    backward_that_crosses_ranks,
    equal_weights_keep_their_bits,
    units_change_no_bits,
    long_form_warns_of_synchronised_norms,
    gradients_that_functions_add,
    functions_of_torch,
    units_of_accumulators,
    collectives_of_the_users,
    accumulators_side_by_side,
    chunks_go_in_the_order_of_layers,
    chunks_wait_for_no_bucket,
    marked_on_some_ranks_only,
    windows_look_one_ahead,
    sums_in_bf16,
    tied_weights_in_the_last_backward,
    tied_weights_under_autocast,
    what_devices_conclude,
    parts_are_clipped,
]
FOUR_RANKS = [backward_that_crosses_ranks, a_group_of_some]
