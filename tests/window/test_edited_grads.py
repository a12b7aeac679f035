"""`.grad` changed between `finalize` and `clip_grad_norm_`: norm and clipping are as in torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip
from torch.nn.utils import clip_grad_value_

import accumkernels as ak

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # stock rounds bf16 sums K times, we once


def replace(model):
    """A centralised or noised gradient, in new memory."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def edit(model):
    """Rows of an embedding that stay frozen."""
    model.a.weight.grad[:2] = 0
    model.a.bias.grad.mul_(0.5)


def cancel(model):
    """As DINO's cancel_gradients_last_layer."""
    model.a.bias.grad = None


def give(model):
    """A parameter without a gradient in the window gets one."""
    model.b.weight.grad = torch.ones_like(model.b.weight)


def exchange(model):
    """Each becomes the other."""
    a, c = model.a.weight, model.c.weight
    a.grad, c.grad = c.grad, a.grad


def turn(model):
    """Another view of the same memory."""
    model.a.weight.grad = model.a.weight.grad.t()


def replace_data(model):
    """The `.grad` stays the same tensor, with other memory."""
    for p in (model.a.weight, model.c.weight):
        p.grad.data = p.grad.data * 0.5


def limit_values(model):
    """Torch's own."""
    clip_grad_value_(model.parameters(), 0.01)


def nothing(model):
    """The usual."""


EDITS = [replace, edit, cancel, give, exchange, turn, replace_data, limit_values, nothing]


class Three(nn.Module):
    """`b` gets no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        """Without `b`."""
        return self.c(self.a(x).tanh())


def train(model, change, ours):
    """Two windows of two micro-batches, each clipped twice; returns norms and the parameters."""
    acc = ak.FusedAccumulator(model) if ours else None
    optimizer = torch.optim.SGD(model.parameters() if acc is None else acc.parameters(), lr=1.0)
    data = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    norms = []
    for window in data.to(model.a.weight.dtype):
        for x in window:
            loss = 5 * model(x).square().mean()
            if acc is None:
                (loss / 2).backward()
            else:
                acc.backward(loss)
        if acc is not None:
            acc.finalize(optimizer)
        for max_norm in (1.0, 0.1):
            change(model)
            norms.append(float(acc.clip_grad_norm_(max_norm) if acc else clip(model.parameters(), max_norm)))
            if change is cancel:
                break  # it is None by now
        optimizer.step()
        optimizer.zero_grad() if acc is None else acc.zero_()
    return torch.tensor(norms), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("change", EDITS)
def test_norm_and_clipping_are_those_of_torch(change, dtype):
    """Whatever the loop did to `.grad`, over two windows."""
    torch.manual_seed(0)
    model = Three().to(dtype)
    twin = copy.deepcopy(model)
    norms, params = train(model, change, True)
    expected, truth = train(twin, change, False)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(norms, expected, rtol=max(tolerance, 1e-6), atol=0)
    for p, q in zip(params, truth, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_masters_and_the_loops_values():
    """The `.grad` of masters, too; a clipped gradient of the loop's is `.grad` afterwards."""
    model = Three().bfloat16()
    acc = ak.FusedAccumulator(model, master_weights=True)
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    acc.backward(model(torch.randn(8, 4).bfloat16()).square().mean())
    acc.finalize(optimizer)
    masters = [p for p in acc.parameters() if p.grad is not None]
    for p in masters:
        p.grad = torch.full_like(p, 3.0)
    norm = 3 * sum(p.numel() for p in masters) ** 0.5
    assert float(acc.clip_grad_norm_(1.0)) == pytest.approx(norm, rel=1e-6)
    for p in masters:
        torch.testing.assert_close(p.grad, torch.full_like(p, 3.0 / norm))


def test_a_sparse_gradient_is_refused_by_name():
    """Clipping cannot take it over."""
    model = nn.Linear(4, 4)
    acc = ak.FusedAccumulator(model)
    acc.backward(model(torch.ones(2, 4)).sum())
    acc.finalize(torch.optim.SGD(model.parameters(), lr=1.0))
    model.weight.grad = model.weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match="the gradient of 'weight' is sparse"):
        acc.clip_grad_norm_(1.0)


def test_a_grad_of_other_strides_at_the_same_address():
    """Every row is our first: norm and clipping are those of what the optimizer finds."""
    p = nn.Parameter(torch.zeros(3, 3))
    acc = ak.FusedAccumulator([p])
    p.grad = torch.arange(9.0).view(3, 3).clone()
    acc.accumulate()
    optimizer = torch.optim.SGD([p], lr=1.0)
    acc.finalize(optimizer)
    p.grad = p.grad[:1].expand(3, 3)
    expected = p.grad.clone()
    torch.testing.assert_close(acc.clip_grad_norm_(1.0), expected.norm())
    optimizer.step()
    torch.testing.assert_close(-p.detach(), expected / expected.norm())
