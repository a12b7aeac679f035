"""Unequal micro-batches without a weight: one warning where the losses' graphs prove them, and no false alarm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accumkernels as ak
from accumkernels.window import loss_items

CLASSES, WIDTH, MASKED = 5, 4, -100


@pytest.fixture
def loop(caplog, one_thread):
    """A model, its accumulator and an optimizer, and what was said: `loop.said()`."""
    return Loop(caplog)


class Loop:
    """Runs windows of losses and counts warnings."""

    def __init__(self, caplog):
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, CLASSES)
        self.acc = ak.FusedAccumulator(self.model)
        self.optimizer = torch.optim.SGD(self.acc.parameters(), lr=0.1)
        self.caplog = caplog

    def window(self, loss_fn, sizes, **step):
        """One window: `loss_fn(n)` for each size."""
        for size in sizes:
            self.acc.backward(loss_fn(size))
        self.acc.step(self.optimizer, **step)

    def said(self):
        """The numbers of items in each warning."""
        messages = [r.getMessage() for r in self.caplog.records if "unequal numbers of items" in r.getMessage()]
        assert all(m.startswith("accumkernels: ") and "acc.backward(loss, weight=" in m for m in messages)
        return [m.partition("(")[2].partition(")")[0] for m in messages]

    def out(self, *shape):
        """Scores `[*shape, CLASSES]`."""
        return self.model(torch.randn(*shape, WIDTH))


def labels(*shape, masked=0):
    """Labels, of which the first few are masked."""
    y = torch.randint(CLASSES, shape)
    y.view(-1)[:masked] = MASKED
    return y


def texts(loop, rows, length, masked=0):
    """Cross-entropy of a language model's shifted, flattened logits."""
    return F.cross_entropy(loop.out(rows, length).flatten(0, 1), labels(rows * length, masked=masked))


