"""How a Trainer's losses are normalized: by `num_items_in_batch`, which many drop, or as means."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from tests.support.backends import same_bits
from tests.support.trainers import LENGTH, VOCABULARY, Samples, gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accumkernels.integrations.transformers import FusedAccumulationMixin, Trainer  # noqa: E402
from tests.integrations.test_transformers import build, in_order, logged  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

STOCK = transformers.Trainer
ROUNDING = 1e-5  # of two steps in fp32 against fp64, relative to the movement; measured up to 3e-6
SAMPLES = 13  # windows of 8 and 5 samples in micro-batches of 2: the last micro-batch of the second has one
CLASSES = 3
LR = 1.0

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = lambda **k: transformers.BertConfig(**SMALL, **NO_DROPOUT, **k)  # noqa: E731
ROBERTA = lambda **k: transformers.RobertaConfig(**SMALL, **NO_DROPOUT, **k)  # noqa: E731
LLAMA = lambda **k: transformers.LlamaConfig(**SMALL, classifier_dropout=0.0, **k)  # noqa: E731
DISTILBERT = lambda **k: transformers.DistilBertConfig(  # noqa: E731
    vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=2 * LENGTH,
    dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, **k
)  # fmt: skip
T5 = lambda: transformers.T5Config(  # noqa: E731
    vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0,
)  # fmt: skip
BART = lambda: transformers.BartConfig(  # noqa: E731
    vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, max_position_embeddings=2 * LENGTH,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
XLNET = lambda: transformers.XLNetConfig(  # noqa: E731
    vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=16, dropout=0.0
)  # fmt: skip


class Rows(Samples):
    """One class to a sample."""

    def __init__(self, n):
        super().__init__(n)
        for index, sample in enumerate(self.samples):
            sample["input_ids"] = sample["input_ids"].clamp(min=3)  # no padding and no special tokens
            sample["labels"] = torch.tensor(index % CLASSES)


class Positions(Samples):
    """A class for each of 2 to 12 positions; the others are masked, at the beginning or at the end."""

    def __init__(self, n, classes=CLASSES):
        super().__init__(n)
        for index, sample in enumerate(self.samples):
            sample["input_ids"] = sample["input_ids"].clamp(min=3)
            labels = sample["input_ids"] % classes if classes else sample["input_ids"].clone()
            masked = (5 * index) % (LENGTH - 2)
            if index % 2:  # from behind
                labels[LENGTH - masked :] = -100
            else:
                labels[:masked] = -100
            sample["labels"] = labels


def made(cls, config):
    """With random weights, always the same."""
    torch.manual_seed(0)
    return cls(config)


HEADS = {
    "BertForSequenceClassification": (lambda: BERT(num_labels=CLASSES), Rows),
    "BertForTokenClassification": (lambda: BERT(num_labels=CLASSES), Positions),
    "BertForMaskedLM": (BERT, lambda n: Positions(n, 0)),
    "RobertaForSequenceClassification": (lambda: ROBERTA(num_labels=CLASSES), Rows),
    "DistilBertForSequenceClassification": (lambda: DISTILBERT(num_labels=CLASSES), Rows),
    "LlamaForSequenceClassification": (lambda: LLAMA(num_labels=CLASSES), Rows),
    "LlamaForTokenClassification": (lambda: LLAMA(num_labels=CLASSES), Positions),
    "T5ForConditionalGeneration": (T5, lambda n: Positions(n, 0)),
    "BartForConditionalGeneration": (BART, lambda n: Positions(n, 0)),
    # Causal by their names, and their losses shift no labels.
    "BartForCausalLM": (BART, lambda n: Positions(n, 0)),
    "XLNetLMHeadModel": (XLNET, lambda n: Positions(n, 0)),
}


def big_batch(model, data, loss=lambda model, batch: model(**batch)["loss"], window=8, lr=LR):
    """Two steps of plain torch in fp64, each with the mean over a whole window."""
    twin = copy.deepcopy(model).double().train()
    for start in range(0, len(data), window):
        batch = {k: v.double() if v.is_floating_point() else v for k, v in data.batch(start, start + window).items()}
        twin.zero_grad()
        loss(twin, batch).backward()
        with torch.no_grad():
            for p in twin.parameters():
                if p.grad is not None:
                    p -= lr * p.grad
    return twin


def fit(cls, folder, model, data, collator=None, loss_func=None, lr=LR, **arguments):
    """Two windows of plain SGD, in the data's order; the Trainer."""
    arguments = {"lr_scheduler_type": "constant", "learning_rate": lr, **arguments}
    trainer = build(cls, folder, 1, copy.deepcopy(model), lambda m: torch.optim.SGD(m.parameters(), lr=lr), **arguments)
    trainer.train_dataset = data
    trainer.compute_loss_func = loss_func or trainer.compute_loss_func
    if collator is not None:
        trainer.data_collator = collator
    in_order(trainer).train()
    return trainer


