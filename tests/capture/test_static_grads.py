"""Gradients in memory that the next backward writes again, as graphed callables return them: right in every form."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, relative_error


class _StaticLinear(torch.autograd.Function):
    """x @ weight.T, whose gradient of the weight comes in the same memory each time.

    A replay writes the memory behind autograd's back, so that version counters do not move (`counted=False`). What
    comes back is `detach()`ed, as in `torch.cuda.make_graphed_callables`.
    """

    @staticmethod
    def forward(ctx, x, weight, memory, counted):
        ctx.save_for_backward(x, weight)
        ctx.memory, ctx.counted = memory, counted
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        memory = ctx.memory if ctx.counted else ctx.memory.data
        torch.mm(grad.t(), x, out=memory)
        return grad @ weight, ctx.memory.detach(), None, None


class StaticLinear(nn.Linear):
    """Graphed for two shapes of inputs, say, which have memory of their own each (`graphs=2`)."""

    def __init__(self, inputs, outputs, counted=False, graphs=1):
        super().__init__(inputs, outputs, bias=False)
        self.counted = counted
        self.memory = [torch.empty(outputs, inputs) for _ in range(graphs)]
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return _StaticLinear.apply(x, self.weight, self.memory[self.calls % len(self.memory)], self.counted)


def graphed(**kwargs):
    """A model of which one layer is not graphed."""
    torch.manual_seed(0)
    return nn.Sequential(
        StaticLinear(5, 9, **kwargs), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), StaticLinear(7, 3, **kwargs)
    )


WEIGHTS = (1.0, 2.0, 3.0, 4.0)
PARTS = [batch(4, seed=seed) for seed in range(4)]


def truth(model):
    """The window's gradient in float64, by plain layers."""
    first, last = nn.Linear(5, 9, bias=False), nn.Linear(7, 3, bias=False)
    plain = nn.Sequential(first, nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), last)
    plain.load_state_dict(model.state_dict())
    plain.double()
    total = sum(w * mse_loss(plain(x.double()), y.double()) for w, (x, y) in zip(WEIGHTS, PARTS, strict=True))
    return torch.autograd.grad(total / sum(WEIGHTS), list(plain.parameters()))


def loss_of(model, index):
    """The loss of one of the four parts, times its weight."""
    x, y = PARTS[index]
    return WEIGHTS[index] * mse_loss(model(x), y)


def end(acc, model, **kwargs):
    """The error of the window's gradient."""
    expected = truth(model)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1), **kwargs)
    error = relative_error([p.grad for p in model.parameters()], expected)
    acc.zero_()
    return error


def test_stock_is_wrong():
    """What these layers do is the fault that PyTorch has: otherwise nothing here would show anything."""
    model = graphed()
    expected = truth(model)
    for w, (x, y) in zip(WEIGHTS, PARTS, strict=True):
        (w / sum(WEIGHTS) * mse_loss(model(x), y)).backward()
    assert relative_error([p.grad for p in model.parameters()], expected) > 0.1


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("graphs", [1, 2])
@pytest.mark.parametrize("release", ["auto", "microbatch", "backward"])
@pytest.mark.parametrize("bucket_bytes", [None, 16])
class TestForms:
    """Each form of a loop, in two windows: the second has no hooks but those of graphed weights."""

    @pytest.fixture
    def model(self, counted, graphs):
        return graphed(counted=counted, graphs=graphs)

    @pytest.fixture
    def acc(self, model, release, bucket_bytes):
        with ak.FusedAccumulator(model, release=release, bucket_bytes=bucket_bytes) as acc:
            yield acc

    def test_backward(self, model, acc):
        for _ in range(2):
            for w, (x, y) in zip(WEIGHTS, PARTS, strict=True):
                acc.backward(mse_loss(model(x), y), weight=w)
            assert end(acc, model) < 1e-6

    def test_backward_of_the_loop(self, model, acc):
        for _ in range(2):
            for index in range(4):
                loss_of(model, index).backward()
                acc.accumulate()
            assert end(acc, model, divisor=sum(WEIGHTS)) < 1e-6

    def test_two_backwards_before_one_accumulate(self, model, acc):
        for _ in range(2):
            for first in (0, 2):
                loss_of(model, first).backward()
                loss_of(model, first + 1).backward()
                acc.accumulate()
            assert end(acc, model, divisor=sum(WEIGHTS)) < 1e-6

    def test_backward_of_the_loop_before_ours(self, model, acc):
        for _ in range(2):
            for first in (0, 2):
                loss_of(model, first).backward()
                acc.backward(loss_of(model, first + 1))
            assert end(acc, model, divisor=sum(WEIGHTS)) < 1e-6

    def test_coupled(self, model, acc):
        """Its second pass runs a backward for each chunk."""
        target = torch.cat([y for _, y in PARTS])
        factors = torch.tensor(WEIGHTS).repeat_interleave(4)[:, None]

        def loss_fn(out):
            return (factors * (out - target).square()).sum() / (3 * 4 * sum(WEIGHTS))

        for _ in range(2):
            acc.backward_coupled([x for x, _ in PARTS], model, loss_fn)
            assert end(acc, model) < 1e-6


