"""The tables "what is `weight`?": each weight, as it is written, gives the big batch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import accumkernels as ak
from tests.support.doc_blocks import ROOT

PAGE = "docs/guides/loop.md"
CW = torch.linspace(0.2, 3.0, 5, dtype=torch.float64)
ignore_index = -100
EXACT = 1e-13  # sums of a hundred terms in fp64


def table(page):
    """Of a page, the rows: the loss, and the code in the second column."""
    rows = re.search(r"^\|[^|]+\| `weight` \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    cells = [row.strip("|").split(" | ") for row in rows[1].splitlines()]
    return {loss.strip(): re.findall(r"`([^`]+)`", weight) for loss, weight in cells}


def texts(rows, length, masked):
    """Tokens and labels, some of them masked: those at the beginning of each row."""
    x = torch.randint(5, (rows, length))
    y = x.clone()
    y[:, :masked] = ignore_index
    return x, y


MASKED = [texts(3, 7, 2), texts(1, 7, 0), texts(4, 7, 5)]
WHOLE = [texts(rows, 7, 0) for rows in (3, 1, 4)]


def shifted(model, x, labels):
    """As language models of transformers shift them inside."""
    return cross_entropy(model(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain(model, x, y, weight=None, **kwargs):
    """Not shifted."""
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), weight, **kwargs)


# By row of the table: the code in it, a loss that it is for, and batches; what is summed has a divisor instead.
CASES = [
    (0, 0, lambda model, x, y: model(x).mean((1, 2)).square().mean(), MASKED),
    (1, 0, plain, MASKED),
    (1, 1, plain, WHOLE),
    (2, 0, shifted, MASKED),
    (3, 0, lambda model, x, y: plain(model, x, y, CW), WHOLE),
    (3, 1, lambda model, x, y: plain(model, x, y, CW), MASKED),
    (4, None, lambda model, x, y: plain(model, x, y, reduction="sum"), MASKED),
]


def test_readme_has_a_part_of_it():
    """In four rows, with the same code."""
    whole, part = table(PAGE), table("README.md")
    assert {row: len(code) for row, code in enumerate(list(whole.values())[:5])} == {0: 1, 1: 2, 2: 1, 3: 2, 4: 1}
    assert len(part) == 4
    known = {code for row in whole.values() for code in row}
    assert [code for row in part.values() for code in row if code not in known] == []


@pytest.mark.parametrize(("row", "code", "loss_fn", "batches"), CASES)
def test_weights_give_the_big_batch(row, code, loss_fn, batches, one_thread):
    """The expression itself, with x and y of each micro-batch; without it the gradient is another."""
    torch.manual_seed(0)
    expressions = list(table(PAGE).values())[row]
    model = nn.Sequential(nn.Embedding(5, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(loss_fn(model, x, y), list(model.parameters()))])
    acc = ak.FusedAccumulator(model)
    errors = []
    for given in (True, False):
        for x, y in batches:
            names = {"x": x, "y": y, "labels": y, "CW": CW, "ignore_index": ignore_index}
            weight = 1 if code is None or not given else eval(expressions[code], names)
            acc.backward(loss_fn(model, x, y), weight=weight)
        total = 1.0 if code is None and given else None
        acc.finalize(divisor=total)
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        errors.append(((found - truth).norm() / truth.norm()).item())
        acc.zero_()
    assert errors[0] < EXACT
    assert errors[1] > 0.01
    assert code is not None or "divisor=total" in expressions[0]