def off(trained, before, truth):
    """How far parameters are from the truth, relative to how far the truth has moved."""
    pairs = list(zip(trained.parameters(), before.parameters(), truth.parameters(), strict=True))
    error = sum(float((p.double() - t).detach().square().sum()) for p, _, t in pairs)
    movement = sum(float((b.double() - t).detach().square().sum()) for _, b, t in pairs)
    return (error / movement) ** 0.5


def own_warnings(caplog):
    """Of what losses average."""
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("accumkernels.integrations")]
    return [text.removeprefix("accumkernels: ") for text in ours]


class Causal(nn.Module):
    """A class of one's own, whose loss is a mean over shifted labels, or over all; or a sum."""

    def __init__(self, shift=True, reduction="mean", gets=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.shift, self.reduction, self.accepts_loss_kwargs = shift, reduction, gets

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)}


def told(loss_is):
    """A class of Trainer that `fit` makes with this `loss_is`."""

    class Told(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, loss_is=loss_is, **kwargs)

    return Told


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_drop_the_number(tmp_path, name, caplog):
    """The Trainer adds up means, https://github.com/huggingface/transformers/issues/47688."""
    config, data = HEADS[name]
    model, data = made(getattr(transformers, name), config()), data(SAMPLES)
    truth = big_batch(model, data)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data)
    assert off(ours.model, model, truth) < ROUNDING
    (warning,) = own_warnings(caplog)
    assert warning.startswith(f"the loss of {name} is taken for a mean")
    assert "transformers.Trainer would add up to 4 of them" in warning
    stock = fit(STOCK, tmp_path, model, data)
    assert off(stock.model, model, truth) > 0.5
    loss = float(model.eval()(**data.batch(0, 8))["loss"].detach())
    assert logged(ours, "loss")[0] == pytest.approx(loss, rel=1e-6)
    assert logged(stock, "loss")[0] > 3 * loss


class Fussy(Causal):
    """Made for batches of its own."""

    def forward(self, input_ids, labels, num_items_in_batch=None):
        if len(input_ids) > 2:
            raise ValueError("two rows at the most")
        return super().forward(input_ids, labels)


def test_a_loss_that_takes_no_more_rows(tmp_path):
    """It cannot be asked whether it is a sum, and is taken for a mean."""
    data, plain = Samples(SAMPLES), Causal(shift=False)
    ours = fit(Trainer, tmp_path, Fussy(shift=False, gets=True), data)
    assert off(ours.model, plain, big_batch(plain, data)) < ROUNDING


def cross_entropy(outputs, labels, num_items_in_batch=None):
    """A mean, whatever the number."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten())


def divided(outputs, labels, num_items_in_batch):
    """As the Trainer wants it, by a number that is no tensor."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch.item()


class Overridden(Trainer):
    """Its loss takes the number and drops it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        return cross_entropy(model(input_ids=inputs["input_ids"]), inputs["labels"])


def test_loss_functions_that_drop_the_number(tmp_path, caplog):
    """A `compute_loss_func`, and a `compute_loss` of a subclass."""
    model, data = gpt2(), Samples(SAMPLES)
    truth = big_batch(model, data)
    for cls, loss_func in ((Trainer, cross_entropy), (Overridden, None)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "accumkernels"):
            ours = fit(cls, tmp_path, model, data, loss_func=loss_func)
        assert off(ours.model, model, truth) < ROUNDING
        assert "the loss ignores num_items_in_batch" in own_warnings(caplog)[0]


def test_loss_functions_that_divide_by_the_number(tmp_path, caplog):
    """Left as they are, with the Trainer's bits, also where autograd does not see the number."""
    model, data = gpt2(), Samples(SAMPLES)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data, loss_func=divided)
    stock = fit(STOCK, tmp_path, model, data, loss_func=divided)
    assert same(ours.model, stock.model)
    assert logged(ours, "loss") == logged(stock, "loss")
    assert own_warnings(caplog) == []


def same(one, two):
    """Whether all parameters and buffers have the same bits."""
    states = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(same_bits(a, b) for a, b in states)


