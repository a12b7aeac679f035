"""Wrong options, weights, divisors and limits are named with their value, and leave everything as it was."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"scaler": 1.0}, TypeError, "scaler must be a torch.amp.GradScaler or None, got 1.0"),
        (
            {"overflow": "never"},
            ValueError,
            "overflow must be one of None, 'window', 'microbatch', 'raise', got 'never'",
        ),
        ({"release": "forward"}, ValueError, "release must be one of 'auto', 'microbatch', 'backward', got 'forward'"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive, got 0"),
        ({"bucket_bytes": 1e6}, TypeError, "bucket_bytes must be an int, got 1000000.0"),
        ({"backend": "cuda"}, ValueError, "backend must be one of .*, got 'cuda'"),
        ({"autocast_route": "yes"}, ValueError, "autocast_route must be 'auto', True or False, got 'yes'"),
        ({"lr": 0.1}, TypeError, "lr"),
    ],
    ids=str,
)
def test_wrong_options(kwargs, error, message):
    """Every option is checked and named with its value."""
    with pytest.raises(error, match=message):
        ak.FusedAccumulator(mlp(), **kwargs)


@pytest.mark.parametrize(
    "weight", [-1, -0.5, float("nan"), float("inf"), torch.tensor(-1.0), torch.tensor([1.0, 2.0]), torch.ones(1)]
)
@pytest.mark.parametrize("call", ["backward", "accumulate"])
def test_wrong_weight_value(weight, call):
    """A weight that is negative, not finite or a vector is a ValueError before anything is added."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    loss = mse_loss(model(x), y)
    if call == "accumulate":
        loss.backward()
    with pytest.raises(ValueError, match="weight must be"):
        acc.backward(loss, weight) if call == "backward" else acc.accumulate(weight)
    assert acc.micro_batches == 0
    assert acc.weight.item() == 0
    assert (model[0].weight.grad is None) == (call == "backward")


@pytest.mark.parametrize("weight", ["1", None, 1j, torch.tensor(True), torch.tensor(1j)], ids=str)
def test_wrong_weight_type(weight):
    """A weight that is no real number is a TypeError that names it."""
    acc = ak.FusedAccumulator(mlp())
    with pytest.raises(TypeError, match="weight must be"):
        acc.accumulate(weight)


@pytest.mark.parametrize("divisor", [0, -1.0, float("nan"), float("inf"), torch.tensor(0), torch.ones(2)], ids=str)
def test_wrong_divisor(divisor):
    """Zero, negative, infinite and vector divisors are ValueErrors, and the window stays open."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(ValueError, match="divisor must be"):
        acc.finalize(optimizer, divisor=divisor)
    with pytest.raises(ValueError, match="divisor must be"):
        acc.step(optimizer, divisor=divisor)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), torch.ones(2)], ids=str)
def test_wrong_max_norm(max_norm):
    """A negative, NaN or vector max_norm is a ValueError; infinity only measures."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(ValueError, match="max_norm must be"):
        acc.step(optimizer, max_norm=max_norm)
    assert acc.step(optimizer, max_norm=float("inf")).item() > 0


class Odd:
    """What no argument takes."""

    def __repr__(self):
        return "an odd value"


CONSTRUCTOR = list(inspect.signature(ak.FusedAccumulator).parameters)
METHODS = [
    (name, argument)
    for name in ("backward", "accumulate", "finalize", "step", "param_groups")
    for argument, parameter in inspect.signature(getattr(ak.FusedAccumulator, name)).parameters.items()
    if argument not in ("self", "kwargs", "loss", "last")  # tensors and flags, taken as Python takes them
]


@pytest.mark.parametrize("argument", CONSTRUCTOR)
def test_every_option_repeats_what_it_was_given(argument):
    """A value of the wrong kind stands in the error, beside the name of the argument."""
    arguments = {"params": mlp(), argument: Odd()}
    with pytest.raises((TypeError, ValueError), match=rf"{argument} must be .*, got an odd value"):
        ak.FusedAccumulator(**arguments)


@pytest.mark.parametrize(("method", "argument"), METHODS)
def test_every_argument_repeats_what_it_was_given(method, argument):
    """The same for weights, divisors, limits, optimizers and groups."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(model(torch.ones(1, 5)).sum())
    first = {"backward": [model(torch.ones(1, 5)).sum()], "finalize": [optimizer], "step": [optimizer]}.get(method, [])
    odd = {"optimizers": [Odd()], "groups": [[Odd()]]}.get(argument)
    args, kwargs = (first, {argument: Odd()}) if odd is None else (odd, {})
    with pytest.raises((TypeError, ValueError), match=rf"{argument.rstrip('s')}.* must be .*, got an odd value"):
        getattr(acc, method)(*args, **kwargs)
