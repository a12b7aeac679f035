"""What find_batch_size and memory_report leave behind: nothing, bit for bit."""

from __future__ import annotations

import copy
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import Tensor, nn

import accumkernels as ak
from accumkernels import snapshots
from accumkernels.snapshots import Snapshot
from tests.support.frozen import KINDS, Adapted, trainable
from tests.support.models import batch

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """With all that training changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.inner.weight
        self.register_buffer("average", torch.randn(4), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))
        self.plain = torch.randn(5)
        self.history: list[Tensor] = []
        self.counts = {"forward": 0}
        self.calls = 0
        self.generator = torch.Generator().manual_seed(7)
        self.generators = [random.Random(7), numpy.random.RandomState(7), numpy.random.default_rng(7)]
        self.array = numpy.zeros(3)
        self.frozen.eval()

    def forward(self, x):
        """Change everything."""
        self.calls += 1
        self.counts["forward"] += 1
        x = self.norm(self.inner(x) + self.tied(x)) * torch.rand(1, generator=self.generator)
        random.random(), numpy.random.rand()
        for generator in self.generators:
            generator.random()
        self.array += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.plain.add_(1)
            self.frozen.weight.add_(1)
        self.replaced = self.replaced + 1
        self.history.append(x)
        self.cache = x
        if self.calls % 2:
            self.train()
        return self.head(self.frozen(self.dropout(x)))


def bits(tensor):
    """Content, exactly; nan equal to itself."""
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def state(model, optimizer):
    """All that must not change, in comparable form."""
    found = {
        "tensors": {name: (bits(t), id(t)) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "pointers": {name: p.data_ptr() for name, p in model.named_parameters()},
        "grads": {
            name: p.grad if p.grad is None else (bits(p.grad), id(p.grad)) for name, p in model.named_parameters()
        },
        "requires": [p.requires_grad for p in model.parameters()],
        "plain": (bits(model.plain), len(model.history), dict(model.counts), model.calls),
        "attributes": sorted(model.__dict__),
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()],
        "tensor hooks": [
            len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
        ],
        "names": [sorted(module._non_persistent_buffers_set) for module in model.modules()],
        "optimizer": [
            [{k: bits(v) if isinstance(v, Tensor) else v for k, v in s.items()} for s in optimizer.state.values()],
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        ],
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": [v.tobytes() if isinstance(v, numpy.ndarray) else v for v in numpy.random.get_state()],
        "generator": bits(model.generator.get_state()),
        "generators": (
            model.generators[0].getstate(),
            model.generators[1].get_state()[1].tobytes(),
            model.generators[1].get_state()[2],
            model.generators[2].bit_generator.state,
        ),
        "array": model.array.tobytes(),
        "grad mode": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }
    return copy.deepcopy(found)


def build(stepped=True):
    """A model and an optimizer in the middle of training, with `.grad`s and hooks, a negative zero and a nan."""
    model = Model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if stepped:
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        model.history.clear()
        del model.cache
    with torch.no_grad():
        model.average[0], model.average[1] = -0.0, float("nan")
    model.register_forward_hook(lambda *args: None)
    model.head.weight.register_hook(lambda grad: grad)
    model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
    return model, optimizer


def fit(model, **kwargs):
    """Try 2, 4 and 8."""
    shapes = () if "make_batch" in kwargs else ((3,), (3,))
    return ak.find_batch_size(model, "cpu", *shapes, dataset_size=8, num_iterations=2, **kwargs)


def out_of_memory(output, target):
    """Beyond 4 samples."""
    if len(output) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return (output - target).square().mean()


@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("stepped", [True, False])
def test_after_success(stepped, accumulate):
    """Parameters, buffers, grads, hooks, attributes, optimizer, generators and modes; after out of memory as well."""
    model, optimizer = build(stepped)
    before = state(model, optimizer)
    assert fit(model, loss_fn=out_of_memory, accumulate=accumulate) == 4
    assert state(model, optimizer) == before
    ak.FusedAccumulator(model).remove()  # nothing holds the parameters


def test_an_optimizer_that_exists():
    """`optimizer_fn` may return the user's own, whose state comes back."""
    model, optimizer = build()
    before = state(model, optimizer)
    assert fit(model, optimizer_fn=lambda params: optimizer) == 8
    assert state(model, optimizer) == before


class Failure(Exception):
    """A bug of the user's."""


