"""What one micro-batch adds: first touch, tied and idle parameters, backwards that fail or come twice."""

from __future__ import annotations

import copy
import operator
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.window import state
from tests.support.models import TwoHeads, batch, big_batch_grads, grads_of, mlp, relative_error

BACKENDS = ["native", "reference", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_touch_after_an_idle_window_leaves_no_stale_sum(backend):
    """After a window of rest a head starts its next from nothing, also when first touched by a second micro-batch."""
    torch.manual_seed(0)
    model = TwoHeads()
    x, y = batch(4)
    acc = ak.FusedAccumulator(model, backend=backend)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    for heads in (["a", "b"], ["a", "a"], ["a", "b"]):
        for head in heads:
            acc.backward(mse_loss(model(x, head), y))
        acc.finalize(optimizer)
        twin = copy.deepcopy(model).double()
        for p in twin.parameters():
            p.grad = None
        for head in heads:
            (mse_loss(twin(x.double(), head), y.double()) / len(heads)).backward()
        expected = [p.grad for p in twin.parameters() if p.grad is not None]
        assert relative_error([p.grad for p in model.parameters() if p.grad is not None], expected) < 1e-6
        acc.zero_()


def test_tied_parameters_are_summed_once():
    """A weight used by two layers is one segment, and its gradient the sum over both uses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    model[1].weight = model[0].weight
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x[:2]), y[:2]), weight=2)
    acc.backward(mse_loss(model(x[2:]), y[2:]), weight=4)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


def test_two_backwards_before_one_accumulate_are_one_micro_batch():
    """Two losses of one micro-batch add up, as in torch; micro-batches are counted by accumulate calls."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    mse_loss(model(x[:3]), y[:3]).backward()
    mse_loss(model(x[3:]), y[3:]).backward()
    acc.accumulate()
    assert acc.micro_batches == 1
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), [2 * g for g in big_batch_grads(model, x, y)]) < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("release", ["auto", "microbatch"])
@pytest.mark.parametrize("discards", [False, True])
def test_an_exception_in_backward(discards, release, autocast):
    """The failed micro-batch is dropped, whether the loop says so or not, and the window is as it was before it."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model, release=release)

    def forward(x):
        with torch.autocast("cpu", enabled=autocast):
            return model(x).float()

    acc.backward(mse_loss(forward(x[:3]), y[:3]))

    def fail(grad):
        raise torch.OutOfMemoryError("no memory left")

    out = forward(x)
    handle = model[0].weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        acc.backward(mse_loss(out, y))
    handle.remove()
    assert all(p.grad is None for p in model.parameters())
    if discards:
        acc.discard()
    acc.backward(mse_loss(forward(x[3:]), y[3:]))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < (0.02 if autocast else 1e-6)


@pytest.mark.parametrize("release", ["auto", "microbatch"])
@pytest.mark.parametrize("first", [False, True])
def test_an_exception_after_backward(first, release, monkeypatch):
    """Where flat buffers are allocated or the op runs: `acc.backward` takes away what its backward has left."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model, release=release)
    if not first:
        acc.backward(mse_loss(model(x[:3]), y[:3]))
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise torch.OutOfMemoryError("no memory left")

        patch.setattr(acc._store if first else acc.engine.runner._sums, "allocate" if first else "add", fail)
        with pytest.raises(torch.OutOfMemoryError):
            acc.backward(mse_loss(model(x), y))
    assert all(p.grad is None for p in model.parameters())
    if first:
        acc.backward(mse_loss(model(x[:3]), y[:3]))
    acc.backward(mse_loss(model(x[3:]), y[3:]))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory left"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_runs_out_inside_an_op(error, monkeypatch):
    """Plain torch has counted the weight and added some by then: the window is broken, and never counts it twice."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model, backend="reference")
    calls = []

    def fails(tensor):
        calls.append(tensor)
        if len(calls) == 3:
            raise error
        return tensor.isfinite().all()

    mse_loss(model(x), y).backward()
    with monkeypatch.context() as patch:
        patch.setattr("accumkernels.ops.reference._all_finite", fails)
        with pytest.raises(type(error)):
            acc.accumulate(6.0)
    with pytest.raises(RuntimeError, match="this window is broken"):
        acc.accumulate(6.0)
    acc.zero_()
    acc.backward(mse_loss(model(x), y), 6.0)
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert acc.weight == 6 and relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("before", ["captures.inbox.done", "_count"])
def test_an_interrupt_after_the_op(before, monkeypatch):
    """Between the op that adds a micro-batch and what notes it: a loop that goes on would add it twice."""
    model = mlp()
    x, y = batch(6)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x[:3]), y[:3]))

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner, _, name = before.rpartition(".")
        patch.setattr(operator.attrgetter(owner)(acc.engine.runner) if owner else acc.engine.runner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            acc.backward(mse_loss(model(x[3:]), y[3:]))
    acc.discard()
    with pytest.raises(RuntimeError, match="this window is broken"):
        acc.backward(mse_loss(model(x[3:]), y[3:]))
    acc.zero_()
    acc.backward(mse_loss(model(x), y))
    acc.finalize(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-6


@pytest.mark.parametrize("overflow", ["window", "microbatch", "raise"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_in_another_memory_order(backend, overflow):
    """Transposed, and expanded from one element: each element goes to its parameter's."""
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2, 5)), nn.Parameter(torch.zeros(6))]
    acc = ak.FusedAccumulator(params, backend=backend, overflow=overflow)
    grads = [torch.arange(12.0).view(3, 4).t(), torch.tensor(7.0).expand(2, 5), torch.arange(12.0)[::2]]
    for _ in range(2):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        acc.accumulate(weight=2)
    for p, grad in zip(params, grads, strict=True):
        assert torch.equal(acc.main_grad(p), 4 * grad)