class Normed(nn.Module):
    """Takes the number, and has random numbers and statistics that a further forward would change."""

    def __init__(self, mean=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(16, VOCABULARY)
        self.mean = mean

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        hidden = nn.functional.dropout(self.norm(self.embedding(input_ids)), 0.5, self.training)
        logits = self.head(hidden).flatten(0, 1)
        number = None if self.mean else num_items_in_batch
        loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="mean" if number is None else "sum")
        return {"loss": loss if number is None else loss / number, "logits": logits}


class Counting(STOCK):
    """Counts in `compute_loss`, as TRL's trainers do."""

    calls = 0

    def compute_loss(self, *args, **kwargs):
        self.calls += 1
        self.__dict__.setdefault("_metrics", {"train": []})["train"].append(self.calls)
        return super().compute_loss(*args, **kwargs)


class OurCounting(FusedAccumulationMixin, Counting):
    """The same, with ours."""


def test_looking_leaves_no_trace(tmp_path):
    """Random numbers, BatchNorm's statistics and a subclass's counters are as in the Trainer, to the bit."""
    results = []
    for cls in (Counting, OurCounting):
        torch.manual_seed(1)
        trainer = fit(cls, tmp_path, Normed(), Samples(SAMPLES))
        results.append((trainer, torch.rand(1).item()))
    (stock, after), (ours, after_ours) = results
    assert same(ours.model, stock.model)
    assert after == after_ours
    assert (ours.calls, ours._metrics) == (stock.calls, stock._metrics)


class Logging(transformers.Trainer):
    """Logs in compute_loss."""

    def compute_loss(self, *args, **kwargs):
        self.log({"aux": 1.0})
        return super().compute_loss(*args, **kwargs)


def test_looking_logs_nothing(tmp_path):
    """Loggers get a row for each loss that is trained."""
    stock, ours = (
        [row for row in fit(cls, tmp_path, Normed(), Samples(SAMPLES)).state.log_history if "aux" in row]
        for cls in (Logging, type("OurLogging", (FusedAccumulationMixin, Logging), {}))
    )
    assert stock == ours
    assert stock


class Twice:
    """Two backwards, as adversarial training has them."""

    def training_step(self, *args, **kwargs):
        super().training_step(*args, **kwargs)
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("bases", [(FusedAccumulationMixin, Twice, STOCK), (Twice, Trainer)], ids=["before", "after"])
def test_two_backwards_of_one_micro_batch(bases, tmp_path):
    """Sums are added up as in the Trainer; means would be averaged, and are refused, whoever calls whom."""
    ours, stock = type("Ours", bases, {}), type("Stock", (Twice, STOCK), {})
    assert same(fit(ours, tmp_path, Normed(), Samples(8)).model, fit(stock, tmp_path, Normed(), Samples(8)).model)
    with pytest.raises(RuntimeError, match="several backwards of losses that are means"):
        fit(ours, tmp_path, Normed(mean=True), Samples(8))


class Penalty(transformers.Trainer):
    """A backward of its own."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        sum(p.square().sum() for p in model.parameters()).backward()
        return loss


def test_a_backward_of_ones_own(tmp_path, caplog):
    """What it counts is said once."""
    with caplog.at_level(logging.WARNING, "accumkernels"):
        fit(type("OurPenalty", (FusedAccumulationMixin, Penalty), {}), tmp_path, Normed(mean=True), Samples(SAMPLES))
    assert sum("a backward that the trainer has not run" in text for text in own_warnings(caplog)) == 1


def test_a_mean_with_random_numbers(tmp_path, caplog):
    """Dropout is the same whenever the loss is computed, or it would seem to follow the number in part."""
    with caplog.at_level(logging.WARNING, "accumkernels"):
        fit(Trainer, tmp_path, Normed(mean=True), Samples(SAMPLES))
    (warning,) = own_warnings(caplog)
    assert "the loss ignores num_items_in_batch" in warning


class Routed(nn.Module):
    """A part of the loss is divided by the number, as in a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.net = Normed()

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        out = self.net(input_ids, labels, num_items_in_batch)
        return {"loss": out["loss"] + 1e-2 * out["logits"].square().mean()}


def test_a_loss_that_follows_in_part(tmp_path, caplog):
    """The Trainer's bits stay, and a warning says what it does."""
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, Routed(), Samples(8))
    assert same(ours.model, fit(STOCK, tmp_path, Routed(), Samples(8)).model)
    (warning,) = own_warnings(caplog)
    assert warning.startswith("a part of the loss of Routed")


