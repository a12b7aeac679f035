"""A batch whose loss is no mean over samples and has no weight is an error, at its first split."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils.rnn import pad_sequence

import accumkernels as ak
from accumkernels.splitting.batches import TreeSamples
from tests.support.models import grads_of, relative_error
from tests.support.sample_means import LENGTHS, REAL, SINGLE, WORDS, Text, check_split, texts
from tests.support.splitting import truth

pytestmark = pytest.mark.usefixtures("one_thread")


def padded(samples):
    """As a tokenizer's collator does."""
    return {"ids": pad_sequence(samples, True), "labels": pad_sequence(samples, True, -100)}


def packed(samples):
    """One row of all tokens: no rows to cut."""
    return {"ids": torch.cat(samples)[None], "labels": torch.cat(samples)[None]}


def tokens(model, part):
    """The mean over tokens."""
    return cross_entropy(model(part["ids"]).flatten(0, 1), part["labels"].flatten(), ignore_index=-100)


def samples_mean(model, part):
    """The mean over samples of their means over tokens."""
    losses = cross_entropy(model(part["ids"]).transpose(1, 2), part["labels"], ignore_index=-100, reduction="none")
    return (losses.sum(1) / (part["labels"] != -100).sum(1)).mean()


def total(model, part):
    """The sum over tokens."""
    return cross_entropy(model(part["ids"]).flatten(0, 1), part["labels"].flatten(), reduction="sum")


def classes(model, part):
    """A class for each text, with class weights: the mean divides by their sum."""
    logits = model(part["ids"])[:, 1]
    return cross_entropy(logits, part["ids"][:, 1], weight=torch.linspace(0.1, 5, WORDS))


def said(caplog):
    """What was logged about losses, not about the batch statistics."""
    return [r.getMessage() for r in caplog.records if "whether the loss is a mean" in r.getMessage()]


