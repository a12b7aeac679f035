"""Gradients of what autocast has cast: stock's bits, without being widened first."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.demo.gpt import GPT
from tests.support.backends import dtype_id, same_bits
from tests.support.models import elements
from tests.support.stock import stock_sums

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = [torch.bfloat16, torch.float16]
HALF = "taken in 16 bits"
RELEASES = [{}, {"release": "backward", "bucket_bytes": 200}]


class Net(nn.Module):
    """Convolutions in channels_last, a norm that autocast leaves alone, a linear head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, groups=2)
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x.to(memory_format=torch.channels_last))))
        return self.head(self.body(x).mean((2, 3)))


class TiedLM(nn.Module):
    """Embedding and head share one parameter: one reads it as fp32, the other through a cast."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embedding(ids))))


class Twice(nn.Module):
    """A module called twice, and a weight shared by two modules: their gradients meet in 16 bit."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.other = nn.Linear(16, 16)
        self.other.weight = self.inner.weight
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.other(torch.tanh(self.inner(torch.tanh(self.inner(x))))))


class Checkpointed(nn.Module):
    """A block that is run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
        self.out = nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return self.out(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.reentrant))


class Functional(nn.Module):
    """A weight that its own module casts, and another reads as it is."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.inner(x)) + self.inner.weight.sum() + F.linear(x, self.inner.weight).sum()


class Island(nn.Module):
    """Autocast inside forward, switched off for one module."""

    def __init__(self, dtype):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.island = nn.Linear(16, 16)
        self.out = nn.Linear(16, 4)
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype):
            x = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                x = self.island(x.float())
            return self.out(x)


class OwnCasts(nn.Module):
    """Copies in 16 bit that forward makes itself."""

    def __init__(self, dtype):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.ones(4))
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.to(self.dtype) @ self.weight.to(self.dtype).t() * self.gain.to(self.dtype)


def not_dense():
    """Every second column of a larger tensor."""
    model = nn.Sequential(nn.Linear(16, 6), nn.Linear(6, 3))
    model[0].weight = nn.Parameter(torch.randn(6, 32)[:, ::2])
    return model


def random_ids(step):
    """Token ids."""
    return (torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(step)),)


def vectors(step):
    """A batch of vectors."""
    return (torch.randn(3, 16, generator=torch.Generator().manual_seed(step)),)


def images(step):
    """A batch of images."""
    return (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step)),)


