"""The ways that the guide calls right have the gradient of the whole batch, and those that it warns of have not."""

from __future__ import annotations

import re

import pytest

from tests.examples.test_planning import load

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 2e-6  # of the gradient's norm, sums of a thousand terms in fp32; measured at most 2.3e-7
WRONG = 0.03  # the least that a wrong way is off; measured at least 0.05

RIGHT = {"weight=labels": 1, "weight=CW[y].sum()": 1, "sums over totals, divisor=1": 2, "backward_coupled": 1}


def test_right_and_wrong_ways(capsys, caplog):
    """By the table that the program prints: the first way of each loss is right, all others are wrong."""
    example = load("loss_parts")
    assert example.main() == 0
    table = re.findall(r"^(.{34})(.{34})(\S+)$", capsys.readouterr().out, re.MULTILINE)[0:]
    found = [(loss.strip(), way.strip(), float(error)) for loss, way, error in table if error != "gradient"]
    firsts = {loss: way for loss, way, _ in reversed(found)}
    assert len(firsts) == 5
    right = [(way, error) for loss, way, error in found if firsts[loss] == way]
    assert max(error for _, error in right) < ROUNDING
    assert {way: [each for each, _ in right].count(way) for way, _ in right} == RIGHT
    assert min(error for loss, way, error in found if firsts[loss] != way) > WRONG
    assert "python examples/loss_parts.py" in example.__doc__


def test_whole_is_the_sum_of_its_rows():
    """The example's losses of rows are what torch computes: the truth that the table compares with is no other loss."""
    import torch
    from torch.nn.functional import cross_entropy

    example = load("loss_parts")
    model, (tokens, labels) = example.Experts().to(example.DEVICE).double(), example.batch()
    hidden = model.embedding(tokens)
    logits = model.router(hidden)
    probability = logits.softmax(-1)
    best = probability.argmax(-1)
    mixed = torch.stack([h @ model.experts[e] for h, e in zip(hidden.flatten(0, 1), best.flatten(), strict=True)])
    mixed = mixed.view_as(hidden) * probability.amax(-1, keepdim=True)
    real = labels != example.MASKED
    z = logits.logsumexp(-1)[real].square().mean()
    ce = cross_entropy(model.head(torch.tanh(hidden + mixed))[real], labels[real])
    torch.testing.assert_close(example.per_token(model((tokens, labels))), ce + example.Z * z)
    share = torch.stack([(best[real] == e).double().mean() for e in range(example.EXPERTS)])
    expected = example.EXPERTS * (share * probability[real].mean(0)).sum()
    torch.testing.assert_close(example.balance(model((tokens, labels))), expected)
    rows = []
    for row in range(len(tokens)):
        of_row = torch.stack([(best[row][real[row]] == e).double().mean() for e in range(example.EXPERTS)])
        rows.append(example.EXPERTS * (of_row * probability[row][real[row]].mean(0)).sum())
    torch.testing.assert_close(model((tokens, labels)).balance, torch.stack(rows))
