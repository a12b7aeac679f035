"""What tests/ranks/test_reduction.py runs on every rank: what is known of a window, by all ranks together."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.data_parallel_scenarios import build, data, half, sgd
from tests.support.models import mlp


def loss_of_a_window(rank, size):
    """The mean over the samples of all ranks, without those of a dropped micro-batch, whose loss is NaN."""
    forms = {"release": "microbatch"}, {"release": "backward"}, {"release": "auto", "overflow": "microbatch"}
    for kwargs, unit in itertools.product(forms, (1, 0.1)):
        drops = kwargs.get("overflow") == "microbatch"
        model, acc = build(**kwargs)
        optimizer = sgd(acc, 0.0)
        for long_form in (False, True):
            for i, (x, y) in enumerate(data(rank)):
                loss = mse_loss(model(x), y) * (math.nan if drops and (rank, i) == (0, 1) else 1)
                weight = unit * len(x)
                if long_form and kwargs.get("release") != "backward":
                    loss.backward()
                    acc.accumulate(weight, loss=loss)
                else:
                    acc.backward(loss, weight)
            acc.step(optimizer)
            used = [part for r in range(size) for i, part in enumerate(data(r)) if not drops or (r, i) != (0, 1)]
            x, y = (torch.cat(tensors) for tensors in zip(*used, strict=True))
            expected = mse_loss(mlp(torch.float64)(x), y).item()
            assert acc.metrics()["loss"].item() == pytest.approx(expected, rel=1e-12)
            assert acc.metrics()["weight"].item() == pytest.approx(unit * len(x), rel=1e-12)


def noise_that_not_all_ranks_measure(rank, size):
    """A window counts where all do: its squares are the sum of those of all ranks."""
    model, acc = build(release="microbatch")
    optimizer = sgd(acc, 0.0)
    alone_model = mlp(torch.float64)
    alone = ak.FusedAccumulator(alone_model, process_group=False, noise_scale=True)
    for window in range(2):
        if rank == 0 or window == 1:
            acc.noise_scale()
        half(acc, model, rank)
        acc.step(optimizer)
        assert acc.noise_scale().windows == window
    for r in range(size):
        half(alone, alone_model, r)
    alone.step(sgd(alone, 0.0))
    assert float(acc.noise_scale()) == pytest.approx(float(alone.noise_scale()), rel=1e-9)


TWO_RANKS = [loss_of_a_window, noise_that_not_all_ranks_measure]