def watched(model):
    """The names of parameters with a hook."""
    return {name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks}


def test_ordinary_parameters_run_no_hook_after_the_first_backward():
    """Only those whose gradients came in somebody else's memory do; most never had a hook; remove() takes all off."""
    model = nn.Sequential(graphed(), nn.Linear(3, 3), nn.Linear(3, 3))
    acc = ak.FusedAccumulator(model, release="microbatch")
    assert watched(model) == {"0.0.weight", "2.bias"}
    never = [p for p in model[1:].parameters() if p is not model[2].bias] + list(model[0][2].parameters())
    x, y = PARTS[0]
    for _ in range(3):
        mse_loss(model(x), y).backward()
        assert watched(model) == {"0.0.weight", "0.4.weight"}
        assert not any(p._post_accumulate_grad_hooks is not None for p in never)
    acc.remove()
    assert watched(model) == set()


@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_a_backward_that_raises_is_not_the_first(release):
    """The next one is looked at."""
    model = graphed()
    acc = ak.FusedAccumulator(model, release=release)
    with pytest.raises(RuntimeError, match="out of memory"):
        handle = model[0].weight.register_hook(lambda grad: exec('raise RuntimeError("out of memory")'))
        loss_of(model, 0).backward()
    handle.remove()
    acc.zero_()
    for first in (0, 2):
        loss_of(model, first).backward()
        loss_of(model, first + 1).backward()
        acc.accumulate()
    assert end(acc, model, divisor=sum(WEIGHTS)) < 1e-6


def test_each_hook_of_buckets_has_another_at_first():
    """It is called before, whatever the order of registration, and leaves in the first backward."""
    model = graphed()
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    acc = ak.FusedAccumulator(model, release="backward")
    memory = {model[0].memory[0].data_ptr(), model[4].memory[0].data_ptr()}
    counts = [[len(p._post_accumulate_grad_hooks) for p in model.parameters()]]
    for index in range(2):
        loss_of(model, index).backward()
        counts.append([len(p._post_accumulate_grad_hooks) for p in model.parameters()])
    assert counts == [[3] * 4, [3, 2, 2, 3], [3, 2, 2, 3]]
    assert len(seen) == 8 and not memory & set(seen)
    acc.remove()
    assert [len(p._post_accumulate_grad_hooks) for p in model.parameters()] == [1] * 4


class _Views(torch.autograd.Function):
    """A sum whose gradients are views of one new tensor, as those of cuDNN's RNNs are."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.sizes = [w.numel() for w in weights]
        return sum((w.sum() for w in weights), x.sum())

    @staticmethod
    def backward(ctx, grad):
        return None, *torch.ones(sum(ctx.sizes)).mul_(grad).split(ctx.sizes)


def test_gradients_that_share_new_memory_are_copied_once():
    """The second backward finds that nobody kept the memory of the first, and leaves the gradients where they are."""

    def copies():
        return sum(w.grad.untyped_storage().nbytes() == w.nbytes for w in weights)

    weights = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    acc = ak.FusedAccumulator(weights, release="microbatch")
    optimizer = torch.optim.SGD(acc.parameters(), lr=1.0)
    for expected in (2, 0, 0):  # the last of the three is the only one left in the memory
        _Views.apply(torch.zeros(1), *weights).backward()
        assert copies() == expected
        acc.accumulate()
    assert not any(w._post_accumulate_grad_hooks for w in weights)
    acc.step(optimizer)
    assert all(torch.equal(w, torch.full((4,), -1.0)) for w in weights)


def test_unfrozen_layers_are_watched():
    """From the micro-batch after the one in which they join the window."""
    model = graphed()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model, release="microbatch")
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    loss_of(model, 0).backward()
    acc.accumulate()
    acc.step(optimizer)
    model[0].requires_grad_(True)
    loss_of(model, 0).backward()
    acc.accumulate()
    acc.step(optimizer)
    for first in (0, 2):
        loss_of(model, first).backward()
        loss_of(model, first + 1).backward()
        acc.accumulate()
    assert end(acc, model, divisor=sum(WEIGHTS)) < 1e-6
