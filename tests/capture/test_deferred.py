"""`fuse_weight_gradients="deferred"`: short products of several micro-batches are multiplied together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import accumkernels as ak
from accumkernels.capture import choice
from tests.support.models import InPlace, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-6  # of sums in fp32; those of bf16 operands are sums of exact products
WIDTH = 64


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Tests' weights are too small to be fused."""
    monkeypatch.setattr(choice, "_SMALLEST_FUSED", WIDTH)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two products whose input requires a gradient, behind one whose input does not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    ).to(dtype)


def loss_of(model: nn.Module, seed: int, tokens: int = 4) -> Tensor:
    """A scalar."""
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model(x.to(model[0].weight.dtype)).square().mean()


def sums(acc: ak.FusedAccumulator, model: nn.Module) -> list[Tensor]:
    """What was accumulated."""
    return [acc.main_grad(p).clone() for p in model.parameters()]


class Products:
    """Counts the products that are added."""

    def __init__(self, monkeypatch):
        from accumkernels.capture import graph

        self.tokens: list[int] = []
        add = graph.add_product
        monkeypatch.setattr(graph, "add_product", lambda way, view, left, *rest: self._add(add, way, view, left, *rest))

    def _add(self, add, way, view, left, *rest):
        self.tokens.append(left.shape[0])
        add(way, view, left, *rest)


@pytest.mark.parametrize("tokens", [4, 20, 32, 33, 64])
def test_tokens_that_are_multiplied_together(monkeypatch, tokens):
    """Up to 32 tokens are kept until there are 64; more are multiplied at once."""
    model, found = net(), Products(monkeypatch)
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred", bucket_bytes=2**30)
    monkeypatch.setattr("accumkernels.capture.graph._KEPT_PART", 0.01)  # memory is no limit
    micro_batches = 20
    for seed in range(micro_batches):
        acc.backward(loss_of(model, seed, tokens))
    at_once = tokens * -(-64 // tokens) if tokens <= 32 else tokens
    assert set(found.tokens) == {at_once}
    acc.finalize()
    assert sum(found.tokens) == 2 * micro_batches * tokens


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 1, 3, 3, 0.5)], ids=str)
@pytest.mark.parametrize("read", ["finalize", "main_grad", "state_dict", "found_inf", "step"])
def test_every_reader_finds_whole_sums(read, weights):
    """Sums are those of float64, whoever reads them first, and whether weights are alike."""
    model = net()
    twin = copy.deepcopy(model).double()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for seed, weight in enumerate(weights):
        acc.backward(loss_of(model, seed), weight=weight)
        (loss_of(twin, seed) * weight).backward()
    expected = [p.grad for p in twin.parameters()]
    if read == "state_dict":
        found = [acc.state_dict()["sums"][name] for name, _ in model.named_parameters()]
    elif read == "found_inf":
        assert acc.found_inf == 0
        found = sums(acc, model)
    elif read == "main_grad":
        found = sums(acc, model)
    elif read == "finalize":
        acc.finalize()
        found = [p.grad * sum(weights) for p in model.parameters()]
    else:
        before = [p.detach().clone() for p in model.parameters()]
        acc.step(optimizer)
        found = [(old - p.detach()) * sum(weights) for old, p in zip(before, model.parameters(), strict=True)]
        assert relative_error(found, expected) < 1e-4  # a difference of parameters
        return
    assert relative_error(found, expected) < TOLERANCE


def test_windows_follow_each_other():
    """Nothing of a window that was dropped reaches the next."""
    model = net()
    twin = copy.deepcopy(model).double()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    acc.backward(loss_of(model, 7))
    acc.zero_()
    acc.backward(loss_of(model, 1))
    loss_of(twin, 1).backward()
    assert relative_error(sums(acc, model), [p.grad for p in twin.parameters()]) < TOLERANCE


def test_an_overflow_is_found():
    """It shows when the window ends at the latest."""
    model = net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    acc.backward(loss_of(model, 0) * 1e38)
    acc.backward(loss_of(model, 1) * 1e38)
    acc.backward(loss_of(model, 1) * torch.inf)
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert acc.step_was_skipped


def test_operands_changed_in_place():
    """An activation that is written to before it was multiplied is an error that names the parameter."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            self.hidden = torch.tanh(self.inner(x))
            return self.outer(self.hidden)

    model = Keeps()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    acc.backward(model(torch.randn(4, WIDTH)).square().mean())
    with torch.no_grad():
        model.hidden.zero_()
    with pytest.raises(RuntimeError, match="operand of the gradient of 'outer.weight' was changed in place"):
        acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    acc.zero_()
    acc.backward(model(torch.randn(4, WIDTH)).square().mean())
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_memory_of_operands():
    """Operands take at most a sixteenth of the sums."""
    model = net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    limit = sum(buffer.nbytes for buffer in acc.flat_buffers) // 16
    graph = acc.engine.runner.captures.graph
    for seed in range(8):
        acc.backward(loss_of(model, seed, tokens=2))
        assert graph._kept.nbytes <= limit


def test_the_last_micro_batch_leaves_nothing(monkeypatch):
    """A run that stops and goes on from a checkpoint inside a window ends with the same bits."""
    model = net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    for seed in range(3):
        acc.backward(loss_of(model, seed))
    state = acc.state_dict()
    other = copy.deepcopy(model)
    resumed = ak.FusedAccumulator(other, fuse_weight_gradients="deferred")
    resumed.load_state_dict(state)
    for seed in range(3, 5):
        acc.backward(loss_of(model, seed))
        resumed.backward(loss_of(other, seed))
    assert all(map(torch.equal, sums(acc, model), sums(resumed, other)))


def test_wrong_value():
    """It names the option, what it may be, and the value."""
    with pytest.raises(ValueError, match="fuse_weight_gradients must be 'auto', 'deferred', True or False, got 'late'"):
        ak.FusedAccumulator(net(), fuse_weight_gradients="late")


class Beside(nn.Module):
    """A product whose gradient another function gets, too, and later."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        """The function comes before the product, and its backward after the product's."""
        first, _, second, tanh, last = self.body
        h = first(x)
        return last(tanh(InPlace.apply(h) + second(tanh(h))))


def test_a_gradient_that_another_function_writes_to():
    """What is kept is what the product's backward would have seen, as in stock."""
    model = Beside()
    truth, total = copy.deepcopy(model), 0.0
    acc = ak.FusedAccumulator(model, fuse_weight_gradients="deferred")
    for seed in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        acc.backward(model(x).square().mean())
        total = total + truth(x).square().mean()
    total.backward()
    acc.finalize()
    assert relative_error([p.grad * 3 for p in model.parameters()], [p.grad for p in truth.parameters()]) < TOLERANCE
