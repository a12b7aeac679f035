"""What users call the parameters: every kind that serves, what is wrong with others, and drift that is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

LEAF = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "no parameters"),
        (nn.ReLU(), ValueError, "no parameters"),
        (torch.zeros(3, requires_grad=True), TypeError, "module or an iterable of parameters, got tensor"),
        (3, TypeError, "module or an iterable of parameters, got 3"),
        (["weight"], TypeError, "item 0 must be a Parameter.*got 'weight'"),
        ([{"lr": 0.1}], ValueError, "group 0 has no 'params'"),
        ([LEAF, LEAF], ValueError, "'param1' and 'param0' are the same parameter"),
        ([("a", LEAF), ("a", nn.Parameter(torch.zeros(2)))], ValueError, "two parameters are called 'a'"),
        ([LEAF * 2], ValueError, "'param0' is not a leaf"),
        ([("n", torch.zeros(2, dtype=torch.int64))], ValueError, "'n' is torch.int64"),
        ([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], ValueError, "'param0' is torch.complex64"),
        ([torch.zeros(2, device="meta", requires_grad=True)], ValueError, "'param0' is on the meta device"),
        ([torch.zeros(2, 2).to_sparse().requires_grad_()], ValueError, "'param0' has layout torch.sparse_coo"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_wrong_params(params, error, message):
    """Every kind of unusable params is refused with what it is."""
    with pytest.raises(error, match=message):
        ak.FusedAccumulator(params)


def test_buffers_and_names_of_every_kind_of_params():
    """Modules, parameters, (name, parameter) pairs and param groups all serve; names are as documented."""
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": [model[2].weight, model[2].bias], "lr": 0.1}]
    for params, name in (
        (model, "0.weight"),
        (list(model.parameters()), "param0"),
        (model.parameters(), "param0"),
        (model.named_parameters(), "0.weight"),
        (groups, "group0.param0"),
        (torch.compile(model), "0.weight"),
    ):
        with ak.FusedAccumulator(params) as acc:
            p = next(acc.parameters())
            assert p is model[0].weight
            p.grad = torch.full_like(p, float("inf"))
            acc.accumulate()
            assert acc.overflow_report() == [name]
            acc.zero_()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.half(), "'.*' was torch.float32 at construction and is torch.float16 now"),
        (lambda m: m.load_state_dict(m.state_dict() | {"0.bias": torch.zeros(9)}, assign=True), "was replaced"),
        (
            lambda m: setattr(m[0].bias, "data", torch.zeros(4)),
            r"'0.bias' had shape \(9,\) at construction and has \(4,\)",
        ),
        (lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(9))), "'0.bias' was replaced"),
        pytest.param(lambda m: m.cuda(), "was on cpu at construction and is on cuda:0 now", marks=pytest.mark.gpu),
    ],
    ids=["half", "assign", "data", "setattr", "cuda"],
)
def test_drift_is_named(change, message):
    """A parameter that changed dtype, shape, device or identity is named at the next window's first accumulate."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        acc.accumulate()
    with pytest.raises(RuntimeError, match=message):
        acc.step(optimizer)