@pytest.mark.parametrize("place", ["forward", "backward", "step", "make_batch"])
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, RuntimeError, SystemExit])
def test_after_an_error(place, kind):
    """Every other exception comes out as the same object, and everything is as it was."""
    model, optimizer = build()
    error = kind("shapes do not match")
    seen = []

    def fail():
        seen.append(place)
        if len(seen) == 5:
            raise error

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if place == "step":
                fail()

    def make_batch(n):
        if place == "make_batch":
            fail()
        return torch.randn(n, 3), torch.randn(n, 3)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if place == "forward":
                fail()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if place == "backward":
                fail()
            return grad

    before = state(model, optimizer)
    with pytest.raises(kind) as caught:
        fit(
            model,
            make_batch=make_batch,
            optimizer_fn=lambda params: Optimizer(params, lr=0.1),
            loss_fn=lambda output, target: Fails.apply(output - target).square().mean(),
        )
    assert caught.value is error
    assert state(model, optimizer) == before


def test_after_a_real_interrupt():
    """A SIGINT in the middle of a trial."""
    model, optimizer = build()
    before = state(model, optimizer)
    calls = []

    def loss_fn(output, target):
        calls.append(len(output))
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return (output - target).square().mean()

    with pytest.raises(KeyboardInterrupt):
        fit(model, loss_fn=loss_fn)
    assert len(calls) == 6
    assert state(model, optimizer) == before