# ---- rows


class Preferences(nn.Module):
    """A mean over rows without labels, as of pairs in DPO."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, 1)

    def score(self, ids):
        return self.head(torch.tanh(self.embedding(ids)).mean(-2)).squeeze(-1)

    def forward(self, chosen, rejected):
        return {"loss": -nn.functional.logsigmoid(self.score(chosen) - self.score(rejected)).mean()}


class Pairs(torch.utils.data.Dataset):
    """Two sequences of tokens each."""

    def __init__(self, n):
        torch.manual_seed(0)
        ids = torch.randint(VOCABULARY, (n, 2, LENGTH))
        self.samples = [{"chosen": one[0], "rejected": one[1]} for one in ids]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return dict(self.samples[index])

    def batch(self, start, end):
        """Of some samples."""
        return {key: torch.stack([s[key] for s in self.samples[start:end]]) for key in self.samples[0]}


def test_rows_count_without_labels(tmp_path, caplog):
    """A short micro-batch counts less, and the log says once what was counted."""
    model, data = Preferences(), Pairs(SAMPLES)
    truth = big_batch(model, data)
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data, remove_unused_columns=False)
    assert off(ours.model, model, truth) < ROUNDING
    (line,) = own_warnings(caplog)
    assert "counts by its rows, the length of 'chosen': if it has class weights" in line
    assert "CoupledAccumulationMixin" in line
    stock = fit(STOCK, tmp_path, model, data, remove_unused_columns=False)
    assert off(stock.model, model, truth) > 0.02


def test_a_micro_batch_without_labels_is_not_in_the_log(tmp_path):
    """Its mean is NaN, which transformers leaves out; the window's loss is that of the others, not their sum."""
    data, rows = Rows(24), slice(10, 12)  # the second micro-batch of the second window
    for sample in data.samples[rows]:
        sample["labels"] = torch.tensor(-100)
    model = transformers.DistilBertForSequenceClassification(DISTILBERT(num_labels=CLASSES))
    trainer = fit(Trainer, tmp_path, model, data, lr=0.0, logging_steps=2)
    with torch.no_grad():
        means = [model.double()(**data.batch(start, start + 8)).loss.item() for start in (0, 8, 16)]
    assert logged(trainer, "loss") == pytest.approx([(means[0] + means[1]) / 2], rel=1e-5)


