"""Which labels a Trainer's mean counts: whether its loss shifts them, and which it ignores."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import nn

from tests.support.trainers import Samples, gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accumkernels.integrations.transformers import Trainer  # noqa: E402
from tests.integrations.test_transformers import build  # noqa: E402
from tests.integrations.test_transformers_losses import (  # noqa: E402
    LLAMA,
    ROUNDING,
    SAMPLES,
    STOCK,
    Causal,
    Positions,
    big_batch,
    fit,
    made,
    off,
    own_warnings,
    same,
    told,
)

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("shift", [True, False])
def test_labels_that_a_loss_of_ones_own_shifts(tmp_path, shift, promised):
    """Counted as the loss counts them, whatever the model's `loss_type` says, and `loss_is="tokens"` means the same."""
    model, data = Causal(shift), Positions(SAMPLES, 0)
    model.loss_type = "ForCausalLM" if promised else None
    truth = big_batch(model, data)
    assert off(fit(Trainer, tmp_path, model, data).model, model, truth) < ROUNDING
    assert off(fit(told("tokens"), tmp_path, model, data).model, model, truth) < ROUNDING


@pytest.mark.parametrize("shift", [True, False])
def test_a_loss_that_rounds_differently_each_time(tmp_path, shift):
    """As where a GPU adds in any order: with a part that needs no labels, no two losses are the same."""
    calls = itertools.count()

    class Rounding(Causal):
        def forward(self, input_ids, labels):
            return {"loss": super().forward(input_ids, labels)["loss"].nan_to_num() + 1 + 1e-5 * (next(calls) % 2)}

    model, data = Rounding(shift), Positions(SAMPLES, 0)
    assert off(fit(Trainer, tmp_path, model, data).model, model, big_batch(model, data)) < ROUNDING


@pytest.mark.parametrize("split", [None, 1])
def test_labels_that_a_loss_function_shifts_not(tmp_path, split):
    """Of a causal model, whose data has them shifted."""
    model, data = made(transformers.LlamaForCausalLM, LLAMA()), Positions(SAMPLES, 0)

    def mean(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1).float(), labels.flatten())

    class Split(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, split=split, **kwargs)

    truth = big_batch(
        model,
        data,
        lambda m, b: nn.functional.cross_entropy(m(b["input_ids"])["logits"].flatten(0, 1), b["labels"].flatten()),
    )
    assert off(fit(Split, tmp_path, model, data, loss_func=mean).model, model, truth) < ROUNDING


def test_labels_get_no_value_that_is_new(tmp_path, caplog):
    """A loss that has seen no -100 may end in an error on it, and names say whether it shifts labels."""
    seen = set()

    class Strict(Causal):
        def forward(self, input_ids, labels):
            seen.update(labels.flatten().tolist())
            return super().forward(input_ids, labels)

    data = Samples(SAMPLES)
    for sample in data.samples:
        sample["labels"] = sample["input_ids"].clone()
    model = Strict()
    model.loss_type = "ForCausalLM"
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data)
    assert min(seen) >= 0
    (line,) = own_warnings(caplog)
    assert "without the first of each row" in line
    assert off(ours.model, model, big_batch(model, data)) < ROUNDING


def test_a_number_that_is_not_the_right_one(tmp_path):
    """GPT2LMHeadModel's name does not say that it shifts labels: the Trainer's bits stay; the guide has the cure."""
    model, data = gpt2(), Positions(SAMPLES, 0)
    truth = big_batch(model, data)
    ours, stock = (fit(cls, tmp_path, model, data) for cls in (Trainer, STOCK))
    assert same(ours.model, stock.model)
    assert off(ours.model, model, truth) > 0.02
    model.loss_type = "ForCausalLM"
    assert off(fit(Trainer, tmp_path, model, data).model, model, truth) < ROUNDING


def test_labels_that_segmentation_ignores(tmp_path):
    """By the model's configuration, beside -100."""
    trainer = build(Trainer, tmp_path, 1)
    labels = torch.tensor([[[0, 1], [255, 3]], [[255, 255], [-100, 0]]])
    assert trainer.micro_batch_weight({"labels": labels}) == 7
    trainer.model.config.semantic_loss_ignore_index = 255
    assert trainer.micro_batch_weight({"labels": labels}) == 4