REFUSED = {
    "tokens": (tokens, padded, {}),
    "packed": (tokens, packed, {}),
    "sum": (total, padded, {}),
    "class weights": (classes, padded, {}),
    "by the number of samples": (tokens, padded, {"micro_batch": 2}),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("bare", [False, True])
def test_refused(case, bare):
    """Before anything is counted, with no more left behind than by one forward; the error shows what to return."""
    loss, collate, options = REFUSED[case]
    model = Text()
    acc = ak.FusedAccumulator(list(model.parameters()) if bare else model)
    with pytest.raises(ValueError, match=r"return loss, \(labels != -100\).sum\(\)"):
        acc.backward_batch(texts(), lambda part: loss(model, part), collate=collate, **(options or {"budget": 80}))
    assert acc.micro_batches == 0 and model.training and model.drop.training
    assert model.calls == model.norm.num_batches_tracked == 1
    report = acc.backward_batch(texts(), lambda part: (loss(model, part), 1.0), collate=collate, budget=80)
    assert len(report.sizes) > 1


def test_what_the_error_says_is_right():
    """With the weight that it shows the gradient is the big batch's."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)

    def loss(part):
        labels = part["labels"]
        return tokens(model, part), (labels != -100).sum()

    report = acc.backward_batch(texts(), loss, collate=padded, budget=80)
    assert len(report.sizes) > 1
    acc.finalize()
    _, grads = truth(model, lambda twin: tokens(twin, padded(texts())))
    assert relative_error([g for g in grads_of(acc) if g is not None], [g for g in grads if g is not None]) < SINGLE


ACCEPTED = {
    "mean over samples": samples_mean,
    "in bf16": lambda model, part: samples_mean(model, part).bfloat16(),
    "with a random factor": lambda model, part: samples_mean(model, part) * (1 + torch.rand(())),
}


@pytest.mark.parametrize("case", ACCEPTED)
@pytest.mark.parametrize("autocast", [False, True])
def test_accepted(case, autocast, caplog):
    """It goes on, and is right, under autocast around the call too, whose copies of weights must keep their graph."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    calls = []

    def loss(part):
        calls.append(len(part["ids"]))
        return ACCEPTED[case](model, part)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = acc.backward_batch(texts(), loss, collate=padded, budget=80)
    again = [4, 4, 4, 6] if case == "in bf16" else []  # too coarse to tell, so other texts are asked
    assert calls == [report.sizes[0], 2, 2, 2, 3, *again, *report.sizes[1:]] and len(report.sizes) > 1
    acc.finalize()
    if case == "mean over samples":
        grads = [g for g in truth(model, lambda twin: samples_mean(twin, padded(texts())))[1] if g is not None]
        assert relative_error([g for g in grads_of(acc) if g is not None], grads) < (3e-2 if autocast else SINGLE)
    acc.zero_()
    calls.clear()
    report = acc.backward_batch(texts(seed=1), loss, collate=padded, budget=80)
    assert calls == report.sizes or case == "in bf16"  # which may be too coarse to tell
    assert not said(caplog)


def test_autocast_around_the_call_keeps_its_graphs():
    """Also of a weight that the loss has asked for without a graph first, as of an expert that other samples choose."""
    model, calls = Text(0.0), []
    model.expert = nn.Linear(WORDS, WORDS, bias=False)
    acc = ak.FusedAccumulator(model)

    def loss(part):
        calls.append(1)
        return samples_mean(lambda ids: model.expert(model(ids)) if len(calls) > 1 else model(ids), part)

    with torch.autocast("cpu", torch.bfloat16):
        acc.backward_batch(texts(), loss, collate=padded, budget=80)
    acc.finalize()
    assert len(calls) > 5 and model.expert.weight.grad is not None


def test_random_numbers_are_kept():
    """Those of dropout, and after the batch, are those of a loss that says what it weighs."""
    states = []
    for weight in (len(LENGTHS), None):
        model = Text()
        acc = ak.FusedAccumulator(model)
        torch.manual_seed(1)

        def loss(part, model=model, weight=weight):
            torch.rand(3)  # of no module
            return samples_mean(model, part), weight and len(part["ids"])

        acc.backward_batch(texts(), loss, collate=padded, budget=80)
        acc.finalize()
        states.append([torch.get_rng_state(), *(g for g in grads_of(acc) if g is not None), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_asks_once_for_each_kind():
    """Of samples, and of losses; not where nothing is split, or a weight is given."""
    model, calls = Text(0.0), []
    acc = ak.FusedAccumulator(model)

    def first(part):
        calls.append(1)
        return samples_mean(model, part)

    def second(part):
        calls.append(1)
        return samples_mean(model, part)

    def asked(batch, loss, collate=padded, **options):
        calls.clear()
        report = acc.backward_batch(batch, loss, collate=collate, **options)
        acc.zero_()
        return len(calls) - len(report.sizes)

    lists = [text.tolist() for text in texts()]
    assert asked(texts(), first, budget=10**6) == 0
    assert asked(texts(), first, budget=80, weight=lambda part: len(part["ids"])) == 0
    assert asked(padded(texts()), first, collate=None, micro_batch=2) == 4
    assert asked(padded(texts()), first, collate=None, micro_batch=2) == 0
    assert asked(texts(), first, budget=80) == 4
    assert asked(texts(), functools.partial(first), budget=80) == 0
    assert asked(texts(), second, budget=80) == 4
    assert asked(lists, second, collate=lambda s: padded(list(map(torch.tensor, s))), budget=80) == 4
    assert asked(lists[::-1], second, collate=lambda s: padded(list(map(torch.tensor, s))), budget=80) == 0


def marked(labels, **masks):
    """A batch that is padded already, from the labels that count."""
    ids = torch.arange(labels.numel()).reshape(labels.shape) % WORDS
    return {"ids": ids, "labels": torch.where(labels, ids, -100), **masks}


TREES = {
    "labels of -100": marked(REAL),
    "a mask of zeros and ones": {"ids": marked(REAL)["ids"], "mask": REAL.long()},
    "a mask of truths": {"ids": marked(REAL)["ids"], "mask": REAL},
    "a mask of fractions": {"ids": marked(REAL)["ids"], "mask": REAL.float()},
    "an array": {"ids": marked(REAL)["ids"], "mask": REAL.numpy()},
    "in a part all alike": marked(torch.cat([torch.ones(4, 10, dtype=torch.bool), REAL])),
}


@pytest.mark.parametrize("batch", TREES.values(), ids=TREES)
@pytest.mark.parametrize("right", [True, False])
def test_trees(batch, right):
    """Rows that are padded already: a mean over tokens is refused, one over samples is right."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)

    def loss(part, model=model):
        mask = torch.as_tensor(part["mask"]).bool() if "mask" in part else None
        labels = part["labels"] if mask is None else torch.where(mask, part["ids"], -100)
        return (samples_mean if right else tokens)(model, {"ids": part["ids"], "labels": labels})

    check_split(acc, model, batch, loss, right)


def prompts(without, tokens=12):
    """Rows of a prompt and a completion, some of them cut within the prompt, so that they have no label."""
    ids = texts([tokens] * 8, seed=without)
    labels = [torch.where(torch.arange(tokens) < 2 + row, -100, text) for row, text in enumerate(ids)]
    labels[:without] = [torch.full((tokens,), -100)] * without
    return list(zip(ids, labels, strict=True))


def one_label(without):
    """A class for each row, some of them unknown."""
    return [(text, label[-1]) for text, label in prompts(without)]


def of_pairs(model, part):
    """The mean over the labels there are."""
    ids, labels = part
    logits = model(ids)
    return cross_entropy(logits.flatten(0, 1) if labels.dim() > 1 else logits[:, -1], labels.flatten())


def stacked(pairs):
    """All samples have one length."""
    return tuple(map(torch.stack, zip(*pairs, strict=True)))


@pytest.mark.parametrize("made", [prompts, one_label])
@pytest.mark.parametrize("collate", [None, stacked])
@pytest.mark.parametrize("without", [1, 2, 3, 5])
def test_rows_without_a_label(made, collate, without):
    """Whose loss alone is NaN: a mean over labels is refused all the same, also where a whole part has none."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    batch = made(without)
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(
            batch if collate else stacked(batch), lambda part: of_pairs(model, part), collate=collate, micro_batch=4
        )
    assert acc.micro_batches == 0


def test_a_loss_of_many_kinds():
    """One function may compute several losses: what was found of one does not hold for another."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    criterion = samples_mean

    def loss(part):
        return criterion(model, part)

    acc.backward_batch(texts(), loss, collate=padded, budget=80)
    acc.zero_()
    criterion = tokens
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(texts(), loss, collate=padded, budget=80)


@pytest.mark.parametrize("count", [10, 4])
def test_trees_of_rows_that_weigh_alike(count):
    """Nothing is asked of rows without a mark, or with as many labels each, whatever mean the loss is."""
    model, calls = Text(0.0), []
    acc = ak.FusedAccumulator(model)

    def loss(part):
        calls.append(1)
        return tokens(model, part)

    report = acc.backward_batch(marked(torch.arange(10).expand(6, 10) < count), loss, micro_batch=2)
    assert len(calls) == len(report.sizes) == 3


def test_trees_whose_tensors_are_of_other_kinds():
    """Sparse, and of subclasses: they say nothing, and are not looked into."""
    model, calls = nn.Linear(4, 1), []
    acc = ak.FusedAccumulator(model)
    sparse = torch.eye(6, dtype=torch.int64).to_sparse()
    odd = torch.ones(6, 4, dtype=torch.int64).as_subclass(type("Odd", (torch.Tensor,), {}))

    def loss(part):
        calls.append(1)
        return model(part["x"]).mean()

    report = acc.backward_batch({"x": torch.randn(6, 4), "odd": odd}, loss, micro_batch=2)
    assert len(calls) == len(report.sizes) == 3
    assert TreeSamples({"x": torch.randn(6, 4), "sparse": sparse}).items() is None


def test_cuts_what_is_collated():
    """`collate` is called as often as there are micro-batches, if the first one has samples that differ."""
    model, made = Text(0.0), []
    acc = ak.FusedAccumulator(model)

    def collate(samples):
        made.append(len(samples))
        return padded(samples)

    report = acc.backward_batch(texts(), lambda part: samples_mean(model, part), collate=collate, budget=120)
    assert made == report.sizes and made[0] > 1
    made.clear()
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(texts(), lambda part: tokens(model, part), collate=collate, budget=120)
    assert made == report.sizes[:1]


def test_long_texts_of_a_fresh_model():
    """They have nearly the same mean, so the most unequal texts of the batch are compared, too."""
    scale = nn.Parameter(torch.ones(()))
    acc = ak.FusedAccumulator([scale])

    def loss(part):
        real = part["labels"] != -100
        of_tokens = torch.where(real.sum(1, keepdim=True) > 20, 1.0, 2.0).expand_as(real)[real]
        return scale * of_tokens.mean()

    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(texts([300, 40, 7, 120, 500, 3, 80, 90]), loss, collate=padded, budget=1000)


def test_samples_that_tell_nothing():
    """Texts of one length, and equal losses at first: a later batch is asked, ever more rarely."""
    model = Text(0.0)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    acc = ak.FusedAccumulator(model)
    acc.backward_batch(texts(), lambda part: tokens(model, part), collate=padded, budget=80)
    acc.zero_()
    nn.init.normal_(model.head.weight)
    calls = []

    def loss(part):
        calls.append(1)
        return tokens(model, part)

    asked = []
    for window in range(20):
        calls.clear()
        report = acc.backward_batch(texts([8] * 6, window), loss, collate=padded, micro_batch=2)
        asked.append(len(calls) > len(report.sizes))
    assert [window for window, found in enumerate(asked) if found] == [0, 1, 3, 7, 15]
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        for window in range(20):
            acc.backward_batch(texts(seed=window), loss, collate=padded, micro_batch=2)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model, part: tokens(lambda ids: dropout(model(ids), 0.5), part), "it is random, also in eval mode"),
        (lambda model, part: tokens(model, part) + 1 / (len(part["ids"]) != 2), "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_found_out(loss, why, caplog):
    """Is said once, and training goes on."""
    model = Text()
    acc = ak.FusedAccumulator(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            acc.backward_batch(texts(), lambda part: loss(model, part), collate=padded, micro_batch=3)
    (message,) = said(caplog)
    assert why in message and "return loss, (labels != -100).sum()" in message


def test_memory_that_runs_out_first():
    """The whole list is tried; when it is split, the loss is asked before anything counts."""
    model = Text()
    acc = ak.FusedAccumulator(model)

    def loss(part):
        if torch.is_grad_enabled() and len(part["ids"]) > 3:
            raise torch.OutOfMemoryError("planted")
        return tokens(model, part)

    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(texts(), loss, collate=padded)
    assert acc.micro_batches == 0


# ---- what else a loss returns


def test_extras():
    """Of the micro-batches that were used, in their order, without a graph; none of those that ran out of memory."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    batch = texts()

    def loss(part):
        labels = part["labels"]
        logits = model(part["ids"])
        extra = {"right": (logits.argmax(-1) == labels).sum(), "logits": logits.mean(), "of": len(labels)}
        if len(labels) > 3:
            raise torch.OutOfMemoryError("planted")
        return tokens(lambda ids: logits, part), (labels != -100).sum(), extra

    report = acc.backward_batch(batch, loss, collate=padded)
    assert report.out_of_memory > 0
    assert [extra["of"] for extra in report.extras] == report.sizes and sum(report.sizes) == len(batch)
    whole = padded(batch)
    right = int((model(whole["ids"]).argmax(-1) == whole["labels"]).sum())
    assert sum(int(extra["right"]) for extra in report.extras) == right
    assert not any(extra["logits"].requires_grad for extra in report.extras)


def test_extras_of_parts_without_weight():
    """They are left out with their parts; a weight of None is the number of samples; and none returned is none."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    batch = padded(texts())

    def loss(part):
        weight = 0 if bool((part["labels"][0] != -100).sum() == LENGTHS[2]) else None
        return samples_mean(model, part), weight, len(part["labels"])

    report = acc.backward_batch(batch, loss, micro_batch=2)
    assert report.extras == report.sizes == [2, 2]
    assert acc.weight == 4
    assert acc.backward_batch(batch, lambda part: samples_mean(model, part), micro_batch=2).extras == []
    given = acc.backward_batch(
        batch, lambda part: (tokens(model, part), None, 1), weight=lambda part: (part["labels"] != -100).sum()
    )
    assert given.extras == [1] and acc.weight == 4 + 6 + sum(LENGTHS)


def test_samples_without_a_label():
    """One label per sample, of which some do not count: a mean over those that do is refused."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    acc = ak.FusedAccumulator(model)
    x, y = torch.randn(12, 4), torch.randint(3, (12,))
    y[[1, 4]] = -100
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch((x, y), lambda part: cross_entropy(model(part[0]), part[1]), micro_batch=4)
    assert acc.micro_batches == 0
