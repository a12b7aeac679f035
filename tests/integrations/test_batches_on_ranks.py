"""Trainers whose ranks split their batches differently, on two gloo ranks, held to one process on all the data."""

from __future__ import annotations

import copy
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp
from tests.support.ranks import check, run

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from tests.support import batch_scenarios as scenarios  # noqa: E402
from tests.support.trainer_data import LR  # noqa: E402
from tests.support.trainer_truth import ROUNDING, assert_close  # noqa: E402
from tests.support.trainer_truth import truth as other_truth  # noqa: E402
from tests.support.trainers import Samples, gpt2  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

RANKS = 2
OF_TOKENS = 1e-5  # of two steps in fp32, of the way that parameters go


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found: in one start, since the trainers take seconds to import."""
    names = [scenarios.accelerate_batches, scenarios.transformers_batches, scenarios.lightning_batches]
    return run(RANKS, tmp_path_factory.mktemp("ranks"), names)


def truth():
    """Parameters by name and norms, in float64, of SGD on all ranks' batches as one."""
    model, norms = mlp().double(), []
    for window in range(scenarios.WINDOWS):
        x, y = scenarios.of_window(RANKS, window)
        model.zero_grad()
        mse_loss(model(x.double()), y.double()).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize("kind", ["ddp", "two", "fsdp2"])
def test_accelerate(found, kind):
    """Every sample of all ranks counts the same; with FSDP2 ranks have as many parts, and others as they must."""
    check(found, "accelerate_batches")
    expected, expected_norms = truth()
    sizes = []
    for of_rank in found["accelerate_batches"]:
        values, norms, its_sizes = of_rank[kind]
        assert_close(values, expected, ROUNDING["fp32"])
        assert norms == pytest.approx(expected_norms, rel=ROUNDING["fp32"])
        sizes.append(its_sizes)
    if kind == "ddp":
        assert sizes[0][0] == [4]
        assert max(sizes[1][0]) <= scenarios.MOST


def test_losses_that_communicate(found):
    """Where ranks split alone it is an error, before anybody waits; "auto" is refused where forwards do."""
    check(found, "accelerate_batches")
    for of_rank in found["accelerate_batches"]:
        assert of_rank["gathers"][1].startswith("accelerator.gather() in the loss function of backward_batch")
        assert of_rank["auto"][1].startswith("micro_batch='auto' where ranks communicate")


def test_lightning(found):
    """Parts of unequal sizes on one rank; a step that reduces what it logs is an error there."""
    check(found, "lightning_batches")
    expected, _ = truth()
    for values, of_fsdp2, (kind, text) in found["lightning_batches"]:
        assert_close(values, expected, ROUNDING["fp32"])
        assert_close(of_fsdp2, other_truth(RANKS, uneven=False)[0], ROUNDING["fp32"])
        assert kind == "RuntimeError"
        assert text.startswith("training_step communicates")


@pytest.mark.parametrize("kind", ["auto", "gathers"])
def test_transformers(found, kind):
    """Parts add up to the mean over all tokens of all ranks; a loss may gather where their number is agreed on."""
    check(found, "transformers_batches")
    before = gpt2(layers=1)
    twin, losses = copy.deepcopy(before).double(), []
    data = Samples(2 * 8 * RANKS, masked=1)
    for start in (0, 8 * RANKS):
        twin.zero_grad()
        loss = twin(**data.batch(start, start + 8 * RANKS))["loss"]
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in twin.parameters():
                p -= LR * p.grad
    expected, start = dict(twin.named_parameters()), dict(before.named_parameters())
    for of_rank in found["transformers_batches"]:
        values, logged, seen = of_rank[kind]
        error = sum(float((values[k] - expected[k]).square().sum()) for k in expected) ** 0.5
        way = sum(float((start[k] - expected[k]).square().sum()) for k in expected) ** 0.5
        assert error / way < OF_TOKENS
        assert seen == (len(data) if kind == "gathers" else 0)
    logged = found["transformers_batches"][0][kind][1]
    assert logged == pytest.approx(losses, rel=1e-3)  # rank 0 logs, rounded
