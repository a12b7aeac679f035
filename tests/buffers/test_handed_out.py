"""`.grad`s that somebody keeps over the end of a window: they stay as they were, as in stock torch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from accumkernels.buffers import flat
from accumkernels.window import end
from tests.support.loop import K, Loop


def elsewhere(grad):
    """As the `.grad` of another parameter, which torch holds in C++."""
    other = nn.Parameter(torch.zeros_like(grad))
    other.grad = grad
    return other


class Sub(torch.Tensor):
    """Of a library's."""


WAYS = {
    "a subclass": lambda grad: grad.as_subclass(Sub),
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "flattened": lambda grad: grad.view(-1),
    "a part": lambda grad: grad[:1],
    "a parameter": nn.Parameter,
    "only in C++": elsewhere,
    "DLPack's": torch.from_dlpack,
    "DLPack's, of an alias": lambda grad: torch.from_dlpack(grad.detach()),
    "NumPy's": lambda grad: torch.from_numpy(grad.numpy()),
    "NumPy's, of a part of an alias": lambda grad: torch.from_numpy(grad.detach()[:1].numpy()),
}


class Lazy(torch.optim.SGD):
    """Steps by the gradients of this window and half those of the last, which it keeps without a copy.

    `kept` has those of all steps, in the way in which `keep` keeps them.
    """

    def __init__(self, params, keep=WAYS["itself"]):
        super().__init__(params, lr=0.1)
        self.keep, self.kept = keep, []

    @torch.no_grad()
    def step(self, closure=None):
        """Not SGD's."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            last = self.state[p].get("last", torch.zeros_like(p))
            self.state[p]["last"] = p.grad
            p.sub_(p.grad + 0.5 * last, alpha=0.1)
        self.kept.append([self.keep(p.grad) for p in params])


def train(loop, optimizer, windows, long_form=False, **options):
    """Train by the accumulator."""
    for window in loop.windows(windows):
        loop.accumulate(window)
        if long_form:
            loop.acc.finalize(optimizer)
            optimizer.step()
            loop.acc.zero_()
        else:
            loop.acc.step(optimizer, **options)


@pytest.mark.parametrize("long_form", [False, True])
@pytest.mark.parametrize("keep", [pytest.param(keep, id=name) for name, keep in WAYS.items()])
def test_kept_gradients_stay_and_optimizers_train_as_in_stock(keep, long_form):
    """Over three windows: parameters, and what is kept, are those of stock torch's loop in fp64."""
    loop, twin = Loop(dtype=torch.float64), Loop(dtype=torch.float64)
    twin.acc.remove()
    ours, stock = (Lazy(each.model.parameters(), keep) for each in (loop, twin))
    train(loop, ours, 3, long_form)
    for window in twin.windows(3):
        for x, y in window:
            (mse_loss(twin.model(x), y) / K).backward()
        stock.step()
        stock.zero_grad()
    for p, q in zip(loop.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)  # sums of four terms in another order
    for window, expected in zip(ours.kept, stock.kept, strict=True):
        for t, s in zip(window, expected, strict=True):
            found, truth = (t, s) if t.grad is None else (t.grad, s.grad)
            torch.testing.assert_close(
                found.as_subclass(torch.Tensor), truth.as_subclass(torch.Tensor), rtol=1e-12, atol=1e-14
            )


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_weights": True}, {"scaled": True}]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RMSprop])
def test_nothing_moves_in_loops_that_keep_nothing(kind, options, monkeypatch):
    """Each window hands out the same addresses, and nothing is looked for or copied."""
    for name in ("_move", "gc"):
        monkeypatch.setattr(flat, name, None)
    loop = Loop(**options)
    optimizer, addresses = kind(loop.acc.parameters(), lr=0.01), set()
    handle = optimizer.register_step_post_hook(
        lambda *_: addresses.add(tuple(p.grad.data_ptr() for p in loop.acc.parameters()))
    )
    train(loop, optimizer, 3, max_norm=0.1)
    handle.remove()
    train(loop, optimizer, 1)
    if options.get("dtype") is None or options.get("master_weights"):
        assert len(addresses) == 1
        (found,) = addresses
        assert found == tuple(loop.acc.main_grad(p).data_ptr() for p in loop.acc.parameters())