# Losses of n samples that are means over unequal numbers, and these numbers for 8, 8 and 3 samples.
MEANS = {
    "cross-entropy": (lambda a, n: F.cross_entropy(a.out(n), labels(n)), "8, 8, 3"),
    "class weights": (lambda a, n: F.cross_entropy(a.out(n), labels(n), torch.rand(CLASSES)), "8, 8, 3"),
    "label smoothing": (lambda a, n: F.cross_entropy(a.out(n), labels(n), label_smoothing=0.1), "8, 8, 3"),
    "probabilities": (lambda a, n: F.cross_entropy(a.out(n), a.out(n).softmax(1).detach()), "8, 8, 3"),
    "images": (lambda a, n: F.cross_entropy(a.out(n, 2, 2).movedim(-1, 1), labels(n, 2, 2)), "32, 32, 12"),
    "mean squares": (lambda a, n: F.mse_loss(a.out(n), torch.randn(n, CLASSES)), "40, 40, 15"),
    "absolute": (lambda a, n: F.l1_loss(a.out(n), torch.randn(n, CLASSES)), "40, 40, 15"),
    "binary": (lambda a, n: F.binary_cross_entropy_with_logits(a.out(n)[:, 0], torch.rand(n)), "8, 8, 3"),
    "per sample": (lambda a, n: F.cross_entropy(a.out(n), labels(n), reduction="none").mean(), "8, 8, 3"),
    "KL of a batch": (
        lambda a, n: F.kl_div(a.out(n).log_softmax(1), torch.rand(n, CLASSES), reduction="batchmean"),
        "8, 8, 3",
    ),
    "sum over len": (lambda a, n: F.cross_entropy(a.out(n), labels(n), reduction="sum") / n, "8, 8, 3"),
    "halved": (lambda a, n: -(-F.cross_entropy(a.out(n), labels(n)) / 2).double(), "8, 8, 3"),
    "two means over samples": (
        lambda a, n: F.cross_entropy(a.out(n), labels(n)) + 0.1 * a.out(n).square().mean(),
        "8, 8, 3",
    ),
    "class and box": (
        lambda a, n: F.smooth_l1_loss(a.out(n), torch.randn(n, CLASSES)) + F.cross_entropy(a.out(n), labels(n)),
        "8, 8, 3",
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_unequal_numbers_are_warned_of_once(name, loop):
    """Once for an accumulator; and not before there is reason to: windows of equal losses come first."""
    loss, counts = MEANS[name]
    loop.window(lambda n: loss(loop, n), (8, 8, 8))
    assert loop.said() == []
    for _ in range(2):
        loop.window(lambda n: loss(loop, n), (8, 8, 3))
    assert loop.said() == [counts]


TOKENS = {
    "labels counted by hand": (
        lambda a, n: F.cross_entropy(a.out(20), labels(20, masked=n), reduction="sum") / (20 - n),
        "12, 12, 17",
    ),
    "flattened": (lambda a, n: texts(a, 2, n), "16, 16, 6"),
    "by class": (lambda a, n: F.cross_entropy(a.out(2, n).transpose(1, 2), labels(2, n)), "16, 16, 6"),
    "masked": (lambda a, n: texts(a, 2, 10, masked=n), "12, 12, 17"),
    "masked by hand": (
        lambda a, n: (a.out(2, 10).square().mean(-1) * (m := torch.arange(10) < n)).sum() / (2 * m.sum()),
        "16, 16, 6",
    ),
}


@pytest.mark.parametrize("name", TOKENS)
def test_unequal_tokens_of_as_many_rows(name, loop):
    """Texts of other lengths, and as many tokens of which others are masked."""
    loss, counts = TOKENS[name]
    loop.window(lambda n: loss(loop, n), (8, 8, 3))
    assert loop.said() == [counts]


# What must not be warned of: losses of sizes 8, 8 and 3.
SILENT = {
    "equal tokens, other padding": lambda a, n: texts(a, 2, n + 2, masked=2 * n),
    "images of other sizes": lambda a, n: F.cross_entropy(a.out(2, n, n).movedim(-1, 1), labels(2, n, n)),
    "series of other lengths": lambda a, n: F.mse_loss(a.out(2, n), torch.randn(2, n, CLASSES)),
    "mean over rows": lambda a, n: a.out(2, n).square().mean((1, 2)).mean(),
    "sum over lengths": lambda a, n: F.cross_entropy(a.out(2, n).mean(-2), labels(2), reduction="sum") / n,
    "masked sum over lengths": lambda a, n: (a.out(9, n).square().mean(-1) * (torch.arange(n) < 2)).sum() / n,
    "a sum": lambda a, n: F.cross_entropy(a.out(n), labels(n), reduction="sum"),
    "two forwards": lambda a, n: F.cross_entropy(a.out(8), labels(8)) + F.cross_entropy(a.out(n), labels(n)),
    "weighted by the loop": lambda a, n: F.cross_entropy(a.out(n), labels(n)) * (n / 19),
    "weighted by a tensor": lambda a, n: F.cross_entropy(a.out(n), labels(n)) * torch.tensor(n / 19),
    "normalized by weights": lambda a, n: (a.out(8)[:, 0] * torch.rand(8)).sum() / torch.rand(8).sum(),
    "class weights of as many": lambda a, n: F.cross_entropy(a.out(8), labels(8), torch.rand(CLASSES)),
    "a mean of losses": lambda a, n: torch.stack([a.out(8).mean() for _ in range(n)]).mean(),
    "a regularizer": lambda a, n: F.cross_entropy(a.out(n), labels(n)) + a.model.weight.square().sum(),
    "of a checkpoint": lambda a, n: torch.utils.checkpoint.checkpoint(
        lambda x: F.cross_entropy(a.model(x), labels(n)), torch.randn(n, WIDTH), use_reentrant=False
    ),
    "of many parts": lambda a, n: sum(a.out(n).mean() for _ in range(2000)),
    "of parts used often": lambda a, n: doubled(F.cross_entropy(a.out(n), labels(n)), 60),
    "a parameter": lambda a, n: -a.model.bias[0],
    "a norm": lambda a, n: a.out(n).norm(),
}


def doubled(loss, times):
    """A graph of a few nodes with 2**times ways through it."""
    for _ in range(times):
        loss = loss / 2 + loss / 2
    return loss


@pytest.mark.parametrize("name", SILENT)
def test_no_false_alarm(name, loop):
    """Where sizes are equal in the unit that counts, or nothing is certain."""
    loop.window(lambda n: SILENT[name](loop, n), (8, 8, 3))
    assert loop.said() == []


def plain(loop, n):
    """A mean over n samples."""
    return F.cross_entropy(loop.out(n), labels(n))


def test_weights_silence(loop):
    """All of them, some of them, and weight=1, which says that unequal losses are to count the same."""
    for weights in ((8, 8, 3), (1, 1, 1), (None, None, 1.0)):
        for size, weight in zip((8, 8, 3), weights, strict=True):
            loop.acc.backward(plain(loop, size), weight)
        loop.acc.step(loop.optimizer)
    assert loop.said() == []


def test_a_divisor_silences(loop):
    """Then the losses are no means, whatever they look like."""
    loop.window(lambda n: plain(loop, n), (8, 8, 3), divisor=19)
    for size in (8, 3):
        loop.acc.backward(plain(loop, size))
    loop.acc.finalize(divisor=11)
    loop.acc.zero_()
    assert loop.said() == []


def test_validation_is_not_looked_at(loop):
    """Forwards without a backward, of whatever size, between micro-batches."""
    for size in (8, 3, 5):
        loop.acc.backward(plain(loop, 4))
        with torch.no_grad():
            plain(loop, size)
    loop.acc.step(loop.optimizer)
    assert loop.said() == []


def test_sizes_may_differ_between_windows(loop):
    """A loop that lets batches grow has equal micro-batches in each window."""
    for size in (2, 4, 8):
        loop.window(lambda n: plain(loop, n), (size, size))
    assert loop.said() == []


def test_two_calls_in_a_loop_may_have_sizes_of_their_own(loop):
    """A discriminator's real and generated samples, new ones and those of a memory; each is compared with its kind."""
    for real, fake in ((4, 8), (4, 8)):
        loop.acc.backward(plain(loop, real))
        loop.acc.backward(plain(loop, fake))
    loop.acc.step(loop.optimizer)
    assert loop.said() == []
    for real, fake in ((4, 8), (3, 8)):
        loop.acc.backward(plain(loop, real))
        loop.acc.backward(plain(loop, fake))
    loop.acc.step(loop.optimizer)
    assert loop.said() == ["4, 3"]


def test_other_ways_into_a_window_silence(loop):
    """backward_batch, backward_coupled and a loop's own backward have weights, or no graph of one micro-batch."""
    for size in (8, 3):
        plain(loop, size).backward()
        loop.acc.accumulate()
    loop.acc.backward(plain(loop, 2))
    loop.acc.step(loop.optimizer)
    x = torch.randn(7, WIDTH)
    loop.acc.backward_batch(x, lambda part: loop.model(part).square().mean(), micro_batch=4)
    loop.acc.step(loop.optimizer)
    assert loop.said() == []


def test_a_dropped_window_is_forgotten(loop):
    """Its losses do not count in the next one."""
    loop.acc.backward(plain(loop, 8))
    loop.acc.zero_()
    loop.window(lambda n: plain(loop, n), (3, 3))
    assert loop.said() == []


def test_many_numbers_are_cut(loop):
    """The message stays a line."""
    loop.window(lambda n: plain(loop, n), range(1, 20))
    assert loop.said() == ["1, 2, 3, 4, 5, 6, 7, ..., 19"]


@pytest.mark.parametrize(("sizes", "counts"), [((8, 8, 3), ["8, 8, 3"]), ((8, 8, 8), [])])
@pytest.mark.native
def test_numbers_on_a_device_are_read_once(sizes, counts, loop, monkeypatch):
    """At the end of the first window, and of the first whose shapes differ; in others nobody waits for the device."""
    reads = []
    stack = torch.stack
    monkeypatch.setattr(loss_items, "_known", lambda number: number)
    monkeypatch.setattr(loss_items.torch, "stack", lambda found: reads.append(len(found)) or stack(found))
    for _ in range(3):
        loop.window(lambda n: plain(loop, n), (8, 8, 8))
    assert reads == [3]
    for _ in range(3):
        loop.window(lambda n: plain(loop, n), sizes)
    assert loop.said() == counts
    assert reads == [3] * (1 + bool(counts))


def test_numbers_on_a_device_that_are_no_counts(loop, monkeypatch):
    """Sums of weights."""
    monkeypatch.setattr(loss_items, "_known", lambda number: number)
    loop.window(lambda n: SILENT["normalized by weights"](loop, n), (8, 8, 3))
    assert loop.said() == []


def test_the_warning_is_right(loop):
    """What it warns of is off the big batch, and with the weights that it asks for it is not."""
    data = [(torch.randn(n, WIDTH), labels(n)) for n in (8, 8, 3)]
    x, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    truth = torch.autograd.grad(F.cross_entropy(loop.model(x), y), loop.model.weight)[0]
    errors = []
    for weighted in (False, True):
        for x, y in data:
            loop.acc.backward(F.cross_entropy(loop.model(x), y), *([len(x)] if weighted else []))
        loop.acc.finalize()
        errors.append(((loop.model.weight.grad - truth).norm() / truth.norm()).item())
        loop.acc.zero_()
        assert len(loop.said()) == 1
    assert errors[0] > 0.05 and errors[1] < 1e-6 and not math.isnan(errors[0])


def test_a_caller_without_a_frame():
    """Where C code calls backward nothing can be told of two places."""
    loss = torch.ones(3, requires_grad=True).mean()
    assert loss_items.items_at(loss, loss.grad_fn, None) is None


class Packed(torch.autograd.Function):
    """Takes items out, which no op of torch's own shows."""

    @staticmethod
    def forward(ctx, values, mask):
        ctx.save_for_backward(mask)
        return values[mask]

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError


def test_features_do_not_make_items_of_samples():
    """Three items of two samples, with four features each, are no twelve items of which each sample has six."""
    values, mask = torch.ones(2, 2, 4, requires_grad=True), torch.tensor([[True, True], [True, False]])
    assert not loss_items.is_plain_mean((Packed.apply(values, mask) * 2).mean(), 2, 2)
    assert loss_items.is_plain_mean((values * 2).mean(), 2, 2)