def test_whether_backward_crosses_ranks_is_asked_in_each_window(monkeypatch):
    """torch.distributed may be started after the accumulator was built, and is not asked in every micro-batch."""
    asked = []
    monkeypatch.setattr(state, "backward_may_cross_ranks", lambda: bool(asked.append(None)))
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.0)
    x, y = batch(4)
    for window in (1, 2):
        for _ in range(3):
            acc.backward(mse_loss(model(x), y))
        assert len(asked) == window
        acc.step(optimizer)


OWN_WAYS = {  # of gradients until they are added
    "whole": {"release": "microbatch"},
    "fused": {"release": "microbatch", "fuse_weight_gradients": True},
    "buckets": {"release": "backward", "bucket_bytes": 64},
    "dropped": {"overflow": "microbatch"},
}


def loss_with_hook(model, x, y, hook):
    """A loss in whose backward a hook runs, when the last layer has its gradient and the first has none."""
    between = model[:2](x)
    between.register_hook(hook)
    return mse_loss(model[2:](between), y)


@pytest.mark.parametrize("options", OWN_WAYS.values(), ids=OWN_WAYS)
def test_threads_take_turns(options):
    """A micro-batch of another thread waits until that which runs is counted, as their weights differ."""
    model = mlp(torch.float64)
    (x, y), acc = batch(4, torch.float64), ak.FusedAccumulator(model, **options)
    other = threading.Thread(target=acc.backward, args=(mse_loss(model(x[:1]), y[:1]), 1))

    def start(_):
        other.start()
        other.join(0.1)  # it comes back at once where it does not wait

    acc.backward(loss_with_hook(model, x[1:], y[1:], start), weight=3)
    other.join()
    acc.finalize()
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-14


@pytest.mark.parametrize("options", OWN_WAYS.values(), ids=OWN_WAYS)
@pytest.mark.parametrize("call", ["backward", "accumulate", "backward_batch", "step", "zero_", "discard"])
def test_a_micro_batch_inside_another(options, call):
    """A hook that counts or drops one while the gradients of another are half made is an error."""
    model = mlp(torch.float64)
    (x, y), acc = batch(4, torch.float64), ak.FusedAccumulator(model, **options)
    acc.backward(mse_loss(model(x), y))
    inner = mse_loss(model(x[:1]), y[:1])
    arguments = {"backward": (inner,), "backward_batch": ((x, y), lambda _: inner)}.get(call, ())
    with pytest.raises(RuntimeError, match=rf"{call}\(\) while a backward of this accumulator runs"):
        acc.backward(loss_with_hook(model, x, y, lambda _: getattr(acc, call)(*arguments)))
    if options.get("release") == "backward" or "fuse_weight_gradients" in options:
        acc.zero_()
        acc.backward(mse_loss(model(x), y))
    acc.finalize()
    assert relative_error(grads_of(acc), big_batch_grads(model, x, y)) < 1e-14
