"""Windows on ranks that few loops have: parts of a gradient, losses and marks that come another way than usual."""

from __future__ import annotations

import contextlib
import copy
import unittest

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.models import batch, grads_of, mlp, relative_error
from tests.support.rank_scenarios import sgd
from tests.support.ranks import message, parameters


class Tied(nn.Module):
    """An embedding whose weight is the head's too, which is no module: half of its gradient can be fused."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 32)
        self.body = nn.Linear(32, 32)

    def forward(self, tokens):
        """Logits."""
        return nn.functional.linear(torch.tanh(self.body(self.embedding(tokens))), self.embedding.weight)


def fused_and_in_grad(rank, size):
    """The error of gradients that come in two parts, of which one is in `.grad` until backward has ended."""
    torch.manual_seed(0)
    model = Tied()
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, fuse_weight_gradients=True)
    assert "whole micro-batches" in repr(acc)
    found = []
    for before in (False, True):  # whether each micro-batch has had a backward of the loop's own
        for window in range(4):
            generator = torch.Generator().manual_seed(window)
            data = torch.randint(0, 2000, (size, 3, 2, 8), generator=generator)
            twin = copy.deepcopy(model).double()
            for x, y in data.flatten(0, 1):
                (nn.functional.cross_entropy(twin(x), y) * (1 + before) / (3 * size)).backward()
            for x, y in acc.window(data[rank]):
                if before:
                    nn.functional.cross_entropy(model(x), y).backward()
                acc.backward(nn.functional.cross_entropy(model(x), y))
            acc.finalize(sgd(acc.parameters()))
            found.append(relative_error(grads_of(acc), [p.grad for p in twin.parameters()]))
            acc.zero_()
    return found


def _shrink(param):
    param.grad.mul_(0.1)


def watched_by_others(rank, size):
    """The error where a later hook changes a gradient, once fused, that is added after the last backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    group = torch.distributed.group.WORLD
    acc = ak.FusedAccumulator(
        model, process_group=group, release="backward", bucket_bytes=1, fuse_weight_gradients=True
    )
    found = []
    for window in range(6):
        if window == 3:
            model[1].weight.register_post_accumulate_grad_hook(_shrink)
        twin = copy.deepcopy(model)
        data = torch.randn(size, 2, 3, 4, generator=torch.Generator().manual_seed(window), dtype=torch.float64)
        for x in data.flatten(0, 1):
            (twin(x).square().mean() / (2 * size)).backward()
        if window >= 3:
            twin[1].weight.grad.mul_(0.1)
        for x in acc.window(data[rank]):
            acc.backward(model(x).square().mean())
        acc.finalize(sgd(acc.parameters()))
        found.append(relative_error(grads_of(acc), [p.grad for p in twin.parameters()]))
        acc.zero_()
    return found


