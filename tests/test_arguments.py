"""Wrong options, weights, divisors and limits are named with their value, and leave everything as it was."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.arguments import as_bytes
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
        ({"bucket_bytes": "8 gallons"}, ValueError, "bucket_bytes is not a number of bytes: '8 gallons'"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be positive, got 0"),
        ({"memory_limit": True}, TypeError, "memory_limit must be an int, got True"),
        ({"memory_limit": 12}, ValueError, "memory_limit=12 is less than a mebibyte: .* such as '12 GiB', '12 MiB' or"),
        ({"backend": "cuda"}, ValueError, "backend must be one of .*, got 'cuda'"),
        (
            {"autocast_route": "auto"},
            TypeError,
            "FusedAccumulator.. has no option autocast_route='auto': acc.backward takes 16-bit gradients from",
        ),
        (
            {"lr": 0.1},
            TypeError,
            r"FusedAccumulator\(\) has no option lr=0.1; help\(accumkernels.FusedAccumulator\) lists",
        ),
        ({"overflw": None}, TypeError, "has no option overflw=None; is it 'overflow'?"),
        (
            {"accumulation_steps": 4},
            TypeError,
            r"accumulation_steps=4: a window ends where .*; write `for window in acc.windows\(loader, 4\)`",
        ),
        ({"max_grad_norm": 1.0}, TypeError, r"max_grad_norm=1.0: write acc.step\(optimizer, max_norm=1.0\)"),
    ],
    ids=str,
)
def test_wrong_options(kwargs, error, message):
    """Every option is checked and named with its value."""
    with pytest.raises(error, match=message):
        ak.FusedAccumulator(mlp(), **kwargs)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("123456", 123456),
        ("8GiB", 8 * 2**30),
        ("1.5 k", 1536),
        ("512MB", 512 * 2**20),
        (" 512 mib ", 512 * 2**20),
        ("2T", 2**41),
        ("800 B", 800),
        (".5G", 2**29),
        (2**40, 2**40),
    ],
)
def test_bytes(text, value):
    """Numbers with units, which are powers of 1024."""
    assert as_bytes(text, "limit") == value
    unit = isinstance(text, str) and not text.isdigit()
    if unit or value >= 2**20:
        assert as_bytes(text, "limit", of_a_device=True) == value


@pytest.mark.parametrize("text", ["", "GiB", "-3", "1.2.3M", "8 gallons", "1e9", "nan", "inf GiB"])
def test_wrong_bytes(text):
    """Named."""
    with pytest.raises(ValueError, match="limit is not a number of bytes"):
        as_bytes(text, "limit")


def test_bytes_of_options():
    """They hold for every number of bytes that the constructor takes; a device's is never a bare small number."""
    with ak.FusedAccumulator(mlp(), bucket_bytes="8 MiB", memory_limit="10GiB", release="backward") as acc:
        assert acc.engine.options.bucket_bytes == 2**23 and acc.engine.options.memory_limit == 10 * 2**30
        assert "8,388,608" in repr(acc)
    for limit in ("12", "0", 2**20 - 1):
        with pytest.raises(ValueError, match="memory_limit"):
            ak.FusedAccumulator(mlp(), memory_limit=limit)


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


def parameters(function):
    """Names of what is checked: flags mean what Python takes them for, and torch checks what is its own."""
    flags = {"last", "window", "reduced", "error_if_nonfinite"}
    return [name for name in inspect.signature(function).parameters if name not in {"self", "kwargs", "exc"} | flags]


CHUNKS = [torch.ones(2, 5)]
# Every public method that takes arguments, with right ones.
CALLS = {
    "param_groups": lambda model, optimizer: {"groups": []},
    "main_grad": lambda model, optimizer: {"param": model[0].weight},
    "backward": lambda model, optimizer: {"loss": model(CHUNKS[0]).sum()},
    "accumulate": lambda model, optimizer: {},
    "backward_coupled": lambda model, optimizer: {"chunks": CHUNKS, "encode": model, "loss_fn": torch.sum},
    "backward_batch": lambda model, optimizer: {"batch": CHUNKS, "loss_fn": lambda part: model(part[0]).sum()},
    "window": lambda model, optimizer: {"batches": []},
    "windows": lambda model, optimizer: {"batches": [], "n": 1},
    "discard": lambda model, optimizer: {},
    "finalize": lambda model, optimizer: {"optimizers": optimizer},
    "clip_grad_norm_": lambda model, optimizer: {"max_norm": 1.0},
    "step": lambda model, optimizer: {"optimizers": optimizer},
    "state_dict": lambda model, optimizer: {},
    "load_state_dict": lambda model, optimizer: {"state_dict": {}},
}


def test_calls_are_all():
    """A method that comes later has its arguments checked too."""
    public = {name: f for name, f in vars(ak.FusedAccumulator).items() if inspect.isfunction(f) and name[0] != "_"}
    assert set(CALLS) == {name for name, f in public.items() if len(inspect.signature(f).parameters) > 1}


