"""Forwards that are cut short, or looked at while they run: the model's parameters are what others find in it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import accumkernels as ak


class Scaled(nn.Linear):
    """A linear layer that does something after its parameters were read; what, the tests say."""

    def __init__(self):
        super().__init__(5, 3)
        self.then = None

    def forward(self, x):
        """As nn.Linear."""
        x = super().forward(x)
        if self.then is not None:
            self.then()
        return x


def loss_of(model, seed=0):
    """A forward under autocast."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def on_the_route(micro_batches=3, **options):
    """A model that has run, and its accumulator with an open window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Scaled())
    acc = ak.FusedAccumulator(model, **options)
    for _ in range(micro_batches):
        acc.backward(loss_of(model))
    return model, acc


def interrupt(model):
    """Ctrl-C in the middle of a forward."""

    def ctrl_c():
        raise KeyboardInterrupt

    model[1].then = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        loss_of(model)
    model[1].then = None


def same(found, expected):
    """Whether two state_dicts are equal, in dtype too."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


def test_saving_after_an_interrupt():
    """What is saved on Ctrl-C is the parameters, not what they were rounded to."""
    model, _ = on_the_route()
    expected = copy.deepcopy(model.state_dict())
    interrupt(model)
    assert same(model.state_dict(), expected)


def test_state_dict_inside_forward():
    """The same in the middle of a forward, which goes on."""
    model, acc = on_the_route()
    expected, found = copy.deepcopy(model.state_dict()), {}
    model[1].then = lambda: found.update(model.state_dict())
    acc.backward(loss_of(model))
    assert same(found, expected)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.finalize(optimizer)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin[1].then = None
    loss_of(twin).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("action", ["step", "zero_", "discard", "load_state_dict", "remove"])
def test_the_accumulator_after_an_interrupt(action):
    """Nothing takes a shadow for a replaced parameter, or leaves it in the model."""
    model, acc = on_the_route()
    params = list(model.parameters())
    saved = acc.state_dict()
    interrupt(model)
    if action == "step":
        acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
    elif action == "load_state_dict":
        acc.load_state_dict(saved)
    else:
        getattr(acc, action)()
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))


@pytest.mark.parametrize("grad", [True, False])
def test_a_forward_after_an_interrupt_reads_the_parameters(grad):
    """Not what the interrupted forward left in the slots, which is old by now."""
    model, _ = on_the_route()
    params = list(model.parameters())
    interrupt(model)
    with torch.no_grad():
        for p in params:
            p.mul_(2)
    twin = nn.Sequential(nn.Linear(5, 5), Scaled())
    for p, q in zip(twin.parameters(), params, strict=True):
        p.data.copy_(q)
    with torch.set_grad_enabled(grad):
        assert torch.equal(loss_of(model), loss_of(twin))


@pytest.mark.parametrize("removed", [True, False])
def test_an_interrupted_first_forward_leaves_no_mode(removed):
    """Once the accumulator is gone, removed or collected, ops are no longer watched."""
    model, acc = on_the_route(micro_batches=0)
    interrupt(model)
    if removed:
        acc.remove()
    del acc
    gc.collect()
    assert _get_current_dispatch_mode() is None