class _OfAllRanks(torch.autograd.Function):
    """As it is; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        return grad


def first_weight_is_zero(rank, size):
    """The error where others agree on a unit while the backward of a weight of 0 runs; the first of its job."""
    store = torch.distributed.distributed_c10d._get_default_store()
    model = nn.Linear(4, 3)
    group = torch.distributed.group.WORLD
    acc = ak.FusedAccumulator(model, process_group=group, fuse_weight_gradients=True, release="backward")
    xs = [batch(2, seed=other)[0][:, :4] for other in range(size)]
    loss = _OfAllRanks.apply(model(xs[rank])).sum() * (1 + rank)
    if rank == 0:
        loss.register_hook(lambda grad: store.set("backward runs", ""))
    else:
        store.wait(["backward runs"])
    acc.backward(loss, weight=0.0 if rank == 0 else 512.0)
    acc.finalize()
    expected = sum(range(2, size + 1)) / (size - 1) * torch.cat(xs).sum(0).expand(3, 4)
    return relative_error([model.weight.grad], [expected])


def one_loss_two_accumulators(rank, size):
    """What the second says to gradients of a loss that the first has weighted; and its error once they are dropped."""
    group = torch.distributed.group.WORLD
    found = []
    for release in ("auto", "backward"):
        models = [mlp(torch.float64), nn.Linear(3, 2, dtype=torch.float64)]
        twin = copy.deepcopy(models[1])
        first, second = (ak.FusedAccumulator(m, process_group=group, release=release) for m in models)
        x, y = batch(4 + rank, torch.float64, seed=rank)
        weight = 3.0 + 2 * rank
        pair = nn.Sequential(*models)

        first.backward(pair(x).square().mean(), weight=weight)
        found.append(message(second.accumulate))
        found.append(message(second.backward, models[1](y).square().mean()))  # one of its own on top
        second.discard()
        second.zero_()
        first.backward_coupled(x.split(2), pair, lambda rows: rows.square().mean(), weight=weight)
        found.append(message(second.accumulate))
        second.discard()
        second.zero_()

        # A discriminator: what the generator's turn has left is thrown away.
        first.backward(pair(x).square().mean(), weight=weight)
        if release == "auto":
            models[1].zero_grad()
        else:
            second.discard()
        second.backward(models[1](y).square().mean(), weight=weight)
        second.finalize()
        batches = [(3.0 + 2 * other, batch(4 + other, torch.float64, seed=other)[1]) for other in range(size)]
        sum((w * twin(rows).square().mean() for w, rows in batches), torch.zeros(())).backward()
        total = sum(w for w, _ in batches)
        found.append(relative_error(grads_of(second), [p.grad / total for p in twin.parameters()]))
        first.remove()
        second.remove()
    return found


def grown_on_one_rank(rank, size):
    """A joined state where one rank has had a micro-batch since a layer was unfrozen; and where only one unfroze it."""
    found = []
    for everywhere in (True, False):
        model = mlp()
        model[4].requires_grad_(False)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
        acc.backward(model(batch(3)[0]).sum())
        acc.step(sgd(acc.parameters()))
        if everywhere or rank == 0:
            model[4].requires_grad_(True)
        if rank == 0:
            acc.backward(model(batch(3)[0]).sum())
        if everywhere:
            found.append(sorted(acc.state_dict(reduced=True)["sums"]))
        else:
            found.append(message(acc.state_dict, reduced=True))
        acc.remove()
    return found


def discarded_last(rank, size):
    """The last batch of `acc.window` fails on the last rank: in forward, in backward, and without a word."""
    found = []
    for how in ("forward", "backward", "break"):
        model = mlp()
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
        for i in acc.window(range(3)):
            if rank != size - 1 or i < 2:
                acc.backward(model(batch(3, seed=i)[0]).sum(), weight=3)
                continue
            if how == "break":
                break
            with contextlib.suppress(ValueError):
                loss = model(batch(3, seed=i)[0]).sum()
                if how == "forward":
                    raise ValueError
                loss.register_hook(_fail)
                acc.backward(loss, weight=3)
            acc.discard()
        acc.step(sgd(acc.parameters()))
        found.append((acc.step_was_skipped, float(acc.metrics()["weight"])))
        acc.remove()
    return found


def _fail(grad):
    raise ValueError("in backward")


def marks_end_with_windows(rank, size):
    """Batches of `acc.window` that are taken by `next`, and the loop of the next window without it."""
    model = mlp()
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD)
    optimizer = sgd(acc.parameters())
    kept = []
    for window in range(4):
        batches = acc.window(range(2)) if window % 2 == 0 else iter(range(2))
        kept.append(batches)
        for i in range(2):
            next(batches)
            if i == 1 - rank and window == 0:  # the habit of zero_grad(); what it drops is that rank's
                acc.zero_()
            if i == 1 and window == 2:  # of a window that is over, it says nothing of the one that is open
                kept[0].close()
            acc.backward(model(batch(3, seed=window)[0]).sum())
            begun = acc.engine.window.sent.count > 0
        assert begun is (window % 2 == 0)
        acc.step(optimizer)
    return parameters(model)


def removed_from_a_static_graph(rank, size):
    """What is said of a module whose first backwards were silent, and of one that had none."""
    said = unittest.TestCase()
    for trains in (True, False):
        ddp = DistributedDataParallel(mlp(), static_graph=True)
        acc = ak.FusedAccumulator(ddp)
        if trains:
            acc.backward(ddp(batch(3, seed=rank)[0]).sum())
            acc.step(sgd(acc.parameters()))
        with (said.assertLogs if trains else said.assertNoLogs)("accumkernels", "WARNING") as caught:
            acc.remove()
        if trains:
            found = caught.output
    return found


def saved_averaged(rank, size):
    """Noise scale and loss with, and without, a checkpoint between `finalize` and the step; of one rank, and joined."""
    found = []
    for reduced in (None, False, True):
        model = mlp(torch.float64)
        acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, noise_scale=True)
        optimizer = sgd(acc.parameters())
        for window in range(3):
            for i in range(2 + rank):
                x, y = batch(3 + i, torch.float64, seed=100 * window + 10 * rank + i)
                acc.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
            acc.finalize(optimizer)
            if reduced is not None and window > 0:
                acc.load_state_dict(acc.state_dict(reduced=reduced))
                acc.finalize(optimizer)
            optimizer.step()
            loss = float(acc.metrics()["loss"])
            acc.zero_()
        scale = acc.noise_scale()
        found.append((float(scale), scale.windows, loss))
        acc.remove()
    return found