@pytest.mark.parametrize("argument", parameters(ak.FusedAccumulator))
def test_every_option_repeats_what_it_was_given(argument):
    """A value of the wrong kind stands in the error, beside the name of the argument."""
    arguments = {"params": mlp(), argument: Odd()}
    with pytest.raises((TypeError, ValueError), match=rf"{argument} must be .*, got an odd value"):
        ak.FusedAccumulator(**arguments)


@pytest.mark.parametrize(
    ("method", "argument"),
    [(method, name) for method in CALLS for name in parameters(getattr(ak.FusedAccumulator, method))],
)
def test_every_argument_repeats_what_it_was_given(method, argument):
    """The same for losses, weights, divisors, limits, optimizers and groups; nothing is counted."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    acc.backward(model(CHUNKS[0]).sum())
    if method == "clip_grad_norm_":
        acc.finalize(optimizer)
    arguments = {**CALLS[method](model, optimizer), argument: Odd()}
    optimizers = [arguments.pop("optimizers")] if "optimizers" in arguments else []
    call = functools.partial(getattr(acc, method), *optimizers, **arguments)
    with pytest.raises((TypeError, ValueError), match=rf"{argument.removesuffix('s')}.* must be .*, got an odd value"):
        list(call()) if method == "window" else call()
    assert acc.micro_batches == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda acc, o: acc.step([o]), TypeError, r"step\(\): name optimizers one by one, as step\(first, second\)"),
        (
            lambda acc, o: acc.step(o, 1.0),
            TypeError,
            r"step\(\): 1.0 is not an optimizer: write acc.step\(optimizer, max_norm=1.0\)",
        ),
        (lambda acc, o: acc.finalize(o, 8), TypeError, r"8 is not an .*: write acc.finalize\(optimizer, divisor=8\)"),
        (lambda acc, o: acc.step(o, max_norm=[3]), TypeError, r"max_norm\[0\] must be a pair .*, got 3"),
        (lambda acc, o: acc.step(o, max_norm=[([3], 1)]), TypeError, r"max_norm\[0\]: a parameter .*, got 3"),
        (lambda acc, o: acc.step(o, ignore=[3]), TypeError, "ignore: a parameter must be a tensor, got 3"),
        (lambda acc, o: acc.windows([], 0), ValueError, "n must be at least 1, got 0"),
        (lambda acc, o: acc.windows([], True), TypeError, "n must be an int, got True"),
        (lambda acc, o: acc.param_groups([3]), TypeError, "group 0 must be a dict, got 3"),
        (lambda acc, o: acc.main_grad(torch.ones(3)), ValueError, r"a tensor of shape \(3,\) is not one of"),
        (lambda acc, o: acc.accumulate(loss=torch.ones(3)), ValueError, r"one element, got a tensor of shape \(3,\)"),
        (
            lambda acc, o: acc.backward_coupled(CHUNKS, lambda chunk: chunk, lambda encodings: 3),
            TypeError,
            "what loss_fn returns must be a tensor, got 3",
        ),
    ],
)
def test_what_is_inside_an_argument(call, error, message):
    """Entries of lists, shapes of tensors and what a function returns are named in the same way."""
    acc = ak.FusedAccumulator(mlp())
    with pytest.raises(error, match=message):
        call(acc, torch.optim.SGD(acc.parameters(), lr=0.1))


@pytest.mark.parametrize("truth", [True, torch.tensor(True)])
def test_truths_are_no_numbers(truth):
    """A condition that stands where a number belongs, such as `len(x) > 4`, does not mean micro-batches of one."""
    acc = ak.FusedAccumulator(mlp())
    with pytest.raises(TypeError, match="n must be an int, got"):
        acc.windows([], truth)
    with pytest.raises(TypeError, match="micro_batch must be 'auto' or a number of samples, got"):
        acc.backward_batch(batch(7), lambda part: None, micro_batch=truth)


def test_numbers_of_numpy():
    """They are numbers: as the same ones of Python."""
    numpy = pytest.importorskip("numpy")
    answers = []
    for integer, real in ((int, float), (numpy.int64, numpy.float32), (numpy.int16, numpy.float64)):
        model = mlp()
        acc = ak.FusedAccumulator(model, noise_scale=real(3))
        x, y = batch(7)
        loss_fn = lambda part, model=model: mse_loss(model(part[0]), part[1])  # noqa: E731
        answers.append(
            (
                [list(window) for window in acc.windows(range(5), integer(2))],
                acc.backward_batch((x, y), loss_fn, micro_batch=integer(4), multiple_of=integer(2)).sizes,
                acc.backward_batch((x, y), loss_fn, budget=real(3)).sizes,
                acc.backward_batch((x, y), loss_fn, budget=integer(3)).sizes,
                ak.plan(integer(9), integer(3), samples_per_second=real(64), optimizer_seconds=real(2**-6)).verdict,
                ak.plan(9, 3, noise_scale=integer(2)).noise_scale,
                ak.suggest_learning_rate(real(0.5), integer(8), integer(16)),
            )
        )
        with pytest.raises(TypeError, match="n must be an int, got"):
            acc.windows([], real(2))
    assert answers[1:] == answers[:1] * 2
