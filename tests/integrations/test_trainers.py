"""The loop of every trainer, with and without FusedAccumulator: equal where the trainer is right, right where not.

accelerate (https://github.com/huggingface/accelerate/issues/1847) and Lightning
(https://github.com/Lightning-AI/pytorch-lightning/issues/19987) divide a short last window by all of its steps. All
average the means of unequal micro-batches: https://github.com/huggingface/accelerate/pull/3193,
https://github.com/Lightning-AI/pytorch-lightning/issues/20350, https://github.com/huggingface/transformers/issues/37766.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.support import ranks
from tests.support.backends import same_bits
from tests.support.models import batch, big_batch_grads, mlp, relative_error

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import accumkernels as ak  # noqa: E402
from accumkernels.integrations.lightning import FusedAccumulation  # noqa: E402
from tests.support.trainer_data import LR, item, parameters  # noqa: E402
from tests.support.trainer_loops import TRAINERS  # noqa: E402
from tests.support.trainer_truth import truth  # noqa: E402
from tests.support.trainers import SCALE  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread", "fresh_state", "folder"),
    pytest.mark.filterwarnings("ignore"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

CLIPPED = {"rtol": 1e-5, "atol": 1e-7}  # norms are summed in another order
FUSED = {"rtol": 1e-4, "atol": 1e-6}  # and a fused AdamW that averages in its pass rounds otherwise
ROUNDING = 5e-6  # of the way of fp32 parameters, which is a hundredth of them; measured 2e-6
PRECISIONS = ("fp32", "bf16", "fp16")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where transformers' Trainer may write."""
    monkeypatch.setattr(ranks, "shared", tmp_path)


@pytest.fixture(params=TRAINERS.values(), ids=lambda trainer: trainer.name)
def trainer(request):
    """Each of them."""
    return request.param


def equal(i):
    """Micro-batches of 4 samples, whose means may be averaged."""
    return batch(4, seed=100 + i)


def adamw(fused=False):
    """Of a rate at which it moves."""
    return lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused)


def both(trainer, n, **keywords):
    """Stock's run and ours, over `n` equal micro-batches."""
    keywords = {"numbers": list(range(n)), "make": equal, "weight": None, "optimizer": adamw(), **keywords}
    stock = {key: value for key, value in keywords.items() if key != "options"}
    return [trainer.run(ours=False, **stock), trainer.run(**keywords)]


def assert_bits(values, others):
    """Of all parameters."""
    assert all(same_bits(values[name], others[name]) for name in others)


def assert_close(values, others, tolerance):
    """Of all parameters."""
    for name, value in others.items():
        torch.testing.assert_close(values[name], value, **tolerance)


def moved(values):
    """The gradient of the one window of SGD."""
    return [(before - values[name]) / LR for name, before in parameters(mlp()).items()]


def windows_of(at):
    """The adapter's."""
    if hasattr(at.owner, "strategy"):
        return FusedAccumulation.of(at.owner)._windows
    return getattr(at.owner, "accelerator", at.owner)._windows


