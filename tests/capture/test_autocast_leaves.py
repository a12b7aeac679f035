"""The autocast route takes only what torch would have added to a `.grad`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import accumkernels as ak

RELEASES = ["microbatch", "backward"]
ROUTES = ["auto", True]


def net() -> nn.Module:
    """The same two layers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """A forward under autocast."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().pow(2).mean()


def on_the_route(release: str, route: str | bool) -> tuple[nn.Module, ak.FusedAccumulator]:
    """A model that has run twice, so that its parameters take the route."""
    model = net()
    acc = ak.FusedAccumulator(model, release=release, autocast_route=route)
    for _ in range(2):
        acc.backward(loss_of(model, 0))
    assert "route for 4 parameters" in repr(acc)
    acc.zero_()
    return model, acc


def stock(seed: int) -> list[Tensor]:
    """Gradients without an accumulator."""
    model = net()
    return list(torch.autograd.grad(loss_of(model, seed), list(model.parameters())))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("release", RELEASES)
def test_autograd_grad_gets_its_gradients(release, route):
    """A gradient penalty: nothing of the inner torch.autograd.grad is accumulated, and it finds all parameters."""
    model, acc = on_the_route(release, route)

    def penalised(model: nn.Module) -> Tensor:
        loss = loss_of(model, 1)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(grad.pow(2).sum() for grad in grads)

    twin = net()
    penalised(twin).backward()
    acc.backward(penalised(model))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


class Implicit(torch.autograd.Function):
    """Identity whose backward differentiates another loss with respect to parameters, as implicit layers do."""

    @staticmethod
    def forward(ctx, x, model, found):
        ctx.model, ctx.found = model, found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.found += torch.autograd.grad(loss_of(ctx.model, 2), list(ctx.model.parameters()))
        return grad, None, None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("release", RELEASES)
def test_autograd_grad_inside_backward(release, route):
    """It finds what it asked for, and only the outer backward is accumulated."""
    model, acc = on_the_route(release, route)
    found: list[Tensor] = []
    acc.backward(Implicit.apply(loss_of(model, 1), model, found))
    for actual, expected in zip(found, stock(2), strict=True):
        assert torch.equal(actual, expected)
    for p, expected in zip(model.parameters(), stock(1), strict=True):
        assert torch.equal(acc.main_grad(p), expected)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("release", RELEASES)
def test_inputs_leave_other_parameters_alone(release, route, bare):
    """Only what `inputs` lists gets a gradient."""
    model, acc = on_the_route(release, route)
    wanted = model[0].weight
    if bare:
        loss_of(model, 1).backward(inputs=[wanted])
        acc.accumulate()
    else:
        acc.backward(loss_of(model, 1), inputs=[wanted])
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.weight"]
    assert torch.equal(wanted.grad, stock(1)[0])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("release", RELEASES)
def test_a_graph_that_outlives_remove(release, route):
    """What was recorded before remove() gives its gradients to `.grad`."""
    model, acc = on_the_route(release, route)
    loss = loss_of(model, 1)
    acc.remove()
    loss.backward()
    for p, expected in zip(model.parameters(), stock(1), strict=True):
        assert torch.equal(p.grad, expected)


@pytest.mark.parametrize("what", ["jvp", "jacrev", "vmap", "trace", "export"])
@pytest.mark.parametrize("release", RELEASES)
def test_transforms_and_traces_run_the_model_itself(release, what):
    """torch.func and torch.jit.trace take no function of ours, and get what they get without an accumulator."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if what == "jvp":
                return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
            if what == "jacrev":
                return torch.func.jacrev(model)(x)
            if what == "vmap":
                return torch.vmap(model)(x)
            if what == "trace":
                return torch.jit.trace(model, x, check_trace=False)(x)
            return torch.export.export(model, (x,)).module()(x)

    model, _ = on_the_route(release, True)
    assert torch.equal(run(model), run(net()))


def test_a_parameter_that_is_not_dense():
    """Every second column of a larger tensor: its shadow is dense, and has the same values after each step."""
    found = []
    for route in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        model[0].weight = nn.Parameter(torch.randn(6, 8)[:, ::2])
        acc = ak.FusedAccumulator(model, autocast_route=route)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.full((2, 4), step / 3 - 1)).float().square().mean()
            acc.backward(loss)
            if step % 2:
                acc.step(optimizer)
        assert ("autocast route for 4 parameters" in repr(acc)) == route
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
