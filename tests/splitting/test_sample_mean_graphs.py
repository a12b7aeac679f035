"""Losses of tensors in split batches: which graphs prove a mean over samples, and what is refused of the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, one_hot, softplus

import accumkernels as ak
from tests.support.models import grads_of, relative_error
from tests.support.sample_means import REAL, SINGLE, WORDS, Text, check_split, texts
from tests.support.splitting import truth

pytestmark = pytest.mark.usefixtures("one_thread")


def test_labels_of_another_number_are_ignored():
    """Rows do not show it, but the loss's graph does, in the batch in which labels are unequal first."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)

    def loss(ids):
        return cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)

    ids = torch.stack(texts([10] * 6)).clamp(min=1)
    for _ in range(3):
        acc.backward_batch(ids, loss, micro_batch=2)
    with pytest.raises(ValueError, match="the loss is not a mean over samples"):
        acc.backward_batch(torch.where(REAL, ids, 0), loss, micro_batch=2)


def each(model, ids):
    """The loss of each token, `[rows, length]`."""
    return cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")


def rows_of(values, ids):
    """Each row without its padding."""
    return [row[mask] for row, mask in zip(values, ids != 0, strict=True)]


def jagged(values, ids):
    """The rows without padding as one nested tensor."""
    return torch.nested.as_nested_tensor(rows_of(values, ids), layout=torch.jagged)


OF_PADDED_ROWS = {
    "classes in the middle": (
        lambda model, ids: cross_entropy(model(ids).transpose(1, 2), ids, ignore_index=0),
        False,
    ),
    "a part of the loss": (
        lambda model, ids: model(ids).square().mean() + cross_entropy(model(ids).transpose(1, 2), ids, ignore_index=0),
        False,
    ),
    "labels taken out": (lambda model, ids: cross_entropy(model(ids)[ids != 0], ids[ids != 0]), False),
    "squares taken out": (lambda model, ids: model(ids)[ids != 0].square().mean(), False),
    "losses taken out": (lambda model, ids: each(model, ids)[ids != 0].mean(), False),
    "losses selected": (lambda model, ids: each(model, ids).masked_select(ids != 0).mean(), False),
    "divided by their number": (lambda model, ids: (each(model, ids) * (ids != 0)).sum() / (ids != 0).sum(), False),
    "divided by the samples of the whole batch": (lambda model, ids: each(model, ids).sum() / 6, False),
    "nested rows": (lambda model, ids: jagged(each(model, ids), ids).values().mean(), False),
    "nested rows with features": (lambda model, ids: jagged(model(ids), ids).square().values().mean(), False),
    "nested rows, padded again": (
        lambda model, ids: (
            torch.nested.as_nested_tensor(rows_of(model(ids), ids)).to_padded_tensor(0.0).square().mean()
        ),
        False,
    ),
    "all tokens": (lambda model, ids: each(model, ids).sum() / ids.numel(), True),
    "all tokens, in two steps": (lambda model, ids: each(model, ids).sum() / len(ids) / 10, True),
    "a mean for each sample": (
        lambda model, ids: ((each(model, ids) * (ids != 0)).sum(1) / (ids != 0).sum(1)).mean(),
        True,
    ),
    "a penalty that is a mean": (
        lambda model, ids: each(model, ids).mean() + next(model.parameters()).square().mean(),
        True,
    ),
}


@pytest.mark.parametrize("second", [1, 3])
@pytest.mark.parametrize("case", OF_PADDED_ROWS)
def test_padded_rows(case, second):
    """What no mask shows, the loss's graph does: how many items are averaged, and what a sum is divided by.

    The first two rows have 19 items, or 12, which as many in each would be, too.
    """
    loss, right = OF_PADDED_ROWS[case]
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    ids = torch.where(REAL, torch.stack(texts([10] * 6)).clamp(min=1), 0)
    ids[[1, second]] = ids[[second, 1]]
    check_split(acc, model, ids, lambda part, model=model: loss(model, part), right)


def dice(found, true, dim):
    """One minus the mean Dice coefficient, with sums over `dim`."""
    return 1 - (2 * (found * true).sum(dim) / (found + true).sum(dim)).mean()


class Squares(torch.autograd.Function):
    """A sum that no op of torch's own shows."""

    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values)
        return values.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 20.0])
