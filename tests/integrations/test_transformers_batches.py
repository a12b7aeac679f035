"""The Trainer's `split`: batches of any size in parts that fit, held to stock or to the big batch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.trainers import Samples, gpt2, reset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accumkernels.integrations.transformers import FusedAccumulationMixin, Trainer  # noqa: E402
from tests.integrations.test_transformers import Plain, build, in_order, logged  # noqa: E402
from tests.integrations.test_transformers_losses import HEADS, Causal, Pairs, Preferences, big_batch, fit, made, off  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

ROUNDING = 1e-5  # of two steps in fp32 against fp64, relative to the movement; measured up to 3e-6
SAMPLES = 13  # windows of 8 and 5 samples
MOST = 3  # samples that fit


class Short(Trainer):
    """Has memory for few samples; notes the samples of each forward that fitted."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        size = len(next(v for v in inputs.values() if isinstance(v, torch.Tensor)))
        if size > MOST and torch.is_grad_enabled():
            raise torch.OutOfMemoryError(f"{size} samples")
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled():
            self.ran = [*getattr(self, "ran", []), size]
        return loss


def splitting(split, cls=Short):
    """A class of Trainer that `fit` and `build` make with this `split`."""

    class Splitting(cls):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, split=split, **kwargs)

    return Splitting


WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("arguments", [WHOLE, HALVES], ids=["whole", "halves"])
@pytest.mark.parametrize("split", ["auto", 24, {"micro_batch": 3}], ids=str)
def test_losses_divided_by_the_number(tmp_path, split, arguments):
    """Parts add up: parameters and the logged losses are those of stock's batch, which does not run out of memory."""
    model, data = gpt2(), Samples(SAMPLES, masked=1)
    truth = fit(transformers.Trainer, tmp_path, copy.deepcopy(model).double(), data, **WHOLE)
    ours = fit(splitting(split), tmp_path, model, data, **arguments)
    assert off(ours.model, model, truth.model) < ROUNDING
    assert logged(ours, "loss") == pytest.approx(logged(truth, "loss"), rel=1e-4)  # the Trainer rounds them
    assert sum(ours.ran) == SAMPLES
    assert max(ours.ran) <= (2 if split == 24 else MOST)  # 24 tokens are 2 rows


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForTokenClassification", "BertForMaskedLM"])
@pytest.mark.parametrize("arguments", [WHOLE, HALVES], ids=["whole", "halves"])
def test_means(tmp_path, name, arguments):
    """Weighted by the labels of each part, in the gradient and in the log."""
    config, data = HEADS[name]
    model, data = made(getattr(transformers, name), config()), data(SAMPLES)
    ours = fit(splitting("auto"), tmp_path, model, data, **arguments)
    assert off(ours.model, model, big_batch(model, data)) < ROUNDING
    first = model.double()(**data.batch(0, 8))["loss"].item()
    assert logged(ours, "loss")[0] == pytest.approx(first, rel=1e-3)


def test_a_mean_of_ones_own_model(tmp_path):
    """One that takes no number of items."""
    model, data = Plain(), Samples(SAMPLES)
    truth = big_batch(model, data, lambda m, b: m(**b)["loss"])
    assert off(fit(splitting({"micro_batch": 2}), tmp_path, model, data, **HALVES).model, model, truth) < ROUNDING


def test_label_smoothing(tmp_path):
    """`compute_loss` takes the labels out of its inputs; a part that is tried again still has them."""
    model, data = gpt2(), Samples(SAMPLES, masked=1)
    smooth = {"label_smoothing_factor": 0.1}
    truth = fit(transformers.Trainer, tmp_path, copy.deepcopy(model).double(), data, **WHOLE, **smooth)

    def check(module, args, keywords):
        if len(keywords["input_ids"]) > MOST and torch.is_grad_enabled():
            raise torch.OutOfMemoryError

    model.register_forward_pre_hook(check, with_kwargs=True)
    ours = fit(splitting("auto", Trainer), tmp_path, model, data, **WHOLE, **smooth)
    assert off(ours.model, model, truth.model) < ROUNDING


