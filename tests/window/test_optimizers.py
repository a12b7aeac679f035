"""Every optimizer that makes sense leaves the bits that it leaves with stock torch on the mean gradient."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accumkernels as ak
from tests.support import optimizer_table as table
from tests.support.models import batch, mlp, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")


def marks(case):
    """Of packages that the tests can do without."""
    return () if case.package == "torch" else pytest.mark.integrations


@pytest.mark.parametrize("case", [pytest.param(c, id=c.label, marks=marks(c)) for c in table.CASES])
def test_line_of_the_table(case):
    """What docs/optimizers.md says is what happens."""
    if case not in table.available():
        pytest.skip(f"{case.path} is not installed")
    if case.label == "torch.optim.Adagrad, fused=True":
        if not hasattr(case.make([torch.nn.Parameter(torch.ones(2))]), "_step_supports_amp_scaling"):
            pytest.skip("this torch's Adagrad takes no grad_scale, as that of 2.10")
    result = table.run(case)
    assert "NO" not in (result.step, result.long_form, result.skips)
    assert table.row(case, result) in table.committed(), "run: python tests/support/optimizer_table.py"


def test_table_is_complete():
    """A line for each case in its order, and no other."""
    lines = table.committed()
    assert "".join(lines[:2]) == table.header()
    names = [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]]
    assert names == [f"`{c.path}`" + (f", {c.variant}" if c.variant else "") for c in table.CASES]


def test_sparse_adam_has_nothing_to_do():
    """Its gradients are sparse, which cannot be accumulated in flat buffers: refused where they come up."""
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    acc = ak.FusedAccumulator(embedding)
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' is sparse"):
        acc.backward(embedding(torch.tensor([1, 2])).sum())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_groups_and_schedulers(fused, tensor_lr):
    """Param groups with options of their own, and a scheduler, also of a learning rate that is a tensor."""
    model = mlp()
    twin = copy.deepcopy(model)
    acc = ak.FusedAccumulator(model)

    def make(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        lr = torch.tensor(0.02) if tensor_lr else 0.02
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr, fused=fused)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    (optimizer, scheduler), (stock, stock_scheduler) = make(model), make(twin)
    x, y = batch(6)
    for _ in range(3):
        for rows in (slice(0, 2), slice(2, 6)):
            acc.backward(mse_loss(model(x[rows]), y[rows]), weight=rows.stop - rows.start)
        acc.step(optimizer)
        scheduler.step()
        mse_loss(twin(x), y).backward()
        stock.step()
        stock.zero_grad()
        stock_scheduler.step()
    # Adam divides by sqrt(v): what differs by 1e-7 in a gradient near zero may differ more in its step.
    assert relative_error(list(model.parameters()), list(twin.parameters())) < 1e-4


def test_optimizers_must_own_every_accumulated_parameter():
    """A parameter that no optimizer owns, or two do, is named; nothing is handed out."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x), y))
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"no optimizer .* owns '[24]\."):
        acc.step(some)
    with pytest.raises(RuntimeError, match=r"more than one optimizer .* owns '0\."):
        acc.finalize(some, every)
    with pytest.raises(TypeError, match=r"step\(\) needs the optimizers"):
        acc.step()
    assert all(p.grad is None for p in model.parameters())
    acc.step(every)


def test_what_is_not_an_optimizer():
    """Other objects, wrapped optimizers and closure optimizers are TypeErrors that help."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got "):
        acc.finalize("adam")
    wrapped = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer", "optimizer": None})()
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer of accelerate .*optimizer.optimizer"):
        acc.step(wrapped)
    with pytest.raises(TypeError, match=r"LBFGS, whose step takes a closure(.|\n)*acc.finalize"):
        acc.step(torch.optim.LBFGS(model.parameters()))


class Plain:
    """An optimizer that is none of torch's, like fastai's."""

    def __init__(self, params):
        self.params = list(params)

    def step(self):
        """Gradient descent."""
        with torch.no_grad():
            for p in self.params:
                p.sub_(p.grad)

    def zero_grad(self):
        """fastai's."""
        for p in self.params:
            p.grad.detach_()
            p.grad.zero_()


class Wrapper(Plain):
    """Around one of torch's."""

    def __init__(self, params):
        super().__init__(params)
        self.opt = torch.optim.SGD(self.params, lr=1.0)


def test_optimizers_that_are_not_torchs():
    """The error shows the long form, which trains as torch's optimizer does, and names a torch optimizer inside."""
    models = mlp(), mlp()
    accs = [ak.FusedAccumulator(model) for model in models]
    optimizer, stock = Plain(models[0].parameters()), torch.optim.SGD(models[1].parameters(), lr=1.0)
    for acc, model in zip(accs, models, strict=True):
        x, y = batch(3)
        acc.backward(mse_loss(model(x), y))
    for call in (accs[0].step, accs[0].finalize):
        with pytest.raises(
            TypeError, match=r"Plain of tests is not a .* acc.finalize\(\) without it, .*acc.zero_\(\) \(AK23\)$"
        ):
            call(optimizer)
    with pytest.raises(
        TypeError, match=r"acc.zero_\(\); or pass the torch optimizer that it wraps, its attribute 'opt'"
    ):
        accs[0].step(Wrapper(models[0].parameters()))
    accs[0].finalize()
    assert not accs[0].step_was_skipped
    optimizer.step()
    optimizer.zero_grad()
    accs[0].zero_()
    accs[1].step(stock)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_optimizers_that_step_in_backward():
    """LOMO has updated parameters in each backward, and freed gradients: nothing is left for a window."""

    class Lomo(torch.optim.Optimizer):
        def fused_backward(self, loss, lr):
            """Its name for backward and step."""

    model = mlp()
    acc = ak.FusedAccumulator(model)
    with pytest.raises(TypeError, match="Lomo steps while backward runs, in every micro-batch"):
        acc.step(Lomo(model.parameters(), {}))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_patched_step_finds_averages(later, scheduled):
    """What a user puts in the place of one optimizer's `step` may look at `.grad`; a scheduler's wrapper does not."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(acc.parameters(), fused=True)
    x, y = batch(4)
    found = []

    def window():
        for _ in range(2):
            acc.backward(mse_loss(model(x), y), weight=4)
        expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
        acc.step(optimizer)
        return expected

    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    if later:
        window()
    assert acc.engine.ending.steps.plan.fused == ([optimizer] if later else [])

    step = optimizer.step

    def patched(self, closure=None):
        found.extend(p.grad.clone() for p in model.parameters())
        return step(closure)

    optimizer.step = types.MethodType(patched, optimizer)
    expected = window()
    assert all(torch.allclose(f, e, rtol=1e-5, atol=1e-8) for f, e in zip(found, expected, strict=True))
    assert len(found) == len(expected)


def test_hooks_on_all_optimizers_find_averages():
    """As hooks on one of them do: nothing is left to a fused step that somebody watches."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=0.1, fused=True)
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    try:
        x, y = batch(3)
        expected = torch.autograd.grad(mse_loss(model(x), y), model[0].weight)[0]
        for _ in range(4):
            acc.backward(mse_loss(model(x), y), weight=8)
        acc.step(optimizer)
    finally:
        handle.remove()
    torch.testing.assert_close(seen, [expected])
