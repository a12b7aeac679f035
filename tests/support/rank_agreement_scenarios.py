"""Ranks that do not end the same window, or are told late that a graph is static: what each of them hears."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accumkernels as ak
from tests.support.models import batch, grads_of, mlp, relative_error
from tests.support.rank_scenarios import sgd
from tests.support.ranks import message, parameters


def _build(release="auto"):
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, process_group=torch.distributed.group.WORLD, release=release)
    return model, acc, sgd(acc.parameters())


def _loss(model, rank, window, i):
    return model(batch(2, torch.float64, seed=100 * rank + 10 * window + i)[0]).square().mean()


def missed_end(rank, size):
    """Rank 1's step is skipped by an exception in its last micro-batch, which the loop catches and goes on."""
    found = []
    for release in ("auto", "microbatch"):
        for drops in (False, True):
            model, acc, optimizer = _build(release)
            before, error = parameters(model), ("", "")
            for window in range(3):
                try:
                    for i in acc.window(range(2)):
                        loss = _loss(model, rank, window, i)
                        if (rank, window, i) == (1, 1, 1):
                            raise ValueError("planted")
                        acc.backward(loss)
                except ValueError:
                    if drops:
                        acc.zero_()
                    continue
                error = message(acc.step, optimizer)
                if window == 0:
                    assert error == ("", "")
                    before = parameters(model)
                if error[0]:
                    break
            same = all(map(torch.equal, before, parameters(model)))
            found.append((error, same))
            torch.distributed.barrier()
            acc.remove()
    return found


def iterated_in_parts(rank, size):
    """A window in two calls, on all ranks alike, where nothing is marked: no error."""
    model, acc, optimizer = _build("microbatch")
    twin = mlp(torch.float64)
    for i in (0, 1):
        for _ in acc.window([None]):
            acc.backward(_loss(model, rank, 0, i))
    acc.finalize(optimizer)
    for other in range(size):
        for i in (0, 1):
            (_loss(twin, other, 0, i) / (2 * size)).backward()
    return relative_error(grads_of(acc), [p.grad for p in twin.parameters()])


def resumed_beside_empty(rank, size):
    """Rank 0 loads a state of all ranks inside a window; the others load one saved before it, or nothing."""
    found = []
    for nothing in (False, True):
        model, acc, optimizer = _build()
        between = acc.state_dict()
        acc.backward(_loss(model, rank, 0, 0))
        inside = acc.state_dict(reduced=True)
        acc.zero_()
        if rank == 0:
            acc.load_state_dict(inside)
        elif not nothing:
            acc.load_state_dict(between)
        acc.backward(_loss(model, rank, 0, 1))
        before = parameters(model)
        error = message(acc.step, optimizer)
        same = all(map(torch.equal, before, parameters(model)))
        acc.zero_()
        acc.load_state_dict(inside)
        acc.backward(_loss(model, rank, 0, 1))
        acc.step(optimizer)  # and on all ranks it is right
        acc.backward(_loss(model, rank, 1, 0))
        acc.step(optimizer)  # the next window was not loaded
        found.append((error, same))
        acc.remove()
    return found


def resumed_before_the_first(rank, size):
    """Rank 0 is inside a window that others have not begun when each saves its own; they load that, and go on."""
    model, acc, optimizer = _build()
    twin = mlp(torch.float64)
    if rank == 0:
        acc.backward(_loss(model, 0, 0, 0))
    state = acc.state_dict()
    acc.zero_()
    acc.load_state_dict(state)
    acc.backward(_loss(model, rank, 0, 1))
    acc.finalize(optimizer)
    for other, i in ((0, 0), *((other, 1) for other in range(size))):
        (_loss(twin, other, 0, i) / (size + 1)).backward()
    return relative_error(grads_of(acc), [p.grad for p in twin.parameters()])


def static_graph_later(rank, size):
    """`_set_static_graph()` once there is an accumulator: the error of gradients, which nobody averages twice."""
    model = mlp(torch.float64)
    ddp = DistributedDataParallel(model)
    acc = ak.FusedAccumulator(ddp)
    optimizer = sgd(acc.parameters())
    ddp._set_static_graph()
    found = []
    for _ in range(3):
        twin = mlp(torch.float64)
        twin.load_state_dict(model.state_dict())
        for i in range(2):
            acc.backward(nn.functional.mse_loss(ddp(batch(2, torch.float64, seed=rank + 2 * i)[0]), torch.ones(2, 3)))
            for other in range(size):
                x = batch(2, torch.float64, seed=other + 2 * i)[0]
                (nn.functional.mse_loss(twin(x), torch.ones(2, 3)) / (2 * size)).backward()
        acc.finalize(optimizer)
        found.append(relative_error(grads_of(acc), [p.grad for p in twin.parameters()]))
        optimizer.step()
        acc.zero_()
    return found


SCENARIOS = [
    missed_end,
    iterated_in_parts,
    resumed_beside_empty,
    resumed_before_the_first,
    static_graph_later,
]
