"""Wrong input is named with its value and the parameter's name, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp

LEAF = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "no parameters"),
        (nn.ReLU(), ValueError, "no parameters"),
        (torch.zeros(3, requires_grad=True), TypeError, "module or an iterable of parameters, got Tensor"),
        (3, TypeError, "module or an iterable of parameters, got int"),
        (["weight"], TypeError, "item 0 must be a Parameter.*got str"),
        ([{"lr": 0.1}], ValueError, "group 0 has no 'params'"),
        ([LEAF, LEAF], ValueError, "'param1' and 'param0' are the same parameter"),
        ([("a", LEAF), ("a", nn.Parameter(torch.zeros(2)))], ValueError, "two parameters are called 'a'"),
        ([LEAF * 2], ValueError, "'param0' is not a leaf"),
        ([("n", torch.zeros(2, dtype=torch.int64))], ValueError, "'n' is torch.int64"),
        ([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], ValueError, "'param0' is torch.complex64"),
        ([torch.zeros(2, device="meta", requires_grad=True)], ValueError, "'param0' is on the meta device"),
        ([torch.zeros(2, 2).to_sparse().requires_grad_()], ValueError, "'param0' has layout torch.sparse_coo"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_wrong_params(params, error, message):
    """Every kind of unusable params is refused with what it is."""
    with pytest.raises(error, match=message):
        ak.FusedAccumulator(params)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"scaler": 1.0}, TypeError, "scaler must be a torch.amp.GradScaler or None, got float"),
        (
            {"overflow": "never"},
            ValueError,
            "overflow must be one of None, 'window', 'microbatch', 'raise', got 'never'",
        ),
        ({"release": "forward"}, ValueError, "release must be one of 'microbatch', 'backward', got 'forward'"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive, got 0"),
        ({"bucket_bytes": 1e6}, TypeError, "bucket_bytes must be an int, got float"),
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


def test_order_of_calls():
    """Calls out of order are RuntimeErrors that say the right one."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) before finalize\(\)"):
        acc.clip_grad_norm_(1.0)
    acc.finalize(optimizer)
    for call in (lambda: acc.accumulate(), lambda: acc.finalize(optimizer), lambda: acc.step(optimizer)):
        with pytest.raises(RuntimeError, match=r"after finalize\(\).*zero_\(\)"):
            call()
    with pytest.raises(RuntimeError, match=r"backward\(\) after finalize\(\)"):
        acc.backward(mse_loss(model(x), y))
    acc.zero_()
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' has a .grad that was never accumulated"):
        acc.step(optimizer)
    acc.discard()
    acc.step(optimizer)


def test_optimizers_must_own_every_accumulated_parameter():
    """A parameter that no optimizer owns, or two do, is named; nothing is handed out."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    acc.backward(mse_loss(model(x), y))
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"no optimizer .* owns '[24]\."):
        acc.step(some)
    with pytest.raises(RuntimeError, match=r"more than one optimizer .* owns '0\."):
        acc.finalize(some, every)
    with pytest.raises(TypeError, match="needs the optimizers"):
        acc.finalize()
    assert all(p.grad is None for p in model.parameters())
    acc.step(every)


def test_what_is_not_an_optimizer():
    """Other objects, wrapped optimizers and closure optimizers are TypeErrors that help."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    with pytest.raises(TypeError, match="expected a torch.optim.Optimizer, got int"):
        acc.finalize(3)
    wrapped = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer", "optimizer": None})()
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer of accelerate .*optimizer.optimizer"):
        acc.step(wrapped)
    with pytest.raises(TypeError, match=r"LBFGS, whose step takes a closure(.|\n)*acc.finalize"):
        acc.step(torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.half(), "'.*' was torch.float32 at construction and is torch.float16 now"),
        (lambda m: m.load_state_dict(m.state_dict() | {"0.bias": torch.zeros(9)}, assign=True), "was replaced"),
        (
            lambda m: setattr(m[0].bias, "data", torch.zeros(4)),
            r"'0.bias' had shape \(9,\) at construction and has \(4,\)",
        ),
        (lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(9))), "'0.bias' was replaced"),
    ],
    ids=["half", "assign", "data", "setattr"],
)
def test_drift_is_named(change, message):
    """A parameter that changed dtype, shape or identity is named at the next window's first accumulate."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    change(model)
    with pytest.raises(RuntimeError, match=message):
        acc.accumulate()
    with pytest.raises(RuntimeError, match=message):
        acc.step(optimizer)


def test_two_accumulators_on_one_parameter():
    """The second one is refused with the parameter's name, until the first lets go."""
    model = mlp()
    first = ak.FusedAccumulator(model)
    with pytest.raises(RuntimeError, match="'0.weight' already has a FusedAccumulator"):
        ak.FusedAccumulator(model)
    first.remove()
    with ak.FusedAccumulator(model):
        pass
    ak.FusedAccumulator(model)


def test_disjoint_accumulators_over_one_model():
    """Two accumulators over different parameters of a model live side by side."""
    model = mlp()
    first, second = ak.FusedAccumulator(model[0]), ak.FusedAccumulator([*model[2].parameters(), *model[4].parameters()])
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    first.accumulate()
    second.accumulate()
    first.step(torch.optim.SGD(first.parameters(), lr=0.1))
    second.step(torch.optim.SGD(second.parameters(), lr=0.1))


def test_sparse_gradient_is_named():
    """A sparse gradient is refused before anything is added."""
    model = nn.Sequential(nn.Embedding(4, 5, sparse=True), nn.Linear(5, 3))
    acc = ak.FusedAccumulator(model)
    model(torch.tensor([0, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of '0.weight' is sparse"):
        acc.accumulate()
    assert acc.weight.item() == 0


@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_unscale_inside_a_window(call):
    """scaler.unscale_ before clipping, as stock loops do it, would unscale twice: refused."""
    model = mlp()
    x, y = batch(3)
    scaler = torch.amp.GradScaler("cpu")
    acc = ak.FusedAccumulator(model, scaler=scaler)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(mse_loss(model(x), y))
    if call == "accumulate":
        scaler.scale(mse_loss(model(x), y)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"scaler.unscale_\(optimizer\) was called inside a window"):
        acc.accumulate() if call == "accumulate" else acc.step(optimizer)


def test_scaler_that_never_scaled():
    """A bare loss.backward() with a scaler would be unscaled wrongly: refused."""
    model = mlp()
    x, y = batch(3)
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu"))
    mse_loss(model(x), y).backward()
    with pytest.raises(RuntimeError, match="has never scaled a loss"):
        acc.accumulate()


def test_scaler_of_another_device():
    """A scaler for another device type is refused when it is enabled."""
    scaler = torch.amp.GradScaler("cpu")
    scaler._device = "cuda"
    with pytest.raises(ValueError, match="scaler is for 'cuda', but '0.weight' is on cpu"):
        ak.FusedAccumulator(mlp(), scaler=scaler)


def test_a_model_with_an_accumulator_pickles_and_copies():
    """Copies and pickles of the model know nothing of the accumulator."""
    import copy
    import pickle

    model = mlp()
    acc = ak.FusedAccumulator(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ak.FusedAccumulator(twin)
        assert torch.equal(twin[0].weight, model[0].weight)
    assert acc.micro_batches == 0