def test_views_of_main_grad_follow_the_sums():
    """Those are meant to be overwritten, also if they were made while gradients were handed out."""
    loop = Loop()
    first, second = loop.windows(2)
    p = next(loop.model.parameters())
    loop.accumulate(first)
    loop.acc.finalize(loop.optimizer)
    view, part, kept = loop.acc.main_grad(p), loop.acc.main_grad(p).view(-1), p.grad.detach()
    before = kept.clone()
    loop.acc.zero_()
    loop.accumulate(second)
    assert view.data_ptr() == part.data_ptr() == loop.acc.main_grad(p).data_ptr()
    assert torch.equal(part, loop.acc.main_grad(p).view(-1))
    assert torch.equal(kept, before)
    assert not torch.equal(kept, view)


def test_sparse_tensors_are_no_aliases():
    """They are among the objects that are searched, and have no memory to compare."""
    loop = Loop()
    first, second = loop.windows(2)
    p = next(loop.model.parameters())
    loop.accumulate(first)
    loop.acc.finalize(loop.optimizer)
    sparse, kept = torch.eye(2).to_sparse(), p.grad.detach()
    before = kept.clone()
    loop.acc.zero_()
    loop.accumulate(second)
    assert torch.equal(kept, before)
    assert torch.equal(sparse.to_dense(), torch.eye(2))


def test_kept_after_the_buffers_are_released():
    """Where the memory of the buffer stays with who has it."""
    loop = Loop()
    p = next(loop.model.parameters())
    for window in loop.windows(2):
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        kept, before = p.grad, p.grad.clone()
        loop.acc.zero_()
        loop.acc.release_buffers()
        loop.accumulate(window[:1])
        loop.acc.zero_()
        assert torch.equal(kept, before)


def test_arrays_of_numpy_get_the_memory():
    """The sums go on in a copy, once, which views of `main_grad` show; an array that is gone moves nothing."""
    loop = Loop()
    p = next(loop.model.parameters())
    view, addresses, kept = loop.acc.main_grad(p), [], None
    for number, window in enumerate(loop.windows(4)):
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        addresses.append(view.data_ptr())
        array = p.grad.numpy()
        assert torch.equal(torch.from_numpy(array), view)
        if number == 1:
            kept, before = array, array.copy()
            loop.acc.engine.store.drop_grads()  # as after another optimizer's error: the window goes on
            assert torch.equal(view, torch.from_numpy(before))
            assert view.data_ptr() != array.ctypes.data
        del array
        loop.acc.zero_()
        assert loop.acc.main_grad(p) is view
    assert (kept == before).all()
    first, second, third, fourth = addresses
    assert first == second == kept.ctypes.data != third == fourth


def test_memory_that_a_graph_holds_stays(monkeypatch):
    """What C++ holds is moved there, as long as nobody else has its address."""
    loop = Loop()
    p = next(loop.model.parameters())
    kept = None
    for number, window in enumerate(loop.windows(3)):
        loop.accumulate(window)
        with monkeypatch.context() as patch:
            patch.setattr(end, "is_capturing", lambda device, first=number == 0: first)
            loop.acc.finalize(loop.optimizer)
        if kept is None:
            kept, before, address = elsewhere(p.grad), p.grad.clone(), loop.acc.main_grad(p).data_ptr()
        loop.acc.zero_()
        assert loop.acc.main_grad(p).data_ptr() == address
        assert torch.equal(kept.grad, before)


@pytest.fixture
def _frozen_again():
    """What imports made is set aside from garbage collection again, as conftest.py has it; the test's own is not."""
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_frozen_again")
def test_what_cannot_be_found_is_said_once_and_not_looked_for_again(caplog, monkeypatch):
    """What gc.freeze() hides: a search looks at every object of the process."""
    loop, kept, searches = Loop(), [], []
    p = next(loop.model.parameters())
    find = flat.ExposedViews._move_aliases
    monkeypatch.setattr(flat.ExposedViews, "_move_aliases", lambda *args: (searches.append(1), find(*args)))
    for window in loop.windows(3):
        loop.accumulate(window)
        loop.acc.finalize(loop.optimizer)
        kept.append(p.grad.detach())
        gc.freeze()
        loop.acc.zero_()
        gc.unfreeze()
    (record,) = caplog.records
    assert "something keeps the memory of a .grad over the end of a window" in record.getMessage()
    assert len(searches) == 1
