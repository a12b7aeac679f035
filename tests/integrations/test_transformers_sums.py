"""Losses of a Trainer that are sums, and what the user says they are by `loss_is`."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.support.trainers import VOCABULARY, Samples, gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accumkernels.integrations.transformers import Trainer  # noqa: E402
from tests.integrations.test_transformers_losses import (  # noqa: E402
    ROUNDING,
    SAMPLES,
    STOCK,
    Causal,
    Pairs,
    Positions,
    Preferences,
    big_batch,
    fit,
    off,
    own_warnings,
    same,
    told,
)

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]


class Speech(Pairs):
    """Sounds, with 1 to 4 labels each."""

    def __init__(self, n):
        torch.manual_seed(0)
        self.samples = [{"input_values": torch.randn(400), "labels": torch.full((4,), -100)} for _ in range(n)]
        for index, sample in enumerate(self.samples):
            sample["labels"][: 1 + index % 4] = torch.randint(1, 8, (1 + index % 4,))


def wav2vec2(reduction):
    """Small, with a CTC loss."""
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        ctc_loss_reduction=reduction,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


SUMS = {
    "gets the number": (lambda: Causal(reduction="sum", gets=True), Samples, 1, 0.1),
    "gets no number": (lambda: Causal(reduction="sum"), Samples, 4, 0.1),  # divided by the number of micro-batches
    "Wav2Vec2ForCTC": (lambda: wav2vec2("sum"), Speech, 1, 1e-3),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(tmp_path, name, caplog):
    """Are added up, as in the Trainer, to the bit; nothing is said."""
    make, data, divided_by, lr = SUMS[name]
    model, data = make(), data(16)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data, lr=lr)
    assert own_warnings(caplog) == []
    truth = big_batch(model, data, lambda m, b: m(**b)["loss"] / divided_by, lr=lr)
    assert off(ours.model, model, truth) < ROUNDING
    assert same(ours.model, fit(STOCK, tmp_path, model, data, lr=lr).model)


def test_ctc_means_are_over_rows(tmp_path, caplog):
    """torch's mean divides each row by its own labels, and averages rows; stock is right if rows are equally many."""
    model, data = wav2vec2("mean"), Speech(SAMPLES)
    truth = big_batch(model, data)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data)
    (line,) = own_warnings(caplog)
    assert "counts by its rows, the length of 'input_values'" in line
    assert off(ours.model, model, truth) < ROUNDING
    assert off(fit(told("tokens"), tmp_path, model, data).model, model, truth) > 1e-3


def test_sums_with_dropout(tmp_path):
    """More rows have the same sum each without dropout alone."""

    class Dropped(Causal):
        def forward(self, input_ids, labels):
            logits = self.head(30 * nn.functional.dropout(self.embedding(input_ids), 0.5, self.training)).flatten(0, 1)
            return {"loss": nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")}

    runs = []
    for cls in (Trainer, STOCK):
        torch.manual_seed(1)
        runs.append(fit(cls, tmp_path, Dropped(), Samples(SAMPLES), lr=1e-3).model)
    assert same(*runs)


def test_a_contrastive_loss_is_no_sum(tmp_path, caplog):
    """Of two rows that are alike it is log 2, and log 4 of each row twice. The log names the mixin for it."""

    class Contrastive(Preferences):
        def forward(self, chosen, rejected):
            scores = self.score(chosen)[:, None] * self.score(rejected) * 1e-3
            return {"loss": nn.functional.cross_entropy(scores, torch.arange(len(scores)))}

    with caplog.at_level(logging.WARNING, "accumkernels"):
        fit(Trainer, tmp_path, Contrastive(), Pairs(8), remove_unused_columns=False)
    (line,) = own_warnings(caplog)
    assert "CoupledAccumulationMixin" in line


# ---- what the user says


WEIGHTS = torch.linspace(0.1, 3.0, VOCABULARY)


class ByClass(Causal):
    """With class weights."""

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten(), weight=WEIGHTS.to(logits.dtype))}


class PerRow(Causal):
    """A mean over rows of means over labels."""

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embedding(input_ids))).transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none").sum(1) / labels.ne(-100).sum(1)
        return {"loss": losses.mean()}


def weights(inputs):
    """Of the labels' classes."""
    return WEIGHTS[inputs["labels"][inputs["labels"] >= 0]].sum()


MEANS = {
    "class weights": (ByClass, lambda n: Positions(n, 0), weights),
    "a mean of rows": (PerRow, lambda n: Positions(n, 0), "rows"),
}


@pytest.mark.parametrize("name", MEANS)
def test_other_means(tmp_path, name, caplog):
    """The log says what is counted; `loss_is` makes it right, as `micro_batch_weight` does, and nothing is said."""
    make, data, loss_is = MEANS[name]
    model, data = make(), data(SAMPLES)
    truth = big_batch(model, data)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        for bf16 in (True, False):
            caplog.clear()
            ours = fit(Trainer, tmp_path, model, data, bf16=bf16)
            (line,) = own_warnings(caplog)
            assert "counts by its labels that are not -100" in line
            assert "class weights or any other normalization of its own, pass loss_is or override" in line
        assert off(ours.model, model, truth) > 0.005
        caplog.clear()
        if callable(loss_is):
            own = type("Own", (Trainer,), {"micro_batch_weight": lambda self, inputs: loss_is(inputs)})
            assert off(fit(own, tmp_path, model, data).model, model, truth) < ROUNDING
        assert off(fit(told(loss_is), tmp_path, model, data).model, model, truth) < ROUNDING
        assert own_warnings(caplog) == []


def test_random_sums(tmp_path, caplog):
    """Other rows get other random numbers, as in diffusion: `loss_is` says what cannot be found out."""

    class Noisy(Preferences):
        def forward(self, chosen, rejected):
            noise = 30 * torch.randn(len(chosen))
            return {"loss": -nn.functional.logsigmoid(self.score(chosen) - self.score(rejected) + noise).sum()}

    arguments = {"remove_unused_columns": False, "lr": 0.1}
    torch.manual_seed(1)
    stock = fit(STOCK, tmp_path, Noisy(), Pairs(SAMPLES), **arguments)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        for loss_is, equal in (("sum", True), ("rows", False)):
            assert same(fit(told(loss_is), tmp_path, Noisy(), Pairs(SAMPLES), **arguments).model, stock.model) == equal
        assert own_warnings(caplog) == []


def test_tokens_beside_a_sum(tmp_path):
    """`loss_is` goes before what would be found out."""
    model, data = Causal(False), Positions(SAMPLES, 0)
    assert off(fit(told("tokens"), tmp_path, model, data).model, model, big_batch(model, data)) < ROUNDING
    summed = Causal(False, "sum")
    assert not same(
        fit(told("tokens"), tmp_path, summed, data, lr=1e-3).model, fit(Trainer, tmp_path, summed, data, lr=1e-3).model
    )


def test_wrong_loss_is():
    """Before anything is loaded."""
    with pytest.raises(ValueError, match="loss_is must be one of 'tokens', 'rows', 'sum' or a function, got 'labels'"):
        Trainer(model=gpt2(), loss_is="labels")
    with pytest.raises(TypeError, match="loss_is must be one of 'tokens', 'rows', 'sum', a function, or None, got 3"):
        Trainer(model=gpt2(), loss_is=3)