def test_an_interrupt_while_restoring(monkeypatch):
    """A Ctrl-C that comes while things are put back waits until they are, and comes out then."""
    model, optimizer = build()
    before = state(model, optimizer)
    restore, handler = snapshots.RandomState.restore, signal.getsignal(signal.SIGINT)

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        restore(self)

    monkeypatch.setattr(snapshots.RandomState, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert state(model, optimizer) == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_no_grad_and_inference_mode():
    """Called under no_grad or inference_mode it trains all the same."""
    model, optimizer = build()
    before = state(model, optimizer)
    with torch.no_grad():
        assert fit(model) == 8
    with torch.inference_mode():
        assert fit(model) == 8
    assert state(model, optimizer) == before


def cut(model):
    """Parameters that show a part of their memory."""
    for p in model.parameters():
        p.data = p.data[:2]


@pytest.mark.parametrize("change", [nn.Module.double, cut])
def test_parameters_changed_in_place_come_back(change):
    """They have the dtype, the shape and the memory of before."""
    model = nn.Linear(3, 4)
    snapshot = Snapshot(model)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    change(model)
    snapshot.restore()
    for name, p in model.named_parameters():
        address, value = before[name]
        assert p.data_ptr() == address and p.dtype == torch.float32 and torch.equal(p, value)


def test_in_a_thread():
    """Where no signal can be held back, as none arrives there."""
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    snapshot = Snapshot(model)
    with torch.no_grad():
        model.weight.zero_()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(snapshot.restore).result()
    assert torch.equal(model.weight, before)


def test_a_model_elsewhere_comes_back():
    """Parameters whose memory is replaced in the trial get their own back (as when a model is moved to a GPU)."""
    model, optimizer = build()
    before = state(model, optimizer)

    def loss_fn(output, target):
        with torch.no_grad():
            for param in model.parameters():
                param.data = param.data.clone()
        return (output - target).square().mean()

    assert fit(model, loss_fn=loss_fn) == 8
    assert state(model, optimizer) == before


def test_what_a_loss_function_may_do():
    """Hooks that it adds, flags that it flips, and gradients from before that it overwrites."""
    model, optimizer = build()
    before = state(model, optimizer)
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    assert gradients

    def loss_fn(output, target):
        model.head.weight.register_hook(lambda grad: grad)
        model.head.bias.register_hook(lambda grad: grad)
        model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
        model.frozen.requires_grad_(True)
        for gradient in gradients:
            gradient.zero_()
        return (output - target).square().mean()

    assert fit(model, loss_fn=loss_fn) == 8
    assert state(model, optimizer) == before


class Criterion(nn.Module):
    """A loss with a parameter, and a buffer that each call moves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.center = nn.Buffer(torch.zeros(3))

    def forward(self, output, target):
        """Change both."""
        self.center += 1
        self.center = self.center + 1
        return (output @ self.weight - target - self.center.detach()).square().mean()


def seen(module):
    """Values and gradients, exactly."""
    tensors = [*module.parameters(), *module.buffers()]
    return [(bits(t), id(t), None if t.grad is None else (bits(t.grad), id(t.grad))) for t in tensors]


def reported(model, criterion, fake=False):
    """A report of a model and a loss function."""
    ak.memory_report(model, torch.optim.SGD(model.parameters()), batch, 4, loss_fn=criterion, fake=fake)


WAYS = [
    lambda model, criterion: ak.find_batch_size(model, "cpu", (5,), (3,), 4, loss_fn=criterion),
    reported,
    lambda model, criterion: reported(model, criterion, fake=True),
]


@pytest.mark.parametrize("way", WAYS, ids=["find_batch_size", "memory_report", "fake"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_loss_function_with_parameters(way, existing):
    """No gradient of a trial is left in them, where the loop's first step would add it; buffers are as before."""
    model, criterion = nn.Linear(5, 3), Criterion()
    if existing:
        criterion.weight.grad = torch.ones(3, 3)
    before = seen(criterion)
    way(model, criterion)
    assert seen(criterion) == before
    way(model, lambda output, target: (output @ criterion.weight - target).square().mean())
    assert seen(criterion) == before


class Slow(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        """Step the other one."""
        self.inner.step(closure)


def test_an_optimizer_inside_of_another():
    """Its state comes back, too."""
    model = nn.Linear(5, 3)
    inner = torch.optim.Adam(model.parameters())
    outer = Slow(inner)
    ak.memory_report(model, outer, batch, 4)
    assert not inner.state
    ak.find_batch_size(model, "cpu", (5,), (3,), 4, optimizer_fn=lambda params: outer)
    assert not inner.state


def test_a_module_that_is_no_child():
    """Kept in a list, out of the state dict."""
    model = nn.Sequential(nn.Linear(5, 3))
    hidden = nn.BatchNorm1d(3)
    model.hidden = [hidden]
    model.register_forward_hook(lambda module, inputs, output: hidden(output))
    before = seen(hidden)
    ak.find_batch_size(model, "cpu", (5,), (3,), 4, multiple_of=2)
    assert seen(hidden) == before


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("accumulate", [None, 2])
def test_memory_report_leaves_no_trace(fake, accumulate):
    """Measured or predicted."""
    model, optimizer = build()
    before = state(model, optimizer)
    report = ak.memory_report(
        model,
        optimizer,
        lambda n: (torch.randn(n, 3), torch.randn(n, 3)),
        4,
        loss_fn=nn.functional.mse_loss,
        accumulate=accumulate,
        fake=fake,
    )
    assert report.total > 0
    assert state(model, optimizer) == before


@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("accumulate", [None, 2])
def test_a_model_that_is_being_accumulated_is_refused(accumulate, release):
    """Its window would get the gradients of the trials, and `accumulate` would need the parameters; it stays intact."""
    model, optimizer = build()
    acc = ak.FusedAccumulator(model, release=release)
    before = state(model, optimizer)
    with pytest.raises(RuntimeError, match=r"find_batch_size: 'inner.weight' has a FusedAccumulator.*remove\(\)"):
        fit(model, accumulate=accumulate)
    with pytest.raises(RuntimeError, match=r"memory_report: 'inner.weight' has a FusedAccumulator.*remove\(\)"):
        ak.memory_report(model, optimizer, lambda n: (torch.ones(n, 3), torch.ones(n, 3)), 4, accumulate=accumulate)
    assert state(model, optimizer) == before
    assert acc.micro_batches == 0
    acc.remove()
    assert fit(model, accumulate=accumulate) == 8


@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_of_any_kind(kind, accumulate):
    """A model with one is tried and measured, and is afterwards as it was."""
    model = Adapted(kind)
    base, before = model.base, [bits(p) for p in trainable(model)]
    found = ak.find_batch_size(model, "cpu", (5,), (3,), 4, num_iterations=2, accumulate=accumulate)
    assert found == 4
    for fake in (False, True):
        ak.memory_report(model, torch.optim.SGD(trainable(model)), batch, 4, accumulate=accumulate, fake=fake)
    assert model.base is base
    assert base.grad is None
    assert [bits(p) for p in trainable(model)] == before


def test_without_parameters():
    """A forward without gradients: buffers of any size and small tensors come back, parameters are not copied."""
    model = nn.Linear(10, 10)
    model.register_buffer("codebook", torch.zeros(100, 100))
    model.counter, model.large, model.calls = torch.zeros(()), torch.zeros(100, 100), 0
    model.alias = [model.weight]
    snapshot = Snapshot(model, parameters=False)
    for tensor in (model.weight.data, model.codebook, model.counter, model.large):
        tensor.fill_(1)
    model.calls, model.seen = 1, []
    snapshot.restore()
    assert (model.codebook.sum(), model.counter, model.calls) == (0, 0, 0)
    assert not hasattr(model, "seen")
    assert (model.weight.sum(), model.large.sum()) == (1e2, 1e4)


def test_generators_without_a_state():
    """The system's entropy is left alone."""
    model = nn.Linear(1, 1)
    model.entropy = random.SystemRandom()
    Snapshot(model).restore()
    assert 0 <= model.entropy.random() < 1