OF_EQUAL_ROWS = {
    "class weights": (lambda out, y: cross_entropy(out, y, CLASS_WEIGHTS), False),
    "class weights of a part of the loss": (
        lambda out, y: out.mean() + cross_entropy(out, y, CLASS_WEIGHTS) / 2,
        False,
    ),
    "class weights and smoothed labels": (
        lambda out, y: cross_entropy(out, y, CLASS_WEIGHTS, label_smoothing=0.1),
        False,
    ),
    "a sum": (lambda out, y: cross_entropy(out, y, reduction="sum"), False),
    "a sum of sums": (
        lambda out, y: mse_loss(out, out.detach() + 1, reduction="sum") + 0.1 * out.square().sum(),
        False,
    ),
    "each with each": (lambda out, y: cross_entropy(out @ out.roll(1, 1).T, torch.arange(len(out))), False),
    "each with each, in both directions": (
        lambda out, y: (
            sum(cross_entropy(z, torch.arange(len(out))) for z in (out @ out.detach().T, out.detach() @ out.T)) / 2
        ),
        False,
    ),
    "each with each other": (
        lambda out, y: cross_entropy(
            (out @ out.T)[~torch.eye(len(out), dtype=torch.bool)].view(len(out), -1), torch.arange(len(out)) // 2
        ),
        False,
    ),
    "the root of a mean": (lambda out, y: mse_loss(out, one_hot(y, 3).float()).sqrt(), False),
    "Dice over the batch, of each class": (lambda out, y: dice(out.softmax(1), one_hot(y, 3), 0), False),
    "the largest": (lambda out, y: cross_entropy(out, y, reduction="none").max(), False),
    "a mean of what is a number": (
        lambda out, y: torch.where(out > 0, out, math.nan).nanmean(),
        False,
    ),
    "a correlation": (lambda out, y: -torch.corrcoef(out.T)[0, 1], False),
    "a variance besides": (lambda out, y: cross_entropy(out, y) + out.var(0).mean(), False),
    "each with each, on the diagonal": (lambda out, y: -(out @ out.T).log_softmax(1).diagonal().mean(), False),
    "each with each, without a label": (lambda out, y: (out @ out.T).square().mean(), False),
    "distances of each from each": (lambda out, y: torch.cdist(out, out).mean(), False),
    "a sigmoid of each with each": (
        lambda out, y: binary_cross_entropy_with_logits(out @ out.detach().T, torch.eye(len(out), dtype=out.dtype)),
        False,
    ),
    "what is less the samples' mean": (lambda out, y: mse_loss(out - out.mean(0), one_hot(y, 3).to(out)), False),
    "a product with a mask": (lambda out, y: torch.dot(out[:, 0], (y > 0).float()) / (y > 0).sum(), False),
    "a product of means": (lambda out, y: cross_entropy(out, y) * out.square().mean(), False),
    "the sum of a Function": (lambda out, y: Squares.apply(out), False),
    "the mean of a Function": (lambda out, y: Squares.apply(out) / 0.5 / len(y), True),
    "Dice of each row": (lambda out, y: dice(out.softmax(1), one_hot(y, 3), 1), True),
    "a mean of means": (
        lambda out, y: torch.stack([cross_entropy(o, t) for o, t in zip(out, y, strict=True)]).mean(),
        True,
    ),
    "a mean times a tensor": (lambda out, y: torch.tensor(0.5) * cross_entropy(out, y), True),
    "equal class weights": (lambda out, y: cross_entropy(out, y, out.new_full((3,), 2.0)), True),
    "class weights of each sample": (
        lambda out, y: (cross_entropy(out, y, reduction="none") * CLASS_WEIGHTS[y]).mean(),
        True,
    ),
    "a sum that is divided": (lambda out, y: cross_entropy(out, y, reduction="sum") / len(y), True),
    "a sum of one": (lambda out, y: cross_entropy(out, y)[None].sum(), True),
    "a penalty": (lambda out, y: cross_entropy(out, y) + out.new_ones(3, requires_grad=True).sum(), True),
}


@pytest.mark.parametrize("case", OF_EQUAL_ROWS)
def test_rows_without_a_mark(case):
    """Class weights, sums and negatives, which the loss's graph shows; the rare class is in the last rows alone."""
    loss, right = OF_EQUAL_ROWS[case]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    acc = ak.FusedAccumulator(model)
    batch = torch.randn(12, 4), torch.tensor([0, 1] * 5 + [2, 2])

    def of(part, model=model):
        return loss(model(part[0].to(model.weight.dtype)), part[1])

    check_split(acc, model, batch, of, right, micro_batch=4)


def of_labels(out, y):
    """A number of each sample, as a weight or a reward is, and the loss of each."""
    return y.to(out.dtype) + 1, cross_entropy(out, y, reduction="none")


def policy(out, y, advantages):
    """The loss of a policy's gradient."""
    return -(out.log_softmax(1).gather(1, y[:, None])[:, 0] * advantages).mean()