def test_a_loss_function(tmp_path):
    """That divides by the number, or drops it."""

    def divides(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    def drops(outputs, labels, num_items_in_batch=None):
        return divides(outputs, labels, (labels[:, 1:] != -100).sum())

    model, data = gpt2(), Samples(SAMPLES, masked=1)
    truth = big_batch(model, data, lambda m, b: drops(m(b["input_ids"]), b["labels"]))
    for loss_func in (divides, drops):
        ours = fit(splitting("auto"), tmp_path, model, data, loss_func=loss_func, **HALVES)
        assert off(ours.model, model, truth) < ROUNDING


def test_a_subclass_sees_its_batch_once(tmp_path):
    """Its `training_step` gets the whole batch, and the loss of all of it."""
    seen = []

    class Watching(transformers.Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, inputs, *args, **kwargs)
            seen.append((len(inputs["input_ids"]), loss.item()))
            return loss

    class Watched(FusedAccumulationMixin, Watching):
        pass

    trainer = fit(splitting(12, Watched), tmp_path, gpt2(), Samples(8, masked=1), **WHOLE)
    assert seen == [(8, pytest.approx(logged(trainer, "loss")[0], rel=1e-4))]


def test_a_batch_that_fits_is_stocks_to_the_bit(tmp_path):
    """In bf16, with clipping left out."""
    runs = []
    for cls in (Trainer, splitting("auto", Trainer)):
        reset()
        trainer = in_order(build(cls, tmp_path, 16, gpt2(), bf16=True))
        trainer.train()
        runs.append((list(trainer.model.parameters()), logged(trainer, "loss")))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


def test_memory_that_runs_out_does_not_begin_again(tmp_path):
    """With `auto_find_batch_size` too: the batch size stays, and no sample is trained twice."""
    trainer = fit(splitting("auto"), tmp_path, gpt2(), Samples(8), **WHOLE, auto_find_batch_size=True)
    assert trainer.state.train_batch_size == 8
    assert sum(trainer.ran) == 8


class Router(nn.Module):
    """A loss with a part that is not divided."""

    accepts_loss_kwargs = True

    def __init__(self):
        super().__init__()
        self.inner = gpt2()

    def forward(self, input_ids, labels, num_items_in_batch=None):
        loss = self.inner(input_ids, labels=labels, num_items_in_batch=num_items_in_batch)["loss"]
        return {"loss": loss + 100 * self.inner.lm_head.weight.square().mean()}


def test_a_part_that_does_not_add_up(tmp_path):
    """An error."""
    with pytest.raises(ValueError, match="a part of the loss of Router .* each part of a batch"):
        fit(splitting("auto"), tmp_path, Router(), Samples(8), **WHOLE)


@pytest.mark.parametrize("arguments", [WHOLE, HALVES], ids=["whole", "halves"])
@pytest.mark.parametrize("gets", [True, False])
def test_sums(tmp_path, gets, arguments):
    """Parts add up, also where the Trainer divides by the number of micro-batches."""
    model, data = Causal(reduction="sum", gets=gets), Samples(16)
    steps = 1 if gets else arguments["gradient_accumulation_steps"]
    truth = big_batch(model, data, lambda m, b: m(**b)["loss"] / steps, lr=0.1)
    ours = fit(splitting("auto"), tmp_path, model, data, lr=0.1, **arguments)
    assert off(ours.model, model, truth) < ROUNDING
    stock = fit(transformers.Trainer, tmp_path, model, data, lr=0.1, **arguments)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-4)


def test_a_loss_function_that_gets_no_number(tmp_path):
    """A mean over rows without labels."""
    model, data = Preferences(), Pairs(SAMPLES)
    arguments = {"loss_func": lambda outputs, *_, **__: outputs["loss"], "remove_unused_columns": False}
    ours = fit(splitting("auto"), tmp_path, model, data, **arguments, **HALVES)
    assert off(ours.model, model, big_batch(model, data)) < ROUNDING


@pytest.mark.parametrize(
    ("split", "error", "text"),
    [
        ("some", TypeError, "split must be 'auto'"),
        (True, TypeError, "split must be 'auto'"),
        (0, ValueError, "split must be positive, got 0"),
        (float("nan"), ValueError, "split must be positive, got nan"),
        ({"tokens": 3}, ValueError, "split has 'tokens', it may have budget, cost"),
    ],
    ids=str,
)
def test_wrong(tmp_path, split, error, text):
    """Before anything is loaded."""
    with pytest.raises(error, match=text):
        Trainer(model=gpt2(), split=split)


def test_chunks_of_a_coupled_loss():
    """Are parts already."""
    from accumkernels.integrations.transformers_coupled import CoupledAccumulationMixin

    class Contrastive(CoupledAccumulationMixin, transformers.Trainer):
        encode = coupled_loss = None

    with pytest.raises(ValueError, match="split with Contrastive, whose windows are one batch already"):
        Contrastive(split="auto")
