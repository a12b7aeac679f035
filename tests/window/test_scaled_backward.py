"""acc.backward begins at the plain loss, and nobody can tell it from `scaler.scale(loss).backward()`."""

from __future__ import annotations

import unittest.mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.window.grad_scaler import scaled_backward
from tests.support.models import batch, mlp
from tests.support.seen import Seen

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALES = [65536.0, 1000.3, 2.0**-30]  # the first is no fp16, the second no 16-bit number of any kind


def scaler_of(scale: float) -> torch.amp.GradScaler:
    """One that has scaled a loss before."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    return scaler


class Writes(torch.autograd.Function):
    """Changes the gradient that it gets, as it should not."""

    @staticmethod
    def forward(ctx, x):
        """Nothing."""
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Write."""
        return grad.mul_(3)


@pytest.mark.parametrize("scale", [None, *SCALES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_bits_of_torchs_own(dtype, scale):
    """Of leaves, of a loss that keeps its gradient, and as a hook of the loss sees it; inf where that is."""
    x, y = batch(3, dtype)
    found = []
    for ours in (True, False):
        model = mlp(dtype)
        scaler = None if scale is None else scaler_of(scale)
        loss = mse_loss(model(x), y)
        loss.retain_grad()
        seen = []
        loss.register_hook(seen.append)
        if ours:
            run, selects = scaled_backward(loss, scaler, {})
            assert selects  # the short way
            run(())
        else:
            (loss if scaler is None else scaler.scale(loss)).backward()
        found.append([*(p.grad for p in model.parameters()), loss.grad, *seen])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dim() else a.item() == b.item()


@pytest.mark.native
def test_a_small_window_runs_none_of_torchs_extra_ops():
    """No product for the scale."""
    model = mlp()
    acc = ak.FusedAccumulator(model, scaler=scaler_of(8.0))
    x, y = batch(3)
    loss = mse_loss(model(x), y)
    with Seen() as seen:
        acc.backward(loss)
    assert "mul" not in seen.names
    assert "ones_like" not in seen.names


def test_a_function_that_writes_to_its_gradient_leaves_the_scale_alone():
    """As with torch, where that gradient is made for it."""
    model = mlp()
    scaler = scaler_of(8.0)
    x, y = batch(3)
    scaled_backward(Writes.apply(mse_loss(model(x), y)), scaler, {})[0]()
    assert scaler.get_scale() == 8.0
    twin = mlp()
    (3 * 8 * mse_loss(twin(x), y)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_parameter_that_is_the_loss():
    """Its gradient is the scale, in memory of its own."""
    param = nn.Parameter(torch.ones(()))
    scaler = scaler_of(8.0)
    scaled_backward(param, scaler, {})[0]()
    assert type(param) is nn.Parameter and param.grad.item() == 8.0
    view = param * 1
    param.grad = None
    scaled_backward(view.reshape(()), scaler, {})[0]()
    param.grad.zero_()
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("patched", ["Tensor.backward", "torch.autograd.backward", "scale", "type"])
def test_what_somebody_put_around_torchs_functions_is_called(patched):
    """A profiler's, a trainer's, or a scaler of the user's own."""
    calls = []

    def around(function):
        def call(*args, **kwargs):
            calls.append(patched)
            return function(*args, **kwargs)

        return call

    class Scaler(torch.amp.GradScaler):
        scale = around(torch.amp.GradScaler.scale)

    scaler = (Scaler if patched == "type" else torch.amp.GradScaler)("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    if patched == "scale":
        scaler.scale = around(scaler.scale)
    model = mlp()
    acc = ak.FusedAccumulator(model, scaler=scaler)
    x, y = batch(3)
    loss = mse_loss(model(x), y)
    calls.clear()
    places = {"Tensor.backward": Tensor, "torch.autograd.backward": torch.autograd}
    if patched in places:
        with unittest.mock.patch.object(places[patched], "backward", around(places[patched].backward)):
            acc.backward(loss)
    else:
        acc.backward(loss)
    assert calls == [patched]


def test_a_torch_function_mode_sees_backward():
    """As it sees every function of torch's."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = mlp()
    x, y = batch(3)
    loss = mse_loss(model(x), y)
    with Mode():
        scaled_backward(loss, None, {})[0]()
    assert Tensor.backward in seen


@pytest.mark.parametrize(
    "loss",
    [
        torch.zeros(()),
        torch.zeros(3, requires_grad=True) * 2,
        torch.zeros((), dtype=torch.complex64, requires_grad=True) * 2,
    ],
    ids=["no graph", "not one element", "complex"],
)
def test_errors_are_torchs(loss):
    """For losses that have no backward."""
    with pytest.raises(RuntimeError) as theirs:
        loss.backward()
    with pytest.raises(RuntimeError) as ours:
        scaled_backward(loss, None, {})[0]()
    assert str(ours.value) == str(theirs.value)


def test_a_loss_of_shape_one():
    """It is no number, and right all the same."""
    model, twin = mlp(), mlp()
    x, y = batch(3)
    scaled_backward(mse_loss(model(x), y).reshape(1), scaler_of(8.0), {})[0]()
    (mse_loss(twin(x), y) * 8).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_options_of_backward():
    """`retain_graph` lets a second backward run; without it there is none."""
    model = mlp()
    acc = ak.FusedAccumulator(model, scaler=scaler_of(8.0))
    x, y = batch(3)
    loss = mse_loss(model(x), y)
    acc.backward(loss, retain_graph=True)
    acc.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        acc.backward(loss)