BY_ALL_SAMPLES = {
    "weights by their mean": (
        lambda out, y: (lambda w, each: (each * (w / w.mean())).mean())(*of_labels(out, y)),
        False,
    ),
    "rewards less their mean": (lambda out, y: policy(out, y, y - y.to(out).mean()), False),
    "an error by the labels' mean": (lambda out, y: cross_entropy(out, y) / of_labels(out, y)[0].mean(), False),
    "rare labels by their share": (
        lambda out, y: binary_cross_entropy_with_logits(
            out[:, 0], (y == 0).to(out), pos_weight=of_labels(out, y)[0].mean()
        ),
        False,
    ),
    "by the sum of the labels, four of the first four": (
        lambda out, y: (of_labels(out, y)[1] * y).sum() / (0.8 * y.to(out)).sum(),
        False,
    ),
    "less a mean of other samples'": (lambda out, y: softplus(out[:, 0] - out[:, 1].mean()).mean(), False),
    "by the largest": (lambda out, y: (of_labels(out, y)[1] / of_labels(out, y)[1].max()).mean(), False),
    "less the one before": (lambda out, y: (out - out.roll(1, 0)).square().mean(), False),
    "less the one from the end": (lambda out, y: (out - out.flip(0)).square().mean(), False),
    "distances of pairs": (lambda out, y: torch.pdist(out).square().mean(), False),
    "less each label": (lambda out, y: (out[:, None] - one_hot(y, 3)[None]).square().mean(), False),
    "each with each": (lambda out, y: cross_entropy(out @ out.T, torch.arange(len(out))), False),
    "rewards": (lambda out, y: policy(out, y, y - 1.5), True),
    "weights": (lambda out, y: (of_labels(out, y)[0] * of_labels(out, y)[1]).mean(), True),
    "a number": (lambda out, y: 0.3 * cross_entropy(out, y) * torch.tensor(0.3), True),
}


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("case", BY_ALL_SAMPLES)
def test_what_all_samples_have_a_part_in(case, micro_batch):
    """Factors without a graph, numbers of all samples, and pairs; of one sample, and of three with as many features."""
    loss, right = BY_ALL_SAMPLES[case]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    acc = ak.FusedAccumulator(model)
    batch = torch.randn(12, 4), torch.tensor([0, 1, 2, 2] * 3)

    def of(part, model=model):
        return loss(model(part[0].to(model.weight.dtype)), part[1])

    check_split(acc, model, batch, of, right, micro_batch)


def test_a_mean_over_packed_tokens():
    """Divided by their number, which is no multiple of the samples'."""
    model = Text(0.0)
    acc = ak.FusedAccumulator(model)
    ids = torch.where(REAL, torch.stack(texts([10] * 6)).clamp(min=1), 0)

    def loss(part, model=model):
        packed = torch.cat(rows_of(part, part))
        return cross_entropy(model(packed[None]).flatten(0, 1), packed, reduction="sum") / len(packed)

    check_split(acc, model, ids, loss, False)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_random_losses_that_look_like_means(micro_batch, caplog):
    """With factors, or of one sample, they are asked, which tells nothing; a warning would be of nearly all of them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    acc = ak.FusedAccumulator(model)

    def loss(x):
        noise = torch.randn_like(x)
        return (noise[:, :1].abs() * (model(x + noise) - noise).square()).mean()

    acc.backward_batch(torch.randn(12, 4), loss, micro_batch=micro_batch)
    assert caplog.messages == []


def of_boxes(model, images, boxes):
    """A mean over images, each of its boxes."""
    found = [model(image.to(model.weight.dtype)).mean((1, 2)) for image in images]
    return torch.stack([(out - box).abs().mean() for out, box in zip(found, boxes, strict=False)]).mean()


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("way", ["a tree", "stacked", "tuples"])
def test_lists_of_boxes(way, micro_batch, caplog):
    """Two images of which one has two boxes, or three of three channels: rows, and no samples."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 2, 3)
    acc = ak.FusedAccumulator(model)
    samples = [(torch.randn(3, 4, 4), torch.randn(1 + index % 3, 2)) for index in range(6)]
    collate = (
        None if way == "a tree" else lambda some: stacked(some) if way == "stacked" else tuple(zip(*some, strict=True))
    )

    def stacked(some):
        return torch.stack([image for image, _ in some]), [box for _, box in some]

    batch = samples if collate else stacked(samples)
    acc.backward_batch(batch, lambda part: of_boxes(model, *part), micro_batch=micro_batch, collate=collate)
    acc.finalize()
    _, grads = truth(model, lambda twin: of_boxes(twin, *stacked(samples)))
    assert relative_error(grads_of(acc), grads) < SINGLE
    assert caplog.messages == []


def test_losses_that_cancel():
    """Of rewards of 0 and 1 in a policy's first step: only their rounding is left, which is no other mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    acc = ak.FusedAccumulator(model)

    def loss(part, model=model):
        ids, reward, old = part
        found = model(ids).log_softmax(-1).gather(2, ids[..., None])[..., 0]
        return torch.stack([((found - old).exp() * reward[:, None]).mean()]).sum()

    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(WORDS, (8, 120), generator=generator)
        reward = torch.rand(1, generator=generator) * torch.tensor([1.0, -1.0] * 4)
        old = model(ids).log_softmax(-1).gather(2, ids[..., None])[..., 0].detach()
        check_split(acc, model, (ids, reward, old), loss, True, micro_batch=4)
        acc.zero_()


def test_penalties_of_weights_are_not_asked(caplog):
    """They are the same for any samples; with a random loss, asking would end in a warning."""
    torch.manual_seed(0)
    model, calls = nn.Linear(4, 4), []
    acc = ak.FusedAccumulator(model)

    def loss(x):
        calls.append(1)
        noisy = mse_loss(model(x + torch.randn_like(x)), x)
        return noisy + 0.01 * sum(p.norm() for p in model.parameters()) + (model.weight * model.weight).sum().sqrt()

    report = acc.backward_batch(torch.randn(12, 4), loss, micro_batch=4)
    assert len(calls) == len(report.sizes) == 3
    assert caplog.messages == []