def bytes_and_targets(step):
    """Input of the demo model."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (2, 9), generator=generator), torch.randint(256, (2, 9), generator=generator)


MODELS = {  # model, inputs, names of parameters whose gradients are taken in 16 bits; "-": all but these
    "gpt": (lambda _: GPT(), bytes_and_targets, "-embedding norm position"),
    "conv": (lambda _: Net(), images, "-norm"),
    "tied": (lambda _: TiedLM(), random_ids, "body"),
    "twice": (lambda _: Twice(), vectors, "-"),
    "checkpoint": (lambda _: Checkpointed(False), vectors, "-inner.1"),
    "reentrant checkpoint": (lambda _: Checkpointed(True), vectors, "out"),
    "functional": (lambda _: Functional(), vectors, "inner.bias out"),
    "island": (Island, vectors, "-island"),
    "own casts": (OwnCasts, vectors, "-"),
    "lstm": (lambda _: nn.LSTM(16, 8), vectors, "-"),
    "weight_norm": (lambda _: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)), vectors, "bias"),
    "not dense": (lambda _: not_dense(), vectors, "-"),
}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype_id(dtype)}")
    for name in MODELS
    for dtype in HALVES
    if (name, dtype) != ("lstm", torch.float16)  # which the CPU has not
]


def forward(model, inputs=vectors, step=0, dtype=torch.bfloat16):
    """The loss under autocast."""
    with torch.autocast("cpu", dtype=dtype):
        output = model(*inputs(step))
    output = output[0] if isinstance(output, tuple) else output
    return output.float().square().mean() * 3


def expected_elements(model, names):
    """How many elements the parameters have whose names contain one of these, or none of them."""
    parts, wanted = names.removeprefix("-").split(), names[0] != "-"
    return sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in parts) == wanted)


@pytest.mark.parametrize("options", RELEASES, ids=str)
@pytest.mark.parametrize("form", ["backward", "of the loop"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_same_bits_as_stock(name, dtype, form, options):
    """The sums of two windows, with a step between, and a GradScaler; a loop's own backward leaves fp32 `.grad`s."""
    make, inputs, names = MODELS[name]
    torch.manual_seed(0)
    model = make(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    acc = ak.FusedAccumulator(model, scaler=scaler, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weights = [1.0, 2.0, 3.0] if form == "backward" else [1.0] * 3
    for window in range(2):
        twin = copy.deepcopy(model)
        steps = range(10 * window, 10 * window + 3)
        expected = stock_sums(twin.parameters(), (forward(twin, inputs, s, dtype) for s in steps), weights, 2.0**6)
        for step, weight in zip(steps, weights, strict=True):
            loss = forward(model, inputs, step, dtype)
            if form == "backward":
                acc.backward(loss, weight=weight)
                assert elements(acc)[HALF] == expected_elements(model, names)
            else:
                scaler.scale(loss).backward()
                acc.accumulate()
        in_bits = name == "reentrant checkpoint" and options  # buckets add what comes from two backwards one by one
        for p, e in zip(model.parameters(), expected, strict=True):
            assert (
                torch.allclose(acc.main_grad(p), e, rtol=1e-4, atol=1e-5) if in_bits else same_bits(acc.main_grad(p), e)
            )
        acc.step(optimizer)


@pytest.mark.parametrize("options", RELEASES, ids=str)
def test_nothing_is_widened(options):
    """No gradient of a weight is ever there in fp32, unless a hook waits for it."""

    class Widened(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.dtype == torch.float32 and out.shape == (16, 16):
                self.count += 1
            return out

    torch.manual_seed(0)
    model = Twice()
    acc = ak.FusedAccumulator(model, **options)
    seen = []
    for hooked in (False, True):
        loss = forward(model)
        if hooked:
            model.inner.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
        with Widened() as widened:
            acc.backward(loss)
        assert widened.count == hooked
    assert seen == [torch.float32]


def test_two_backwards_before_one_accumulate():
    """The loop's own: each is widened before they are added; an `acc.backward` then adds to the `.grad`s of one."""
    torch.manual_seed(0)
    model = Twice()
    twin = copy.deepcopy(model)
    acc = ak.FusedAccumulator(model)
    for step in range(2):
        forward(model, step=step).backward()
        forward(twin, step=step).backward()
    acc.accumulate()
    assert all(same_bits(acc.main_grad(p), q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    acc.zero_()
    twin.zero_grad()
    forward(model).backward()
    acc.backward(forward(model, step=1))
    assert elements(acc)[HALF] == 0
    for step in range(2):
        forward(twin, step=step).backward()
    assert all(same_bits(acc.main_grad(p), q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_one_autocast_context_for_two_backwards():
    """Both graphs have the copy that autocast keeps, and its node, which is run twice."""
    torch.manual_seed(0)
    model = Twice()
    twin = copy.deepcopy(model)
    acc = ak.FusedAccumulator(model)
    for net, backward in ((model, acc.backward), (twin, torch.Tensor.backward)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(2):
                backward(net(*vectors(step)).float().square().mean())
    assert elements(acc)[HALF] == sum(p.numel() for p in model.parameters())
    assert all(same_bits(acc.main_grad(p), q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("options", RELEASES, ids=str)
def test_discard_drops_what_was_taken(options):
    """An exception in backward drops the micro-batch, and a discarded one of the loop's own was never there."""
    torch.manual_seed(0)
    model = Twice()
    acc = ak.FusedAccumulator(model, **options)
    loss = forward(model, step=1)

    def fail(grad):
        raise torch.OutOfMemoryError("planted")

    handle = model.inner.bias.register_hook(fail)  # after the gradients of `out` have come
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        acc.backward(loss)
    handle.remove()
    if options:
        acc.zero_()  # buckets had been added
    twin = copy.deepcopy(model)
    acc.backward(forward(model))
    expected = stock_sums(twin.parameters(), [forward(twin)])
    assert all(same_bits(acc.main_grad(p), e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_sparse_gradient_in_16_bits_is_left_to_autograd():
    """Which cannot widen it, and says so as in a stock loop."""
    embedding = nn.Embedding(9, 4)
    acc = ak.FusedAccumulator(embedding)
    messages = []
    for backward in (torch.Tensor.backward, acc.backward):
        rows = nn.functional.embedding(torch.tensor([1, 2]), embedding.weight.bfloat16(), sparse=True)
        with pytest.raises(RuntimeError) as error:
            backward(rows.float().sum())
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_overflow_in_16_bits_is_found():
    """An infinity in a 16-bit gradient drops the micro-batch and names its parameters."""
    torch.manual_seed(0)
    model = Twice()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    acc = ak.FusedAccumulator(model, scaler=scaler, overflow="microbatch")
    acc.backward(forward(model, dtype=torch.float16))
    acc.backward(forward(model, dtype=torch.float16) * 1e6)
    assert acc.found_inf.item() == 1
    assert acc.weight.item() == 1
    assert "inner.weight" in acc.overflow_report()
    acc.step(torch.optim.SGD(model.parameters(), lr=0.05))
    assert scaler.get_scale() == 1.0


def test_unfrozen_parameters_join():
    """A layer unfrozen later is taken from the window on in which it has a buffer."""
    torch.manual_seed(0)
    model = Twice()
    model.out.requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    for unfrozen in (False, True):
        model.out.requires_grad_(unfrozen)
        for step in range(2):
            twin = copy.deepcopy(model)
            acc.backward(forward(model, step=step))
        params = [p for p in model.parameters() if p.requires_grad]
        assert elements(acc)[HALF] == sum(p.numel() for p in params)
        twin_params = [p for p in twin.parameters() if p.requires_grad]
        expected = stock_sums(twin_params, (forward(twin, step=step) for step in range(2)))
        assert all(same_bits(acc.main_grad(p), e) for p, e in zip(params, expected, strict=True))
        acc.zero_()


@pytest.mark.parametrize("from_the_first", [True, False])
def test_a_window_whose_noise_is_measured_has_whole_gradients(from_the_first):
    """A gradient in two parts, one of them in 16 bits, would leave the window out."""
    model = TiedLM()
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=1, noise_scale=from_the_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in range(3):
        for step in range(4):
            acc.backward(forward(model, random_ids, 4 * window + step))
        acc.step(optimizer)
        if window == 0:
            assert acc.noise_scale().windows == from_the_first
    # What is asked for between windows is measured from the one that is open then.
    assert acc.noise_scale().windows == (3 if from_the_first else 2)


class Implicit(torch.autograd.Function):
    """Identity whose backward differentiates another loss with respect to parameters, as implicit layers do."""

    @staticmethod
    def forward(ctx, x, model, found):
        ctx.model, ctx.found = model, found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.found += torch.autograd.grad(forward(ctx.model, step=2), list(ctx.model.parameters()))
        return grad, None, None


@pytest.mark.parametrize("options", RELEASES, ids=str)
def test_autograd_grad_inside_backward(options):
    """It finds what it asked for, and only the outer backward is accumulated."""
    torch.manual_seed(0)
    model = Twice()
    twin = copy.deepcopy(model)
    acc = ak.FusedAccumulator(model, **options)
    found = []
    acc.backward(Implicit.apply(forward(model, step=1), model, found))
    for step, ours in ((2, found), (1, map(acc.main_grad, model.parameters()))):
        stock = torch.autograd.grad(forward(twin, step=step), list(twin.parameters()))
        assert all(map(same_bits, ours, stock))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("options", RELEASES, ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.starts)])
def test_compiled_models(backend, whole, options):
    """Compiled autocast, to the last bit."""
    torch._dynamo.reset()
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = GPT(vocabulary=40, width=16, depth=2, heads=2, context=8)
        for part in [model] if whole else model.blocks:
            part.compile(backend=backend, fullgraph=True)
        acc = ak.FusedAccumulator(model, **options) if ours else None
        ids = torch.randint(40, (3, 2, 2, 8), generator=torch.Generator().manual_seed(0))
        losses = (forward(model, functools.partial(lambda pair, _: tuple(pair), pair)) for pair in ids)
        if ours:
            for loss in losses:
                acc.backward(loss)
            found.append([acc.main_grad(p) for p in model.parameters()])
        else:
            found.append(stock_sums(model.parameters(), losses))
    assert all(map(same_bits, *found))
    torch._dynamo.reset()
