"""64 ranks, threads of one process, train windows of every kind; held to one process in float64."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import nn

import accumkernels as ak
from tests.support import threads
from tests.support.models import relative_error
from tests.support.ranks import parameters

pytestmark = pytest.mark.starts

RANKS = 64
WINDOWS = 50
UNFROZEN_IN = 7
MAX_NORM = 0.5
EXACT = 1e-12  # of fp64: sums of some hundred products, in another order, over 50 windows
WIDTH = 4


class Heads(nn.Module):
    """A body, of which a layer is frozen at first, and two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.double()
        self.body[0].requires_grad_(False)

    def forward(self, x, head):
        """By one of the heads."""
        return self.heads[head](self.body(x))


def _plan():
    """For each window, how it is and each rank's micro-batches: a seed, a number of samples, a head."""
    chosen = random.Random(1)
    for window in range(WINDOWS):
        kind = ["even", "uneven", "few", "empty", "overflow", "one head"][window % 6 if window > 3 else 0]
        parts = []
        for rank in range(RANKS):
            count = {"even": 1, "uneven": chosen.choice([0, 1, 1, 2]), "empty": 0}.get(kind, 1)
            if kind == "few" and rank not in (5, 63):
                count = 0
            head = 0 if kind == "one head" else rank % 2
            parts.append([(1000 * window + 10 * rank + i, chosen.randint(1, 3), head) for i in range(count)])
        yield kind, parts


PLAN = list(_plan())
START = Heads()  # threads share torch's random numbers


def data(seed, samples):
    """A micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator),
        torch.randn(samples, 1, dtype=torch.float64, generator=generator),
    )


def sgd(params):
    """With momentum, which a skipped step or a gradient of zeros would show in."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trained(release, windows, rank, size):
    """Parameters, norms and which steps were skipped, on a rank."""
    model = copy.deepcopy(START)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    acc = ak.FusedAccumulator(model, scaler=scaler, process_group=torch.distributed.group.WORLD, release=release)
    optimizer = sgd(acc.parameters())
    norms, skipped = [], []
    for window, (kind, parts) in enumerate(PLAN[:windows]):
        if window == UNFROZEN_IN:
            model.body[0].requires_grad_(True)
        for seed, samples, head in acc.window(parts[rank]):
            x, y = data(seed, samples)
            if kind == "overflow" and rank == size // 2:
                y[0, 0] = math.inf
            acc.backward(nn.functional.mse_loss(model(x, head), y), weight=samples)
        norms.append(acc.step(optimizer, max_norm=MAX_NORM).item())
        skipped.append(acc.step_was_skipped)
    return parameters(model), norms, skipped, scaler.get_scale()


def expected(windows):
    """The same of stock torch with all samples of a window in one batch for each head."""
    model, norms, skipped = copy.deepcopy(START), [], []
    optimizer = sgd(model.parameters())
    for window, (kind, parts) in enumerate(PLAN[:windows]):
        if window == UNFROZEN_IN:
            model.body[0].requires_grad_(True)
        total = sum(samples for part in parts for _, samples, _ in part)
        skipped.append(kind in ("empty", "overflow"))
        for head in range(2) if not skipped[-1] else ():
            batches = [data(seed, samples) for part in parts for seed, samples, of in part if of == head]
            if batches:
                x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
                (nn.functional.mse_loss(model(x, head), y, reduction="sum") / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        if not skipped[-1]:
            optimizer.step()
        optimizer.zero_grad()
    return parameters(model), norms, skipped


@pytest.mark.parametrize(("release", "windows"), [("backward", WINDOWS), ("microbatch", 14)])
def test_equals_one_process(release, windows):
    """Unequal counts, ranks without any, an overflow on one, heads that some windows leave out, a layer unfrozen."""
    found = threads.run(RANKS, lambda rank, size: trained(release, windows, rank, size))
    values, norms, skipped = expected(windows)
    overflows = sum(kind == "overflow" for kind, _ in PLAN[:windows])
    for result in found:
        assert all(map(torch.equal, result[0], found[0][0]))
        assert result[2] == skipped
        assert result[3] == 2.0 ** (60 - overflows)
    assert relative_error(found[0][0], values) < EXACT
    for norm, true, skips in zip(found[0][1], norms, skipped, strict=True):
        assert skips or norm == pytest.approx(true, rel=EXACT)