class Stream(torch.utils.data.IterableDataset):
    """Without a length, so that its end is seen where it comes."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize("every", [1, 3])
def test_a_window_over_two_epochs_in_the_log(tmp_path, every):
    """Its loss is that of its end alone, and not the sum of its means before the end of the epoch too."""
    model, data = Causal(), Positions(SAMPLES, 0)
    trainer = fit(Trainer, tmp_path, model, Stream(data), lr=0.0, max_steps=3, logging_steps=every)
    samples = data.samples
    windows = [samples[:8], samples[8:] + samples[:8], samples[8:] + samples[:8]]
    losses = []
    for window in windows:
        batch = {key: torch.stack([sample[key] for sample in window]) for key in ("input_ids", "labels")}
        losses.append(float(model(**batch)["loss"].detach()))
    mean = sum(losses) / 3
    assert logged(trainer, "loss") == pytest.approx(losses if every == 1 else [mean], rel=1e-5)
    assert logged(trainer, "train_loss") == pytest.approx([mean], rel=1e-5)


@pytest.mark.parametrize("divides", ["no", "args", "trainer", "told"])
def test_loss_functions_that_get_no_number(tmp_path, divides):
    """Without labels the Trainer adds up what they return: right if it is divided by the number of micro-batches."""
    model, data = Preferences(), Pairs(16)

    class Own:
        loss_is_scaled_for_ga = True if divides == "told" else None

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.compute_loss_func = self.divided

        def divided(self, outputs, *_, **__):
            steps = {"args": self.args.gradient_accumulation_steps, "trainer": self.current_gradient_accumulation_steps}
            return outputs["loss"] / steps.get(divides, 1)

    def run(cls):
        cls = type("Divides", (Own, cls), {})
        return fit(cls, tmp_path, model, data, loss_func=None, remove_unused_columns=False).model

    ours = run(Trainer)
    assert (off(ours, model, big_batch(model, data)) < ROUNDING) == (divides != "told")
    assert same(ours, run(STOCK)) == (divides != "no")


def test_lists_of_samples(tmp_path):
    """A collator that collates nothing, as of trainers that generate."""

    class Generating(FusedAccumulationMixin, STOCK):
        def _prepare_inputs(self, samples):
            return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}

        def floating_point_ops(self, inputs):
            return 0

    model, data = Preferences(), Pairs(SAMPLES)
    ours = fit(Generating, tmp_path, model, data, collator=list, remove_unused_columns=False)
    assert off(ours.model, model, big_batch(model, data)) < ROUNDING


def test_what_has_neither_labels_nor_rows(tmp_path):
    """It counts 1, and the log says so."""
    trainer = build(Trainer, tmp_path, 4)
    for inputs in ({"text": "a", "scale": torch.tensor(1.0)}, {"text": "b"}):
        assert trainer.default_weight(inputs) == ("1, since it has neither labels nor rows", 1)


# ---- what is logged


@pytest.mark.parametrize("name", ["scaled", "mean"])
def test_the_windows_loss_and_weight(tmp_path, name):
    """They are what is trained and the tokens, whether the Trainer divides by their number or not."""
    model, data = (gpt2() if name == "scaled" else Causal()), Samples(SAMPLES, masked=1)
    trainer = build(Trainer, tmp_path, 1, copy.deepcopy(model))
    trainer.train_dataset, trainer._log_windows = data, True
    in_order(trainer).train()
    assert logged(trainer, "accumulator/loss") == pytest.approx(logged(trainer, "loss"), rel=1e-6)
    tokens = [int((data.batch(*ends)["labels"][:, 1:] != -100).sum()) for ends in ((0, 8), (8, 13))]
    assert logged(trainer, "accumulator/weight") == tokens
    assert logged(trainer, "loss")[0] == pytest.approx(float(model(**data.batch(0, 8))["loss"].detach()), rel=1e-6)


# ---- what else a loss may do


class InPlace(Trainer):
    """Changes its inputs in place, and counts in tensors, sets and the model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.total, self.seen, self.model.calls = torch.zeros(()), set(), 0
        self.model.loss_type = "ForCausalLM"
        self._loss_shifts_labels = True

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["input_ids"].add_(1).remainder_(VOCABULARY)
        self.total += 1
        self.model.calls += 1
        self.seen.add(int(self.total))
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_what_a_loss_changes_in_place(tmp_path):
    """The first micro-batch is trained as it came, and nothing is counted twice."""
    model, data = gpt2(), Samples(SAMPLES, masked=1)

    def truth(model, batch):
        return model(input_ids=(batch["input_ids"] + 1) % VOCABULARY, labels=batch["labels"])["loss"]

    ours = fit(InPlace, tmp_path, model, data)
    assert (ours.total, ours.seen, ours.model.calls) == (7, set(range(1, 8)), 7)
    assert off(ours.model, model, big_batch(model, data, truth)) < ROUNDING


@pytest.mark.parametrize("kind", [Causal, Preferences])
def test_one_micro_batch_to_a_window(tmp_path, kind, caplog):
    """Nothing is asked, weighted or said where the Trainer is right: the same bits."""
    model, data = kind(), Samples(SAMPLES) if kind is Causal else Pairs(SAMPLES)
    arguments = {"gradient_accumulation_steps": 1, "remove_unused_columns": False}
    with caplog.at_level(logging.WARNING, "accumkernels"):
        ours = fit(Trainer, tmp_path, model, data, **arguments)
    assert same(ours.model, fit(STOCK, tmp_path, model, data, **arguments).model)
    assert own_warnings(caplog) == []


def test_a_part_divided_by_the_number_of_micro_batches(tmp_path, caplog):
    """As TRL divides a router's loss: right in the Trainer, so that its bits stay and nothing is said."""

    class Divides:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, out = super().compute_loss(model, inputs, True, num_items_in_batch)
            return loss + 0.1 * out["logits"].square().mean() / self.current_gradient_accumulation_steps

    trainers = [
        fit(type("Divided", (Divides, cls), {}), tmp_path, gpt2(), Samples(SAMPLES, masked=1))
        for cls in (Trainer, STOCK)
    ]
    assert same(trainers[0].model, trainers[1].model)
    assert own_warnings(caplog) == []


def test_nothing_is_compiled_for_questions(tmp_path):
    """A compiled model is asked as it is, and compiled for training alone."""
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    model = Causal()
    model.head.forward = torch.compile(model.head.forward, backend=counting)
    trainer = build(Trainer, tmp_path, 1, model)
    trainer.train_dataset = Samples(8)
    trainer.train()
    assert graphs == [True]
