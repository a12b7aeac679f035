"""What of torch's own runs around an accumulator on several ranks: wrapper, LocalSGD, join(), sharded optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.data_parallel_scenarios import assert_close, data, group, half, of_all, sgd, true_grads
from tests.support.models import mlp
from tests.support.ranks import logged, message, parameters


def long_form_warns_of_a_late_wrapper(rank, size):
    """DistributedDataParallel, built after the accumulator, averages before the weight; right where losses carry it."""
    for late, count in ((True, 1), (False, 0)):
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=group())
        ddp = DistributedDataParallel(model)
        with logged() as texts:
            for x, y in data(rank):
                if late:
                    mse_loss(ddp(x), y).backward()
                    acc.accumulate(len(x))
                else:
                    acc.backward(mse_loss(ddp(x), y), len(x))
        assert len(texts) == count
        assert all("is in a DistributedDataParallel module" in text and "acc.backward" in text for text in texts)
        acc.finalize()
        if not late:
            assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), of_all(size)))
        acc.remove()


def alone_on_a_wrapped_module(rank, size):
    """process_group=False contradicts a DistributedDataParallel module, once its forward makes backward average."""
    for late in (False, True):
        for called, count in (("wrapper", 1), ("module", 0), ("silent", 0)):
            model = mlp(torch.float64)
            ddp = None if late else DistributedDataParallel(model)
            if called == "silent":  # as by an accumulator over the wrapper, before
                ddp = ddp or DistributedDataParallel(model)
                with ak.FusedAccumulator(ddp) as acc:
                    for x, y in data(rank):
                        acc.backward(mse_loss(ddp(x), y), len(x))
            acc = ak.FusedAccumulator(model, process_group=False)
            ddp = ddp or DistributedDataParallel(model)
            with logged() as texts:
                for _ in range(2):
                    for x, y in data(rank):
                        acc.backward(mse_loss((ddp if called == "wrapper" else model)(x), y), len(x))
                    acc.finalize()
                    acc.zero_()
            assert len(texts) == count, (late, called, texts)
            assert all("'0.weight' is in a DistributedDataParallel module" in text for text in texts)
            acc.remove()


def local_sgd(rank, size):
    """Torch's PostLocalSGDOptimizer averages weights in a window's step, as in a loop of the whole batches."""
    weights = []
    for fused in (True, False):
        model = mlp(torch.float64)
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager)
        acc = ak.FusedAccumulator(model, process_group=False) if fused else None
        for _ in range(4):
            own = data(rank)
            total = sum(len(x) for x, _ in own)
            for x, y in own:
                if acc is not None:
                    acc.backward(mse_loss(model(x), y), len(x))
                else:
                    (mse_loss(model(x), y) * (len(x) / total)).backward()
            if acc is not None:
                acc.step(optimizer)
            else:
                optimizer.step()
                optimizer.zero_grad()
        weights.append(list(model.parameters()))
    assert_close(*weights)
    for p in weights[0]:
        mean = p.detach().clone()
        torch.distributed.all_reduce(mean)
        torch.testing.assert_close(mean / size, p.detach())


def alone_on_ignored_parameters(rank, size):
    """What DistributedDataParallel ignores it does not average: nothing is refused, and nothing warned of."""
    model = mlp(torch.float64)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp = DistributedDataParallel(model)
    acc = ak.FusedAccumulator([model[0].weight], process_group=False)
    with logged() as texts:
        for x, y in data(rank):
            mse_loss(ddp(x), y).backward()
            acc.accumulate(len(x))
        acc.finalize()
    assert texts == []
    twin, own = mlp(torch.float64), data(rank)
    for x, y in own:
        (mse_loss(twin(x), y) * (len(x) / sum(len(x) for x, _ in own))).backward()
    assert_close([model[0].weight.grad], [twin[0].weight.grad])
    acc.remove()
    ak.FusedAccumulator([model[0].weight], process_group=group()).remove()


def join_and_hooks(rank, size):
    """join() around whole windows, and a hook that would never be called, are refused; micro-batches may be joined."""
    model = DistributedDataParallel(mlp(torch.float64))
    acc = ak.FusedAccumulator(model)
    optimizer = sgd(acc)
    for joined in (lambda: model.join(), lambda: Join([model])):
        with joined():
            half(acc, model, rank)
            text = message(acc.step, optimizer)[1]
            assert "join()" in text
            assert "micro-batches" in text
        acc.zero_()
    with model.join():
        half(acc, model, rank, end=3)
    acc.finalize(optimizer)
    assert_close([p.grad for p in model.parameters()], true_grads(mlp(torch.float64), of_all(size)))
    acc.zero_()
    model.register_comm_hook(None, lambda state, bucket: None)
    half(acc, model, rank)
    text = message(acc.finalize, optimizer)[1]
    assert "communication hook" in text
    assert "comm_dtype=" in text


def zero_redundancy_optimizer(rank, size):
    """Each rank steps a part of the parameters, and all have the parameters that one process has."""
    model, twin = mlp(torch.float64), mlp(torch.float64)
    acc = ak.FusedAccumulator(model, process_group=group())
    optimizer = ZeroRedundancyOptimizer(acc.parameters(), torch.optim.AdamW, lr=0.01)
    stock = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in acc.window(data(rank)):
            acc.backward(mse_loss(model(x), y), len(x))
        norm = acc.step(optimizer, max_norm=0.05)
        stock.zero_grad()
        true_grads(twin, of_all(size))
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(twin.parameters(), 0.05).item(), rel=1e-12)
        stock.step()
    assert_close(parameters(model), parameters(twin))
    held = sum(t.numel() for state in optimizer.optim.state.values() for t in state.values() if t.dim())
    assert held < 2 * sum(p.numel() for p in model.parameters())


TWO_RANKS = [
    long_form_warns_of_a_late_wrapper,
    alone_on_a_wrapped_module,
    local_sgd,
    alone_on_ignored_parameters,
    join_and_hooks,
    zero_redundancy_optimizer,
]