@pytest.mark.parametrize(
    "keywords", [{}, {"options": {"release": "backward"}}, {"at_end": lambda at: None}], ids=["", "backward", "reads"]
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_bits_over_whole_windows(trainer, precision, fused, keywords):
    """Two epochs of two windows; where a trainer is right, ours is it, bit for bit, with its schedule."""
    keywords = {"epochs": 2, "schedule": True, "optimizer": adamw(fused), **keywords}
    stock, ours = both(trainer, 8, precision=precision, **keywords)
    assert_bits(ours.values, stock.values)
    assert ours[2:] == stock[2:]
    assert len(ours.rates) == 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipped(trainer, precision):
    """By the norm of the averaged gradient, fp16 included, whose scaler must not unscale a second time."""
    stock, ours = both(trainer, 8, precision=precision, epochs=2, clip=0.05)
    assert_close(ours.values, stock.values, CLIPPED)
    assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
    _, unclipped = both(trainer, 8, precision=precision, epochs=2)
    assert not all(same_bits(ours.values[name], value) for name, value in unclipped.values.items())


@pytest.mark.parametrize("bad", [{1}, {3}, {0, 3, 5}], ids=str)
def test_overflow_in_fp16(trainer, bad):
    """Scale, skipped steps and the learning rates that follow from them are the trainer's."""
    stock, ours = both(trainer, 12, precision="fp16", bad=bad, schedule=True)
    assert_bits(ours.values, stock.values)
    assert ours[2:] == stock[2:]
    assert ours.scale < SCALE


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_overflow_without_a_scaler(trainer, precision):
    """Nothing checks for inf in stock: the model is lost. Ours skips."""
    stock, ours = both(trainer, 4, precision=precision, bad={1})
    assert not all(value.isfinite().all() for value in stock.values.values())
    assert_bits(ours.values, parameters(mlp()))
    assert ours.skipped in ([], [True])


@pytest.mark.parametrize("steps", [3, 4])
def test_the_last_window_may_be_short(trainer, steps):
    """Two micro-batches in a window of 3 or 4: the mean over the two."""
    stock, ours = both(trainer, 2, steps=steps, optimizer=lambda p: torch.optim.SGD(p, LR))
    (x, y), (u, v) = equal(0), equal(1)
    expected = big_batch_grads(mlp(), torch.cat([x, u]), torch.cat([y, v]))
    assert relative_error(moved(ours.values), expected) < ROUNDING
    part = 1 if trainer.name == "transformers" else 2 / steps
    assert relative_error(moved(stock.values), [grad * part for grad in expected]) < ROUNDING


@pytest.mark.parametrize("options", [{}, {"release": "backward", "bucket_bytes": 64}], ids=str)
@pytest.mark.parametrize("weight", [len, lambda x: torch.tensor(len(x))], ids=["number", "tensor"])
def test_unequal_micro_batches(trainer, weight, options):
    """Each counted by its samples, they are the big batch."""
    numbers = list(range(4))
    expected, _ = truth(1, windows=[numbers])
    ours = trainer.run(numbers=numbers, weight=weight, options=options)
    stock = trainer.run(numbers=numbers, ours=False)
    off = [relative_error(moved(run.values), moved(expected)) for run in (ours, stock)]
    assert off[0] < ROUNDING
    assert off[1] > 0.01


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_unequal_micro_batches_without_weights(trainer, precision, caplog):
    """They count the same, as in stock: one warning says so; none of equal ones, of weights, or of one micro-batch."""
    unequal = {"numbers": list(range(8)), "epochs": 2, "precision": precision}
    weighted = trainer.name == "transformers"  # by default, by rows
    for keywords, said in (
        ({"weight": None}, 0 if weighted else 1),
        ({"weight": None, "make": equal}, 0),
        ({"weight": None, "steps": 1}, 0),
        ({"weight": len}, 0),
        ({"weight": lambda x: 1}, 0),
    ):
        caplog.clear()
        trainer.run(**{**unequal, **keywords})
        found = [each.getMessage() for each in caplog.records if each.name.startswith("accumkernels.window")]
        numbers = ", ".join(str(item(i)[0].shape[0] * 3) for i in range(4))
        assert [f"means over unequal numbers of items ({numbers})" in each for each in found] == [True] * said


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_the_user_has_divided_too(trainer, precision, caplog):
    """As in rf-detr, and in stock, it is divided twice: one warning says so; none of a division by another number."""
    keywords = {"numbers": list(range(8)), "epochs": 2, "weight": None, "make": equal, "precision": precision}
    for divided_by, said in ((4, 1), (3, 0), (1, 0)):
        caplog.clear()
        trainer.run(divided_by=divided_by, **keywords)
        found = [each.getMessage() for each in caplog.records if each.name.startswith("accumkernels.window")]
        assert ["was divided by 4, the number of its micro-batches" in each for each in found] == [True] * said


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_divided_in_manual_optimization(precision, caplog):
    """Where a stock loop has to divide it."""

    def step(module, usual, data, index):
        module.manual_backward(usual(data, index))
        if index % 4 == 3:
            module.optimizers().step()

    for divided_by, said in ((4, 1), (3, 0)):
        caplog.clear()
        TRAINERS["lightning"].run(
            numbers=list(range(8)), manual=True, step=step, divided_by=divided_by, precision=precision
        )
        assert ["was divided by 4" in each.getMessage() for each in caplog.records] == [True] * said


@pytest.mark.parametrize("places", [1, 2])
def test_unequal_losses_in_manual_optimization(places, caplog):
    """From one place of a loop they are warned of; from two they may be of two kinds, such as a GAN's."""

    def step(module, usual, data, index):
        if places == 2 and index % 2:
            module.manual_backward(usual((data[0][:1], data[1][:1]), index))
        else:
            module.manual_backward(usual((data[0][:5], data[1][:5]) if places == 2 else data, index))
        if index % 4 == 3:
            module.optimizers().step()

    make = (lambda i: batch(8, seed=i)) if places == 2 else item
    TRAINERS["lightning"].run(numbers=list(range(8)), manual=True, weight=None, step=step, make=make)
    assert sum("unequal numbers of items" in each.getMessage() for each in caplog.records) == (places == 1)


def test_gradients_that_a_loop_sees(trainer):
    """None inside a window, and at its end the average, unscaled."""
    inside, at_end, numbers = [], [], list(range(4))
    trainer.run(
        numbers=numbers,
        precision="fp16",
        inside=lambda at: inside.extend(p.grad for p in at.model.parameters()),
        at_end=lambda at: at_end.append([p.grad.clone() for p in at.model.parameters()]),
    )
    assert inside == [None] * 18
    data = [torch.cat(parts) for parts in zip(*map(item, numbers), strict=True)]
    (grads,) = at_end
    assert relative_error(grads, big_batch_grads(mlp(), *data)) < 5e-3  # in fp16


def test_a_window_is_open_before_its_first_forward(trainer):
    """Or autocast would cast the weights of that micro-batch, and its gradients come widened."""
    finalized = []
    before = lambda at: finalized.append(windows_of(at)[0].finalized)  # noqa: E731
    trainer.run(numbers=list(range(8)), precision="bf16", before=before)
    assert finalized == [False] * 8


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True])
def test_left_to_the_optimizers_pass(trainer, fused, clip, precision, monkeypatch):
    """Nothing is averaged before the step where no code could see it; the result is the same."""
    finalized, runs = [], []
    original = ak.FusedAccumulator.finalize
    monkeypatch.setattr(ak.FusedAccumulator, "finalize", lambda *a, **k: (finalized.append(1), original(*a, **k))[1])
    keywords = {"numbers": list(range(8)), "clip": clip, "precision": precision, "optimizer": adamw(fused)}
    says = {"begin": lambda at: setattr(at.owner, "reads_gradients", False)} if trainer.name == "accelerate" else {}
    for hooks in (says, {"at_end": lambda at: None}):
        finalized.clear()
        runs.append(trainer.run(**keywords, **hooks))
        assert bool(finalized) == ("at_end" in hooks)
    assert_close(runs[0].values, runs[1].values, FUSED)
    assert runs[0].norms == pytest.approx(runs[1].norms, rel=1e-6)
