"""`cache_casts=True`: one cast of each weight in a window, the bits of stock, and nothing of it left behind."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.capture import casts
from tests.support.backends import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Casts(TorchDispatchMode):
    """Counts casts of matrices to bf16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self.count += args[0].shape in ((6, 5), (3, 6))  # the weights'
        return result


def net() -> nn.Module:
    """The same two layers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    """A forward under autocast."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def is_kept(model: nn.Module) -> bool:
    """Whether a second forward finds the casts of a first one."""
    loss_of(model)
    with Casts() as casts:
        loss_of(model)
    return casts.count == 0


def casts_anew(model: nn.Module) -> bool:
    """Whether the next forward finds no casts, and leaves none to the one after it."""
    found = []
    for _ in range(2):
        with Casts() as casts:
            loss_of(model)
        found.append(casts.count)
    return found == [2, 2]


@pytest.fixture(autouse=True)
def nothing_left():
    """No test leaves nesting or casts behind: a forward casts anew."""
    yield
    gc.collect()
    casts._nesting.leave()
    assert not casts._nesting.levels
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("options", [{}, {"release": "backward"}, {"overflow": "microbatch"}], ids=str)
def test_casts_and_bits_of_a_window(options, in_window):
    """Two weights are cast once from the second micro-batch on, or from the first in `acc.window`; sums are stock's."""
    model, twin = net(), net()
    acc = ak.FusedAccumulator(model, cache_casts=True, **options)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(3):
        with Casts() as counter:
            for seed in acc.window(range(4)) if in_window else range(4):
                acc.backward(loss_of(model, 4 * number + seed))
        assert counter.count == (2 if in_window else 4)
        for seed in range(4):
            loss_of(twin, 4 * number + seed).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(acc.main_grad(p), q.grad)
        acc.step(optimizer, divisor=1)
        assert casts_anew(model)
        other.step()
        other.zero_grad()
    assert all(map(same_bits, model.parameters(), twin.parameters()))


ENDS = {
    "step": lambda acc, model: acc.step(torch.optim.SGD(model.parameters(), lr=0.1)),
    "finalize": lambda acc, model: acc.finalize(),
    "zero_": lambda acc, model: acc.zero_(),
    "discard": lambda acc, model: acc.discard(),
    "remove": lambda acc, model: acc.remove(),
}


@pytest.mark.parametrize("end", ENDS)
def test_ends(end):
    """Whatever ends a window, or a micro-batch that failed, drops the casts."""
    model = net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        acc.backward(loss_of(model))
        assert is_kept(model)
        ENDS[end](acc, model)
        assert casts_anew(model)


def test_a_failed_backward():
    """It drops the casts, and the window goes on."""
    model = net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        acc.backward(loss_of(model))
        assert is_kept(model)
        loss = loss_of(model)
        loss.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            acc.backward(loss)
        assert casts_anew(model)
        acc.backward(loss_of(model))
        assert is_kept(model)
        assert acc.micro_batches == 2


def test_an_accumulator_that_is_freed():
    """Its window goes with it."""
    model = net()
    acc = ak.FusedAccumulator(model, cache_casts=True)
    acc.backward(loss_of(model))
    alive = weakref.ref(acc)
    del acc
    gc.collect()
    assert alive() is None
    assert casts_anew(model)


def test_a_generator_that_is_left():
    """An exception in the loop's body closes `acc.window`, and with it the cache."""
    model = net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:

        def epoch():
            for seed in acc.window(range(4)):
                acc.backward(loss_of(model, seed))
                if seed == 1:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            epoch()
        gc.collect()
        assert casts_anew(model)


def test_another_thread_ends_the_window():
    """Nesting belongs to a thread: the one that began the window leaves it with its next call or optimizer's step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        acc.backward(loss_of(model))
        thread = threading.Thread(target=acc.zero_)
        thread.start()
        thread.join()
        optimizer.step()
        assert casts_anew(model)


def test_any_optimizers_step():
    """Another model's optimizer may step inside the window, also a fused one, which counts no change in place."""
    model, other = net(), net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        acc.backward(loss_of(model))
        loss_of(other).backward()
        with Casts() as counter:
            loss_of(other)
        assert counter.count == 0
        torch.optim.AdamW(other.parameters(), fused=True).step()
        with Casts() as counter:
            loss_of(other)
        assert counter.count == 2
        acc.zero_()


@pytest.mark.parametrize("how", ["in place", "half"])
def test_changed_weights_are_named(how):
    """An edit inside a window is an error, and the micro-batch after it sees the new weights."""
    model, twin = net(), net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        acc.backward(loss_of(model, 0))
        loss_of(twin, 0).backward()
        if how == "half":
            model[2].bfloat16()
            with pytest.raises(RuntimeError, match="'2.weight' changed its dtype|'2.weight'.*bfloat16"):
                acc.backward(loss_of(model, 1))
            return
        with torch.no_grad():
            model[2].weight.mul_(2)
            twin[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="'2.weight' was changed in place"):
            acc.backward(loss_of(model, 1))
        acc.backward(loss_of(model, 1))
        loss_of(twin, 1).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(acc.main_grad(p), q.grad)
        acc.zero_()


@pytest.mark.parametrize("where", ["before", "between"])
def test_a_forward_without_graph(where):
    """A validation inside the window takes no gradient from later forwards, whichever way torch keys its cache."""
    model, twin = net(), net()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        for seed in acc.window(range(3)):
            if (seed == 0) == (where == "before"):
                with torch.no_grad():
                    loss_of(model, 9)
            acc.backward(loss_of(model, seed))
            loss_of(twin, seed).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(acc.main_grad(p), q.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """A forward that runs again in backward finds the same casts."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    model, twin = Checkpointed(), Checkpointed()
    with ak.FusedAccumulator(model, cache_casts=True) as acc:
        for seed in range(3):
            acc.backward(loss_of(model, seed))
            loss_of(twin, seed).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(acc.main_grad(p), q.grad, rtol=0, atol=0)


def test_without_it_nothing_is_kept():
    """The default leaves autocast's cache as torch has it."""
    model = net()
    with ak.FusedAccumulator(model) as acc:
        for seed in acc.window(range(2)):
            acc.backward(loss_of(model, seed))
            assert casts_anew(model)


def test_wrong_value():
    """It names the option and the value."""
    with pytest.raises(TypeError, match="cache_casts must be a bool, got 'yes'"):
        ak.FusedAccumulator(net(), cache_casts="yes")
