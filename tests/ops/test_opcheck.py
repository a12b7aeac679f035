"""torch.ops.accumkernels as torch sees them: opcheck, fake and meta tensors, torch.compile."""

import math
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from accumkernels.ops import reference  # registers the ops
from tests.support.backends import BUFFERS, FLOATS, assert_same_bits, dtype_id, random, scalar, squares

OPS = torch.ops.accumkernels
DEVICES = [
    "cpu",
    *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []),
]
# (backend, dynamic shapes); one run of inductor, which takes some ten seconds.
COMPILERS = [("aot_eager", False), ("aot_eager", True)]
if shutil.which("g++") and Path(sysconfig.get_paths()["include"], "Python.h").exists():  # both needed by inductor
    COMPILERS.append(pytest.param("inductor", False, marks=pytest.mark.starts))


def gradients(dtypes):
    """One of each dtype; the last is not finite, so that the ops write to flags and found_inf as well."""
    grads = [random(5 + i, dtype, seed=i) for i, dtype in enumerate(dtypes)]
    if grads:
        grads[-1][2] = math.inf
    return grads


def accumulate(dtypes=(torch.float16,), buffer_dtype=torch.float32, **kwargs):
    """Arguments of accumulate_ for one gradient of each dtype."""
    count = len(dtypes)
    layout = torch.tensor([[32 * i, 5 + i] for i in range(count)], dtype=torch.int64).reshape(-1, 2)
    grads = gradients(dtypes)
    state = torch.zeros(4, dtype=torch.float64)
    positional = (random(32 * count + 1, buffer_dtype), state, grads, list(range(count)), [False] * count, layout)
    return (*positional, layout.clone()), kwargs


def optional_arguments(count: int) -> dict[str, object]:
    """All of accumulate_'s optional tensors."""
    return {
        "flags": torch.zeros(count, dtype=torch.int32),
        "tag": 3,
        "weight_tensor": scalar(2.0),
        "loss_scale": scalar(1024.0, torch.float32),
        "drop": scalar(0.0),
        "sq_norm": squares(0.0),
        "count": False,
    }


def samples() -> Iterator[tuple[str, Callable, tuple, dict]]:
    """Names, ops and arguments."""
    for buffer_dtype in BUFFERS:
        name = f"accumulate-{dtype_id(buffer_dtype)}"
        yield (name, OPS.accumulate_.default, *accumulate(FLOATS, buffer_dtype))
        everything = accumulate(FLOATS, buffer_dtype, **optional_arguments(4))
        yield (name + "-all arguments", OPS.accumulate_.default, *everything)
    yield ("accumulate-empty list", OPS.accumulate_.default, *accumulate(()))
    (buffer, state, _, *rest), kwargs = accumulate((torch.float32,))
    empty = torch.zeros(1, 2, dtype=torch.int64)
    args = (buffer, state, [torch.empty(0)], *rest[:2], empty, empty.clone())
    yield "accumulate-empty tensor", OPS.accumulate_.default, args, kwargs

    grads = gradients(FLOATS)
    flags = torch.zeros(4, dtype=torch.int32)
    check, norm, copy = OPS.check_finite_.default, OPS.norm_.default, OPS.scaled_copy_.default
    yield "check_finite", check, (grads, [0, 1, 2, 3], scalar(0.0), flags), {}
    options = {"tag": 2, "weight_tensor": scalar(math.nan)}
    yield "check_finite-all arguments", check, (grads[3:], [1], scalar(0.0), flags.clone()), options
    yield "check_finite-empty list", check, ([], [], scalar(0.0), flags.clone()), {}

    yield "norm", norm, (scalar(0.0), grads), {}
    yield "norm-inf", norm, (scalar(0.0), grads), {"ord": math.inf}
    yield "norm-empty list", norm, (scalar(0.0), []), {}

    outputs = [torch.zeros(5 + i, dtype=dtype) for i, dtype in enumerate(reversed(FLOATS))]
    yield "scaled_copy", copy, (outputs, grads), {}
    options = {"divisor": scalar(3.0), "found_inf": scalar(0.0)}
    yield "scaled_copy-all arguments", copy, (outputs, grads), options
    yield "scaled_copy-empty list", copy, ([], []), {}

    verdict = (torch.zeros(10, dtype=torch.float64), torch.zeros(10), torch.ones(4, dtype=torch.float64))
    yield "decide", OPS.decide_.default, verdict, {}
    names = ("divisor", "norm", "max_norm", "overflow")
    options = {name: scalar(1.0) for name in names}
    yield "decide-all arguments", OPS.decide_.default, verdict, options


every_sample = pytest.mark.parametrize(("op", "args", "kwargs"), [pytest.param(*s[1:], id=s[0]) for s in samples()])


def converted(tree: object, function: Callable[[torch.Tensor], torch.Tensor]):
    """Apply `function` to every tensor of the arguments."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, function, tree)


def on_device(op, args, device):
    """Move all but accumulate_'s layout_host, the last of its positional arguments."""
    moved = converted(args, lambda t: t.to(device).clone())
    return (*moved[:-1], args[-1].clone()) if op is OPS.accumulate_.default else moved


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors among the arguments, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("device", DEVICES)
@every_sample
def test_opcheck(op, args, kwargs, device):
    """Schema, autograd registration, fake kernel, and AOT dispatch with dynamic shapes."""
    kwargs = converted(kwargs, lambda t: t.to(device).clone())
    torch.library.opcheck(op, on_device(op, args, device), kwargs)


@every_sample
def test_fake_tensors(op, args, kwargs):
    """Under FakeTensorMode the op accepts fake arguments, returns nothing and touches no data."""
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = (converted(tree, mode.from_tensor) for tree in (args, kwargs))
        assert op(*fake_args, **fake_kwargs) is None
        assert all(isinstance(t, torch._subclasses.FakeTensor) for t in tensors((fake_args, fake_kwargs)))


@every_sample
def test_meta_tensors(op, args, kwargs):
    """Tensors without data are accepted, and stay so."""
    meta = on_device(op, args, "meta")
    assert op(*meta, **converted(kwargs, lambda t: t.to("meta"))) is None
    others = meta[:-1] if op is OPS.accumulate_.default else meta
    assert all(t.is_meta for t in tensors(others))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("compiler", "dynamic"), COMPILERS)
def test_compile(compiler, dynamic, device):
    """A window in one graph, without breaks: accumulate twice, check, norm and scaled copy as in eager mode."""
    sizes = [5, 6, 70]
    layout_host = torch.tensor([[32 * i, n] for i, n in enumerate(sizes)])

    def window(buffer, state, flags, first, second, output, total, layout, loss_scale):
        for grads, overwrite in ((first, True), (second, False)):
            scaled = [grad * 2 for grad in grads]  # what comes before and after is compiled around the ops
            OPS.check_finite_(scaled, [0, 1, 2], state[1:2], flags)
            OPS.accumulate_(
                buffer, state, scaled, [0, 1, 2], [overwrite] * 3, layout, layout_host,
                flags=flags, weight=0.3, loss_scale=loss_scale, sq_norm=total,
            )  # fmt: skip
        OPS.scaled_copy_([output], [buffer[64:134]], divisor=state[0:1], found_inf=state[1:2])
        OPS.norm_(total[0:1], [buffer[0:5], output])
        return output + 1

    def arguments():
        return converted(
            (
                torch.zeros(134),
                torch.zeros(4, dtype=torch.float64),
                torch.zeros(3, dtype=torch.int32),
                [random(n, torch.float16, seed=n) for n in sizes],
                [random(n, torch.bfloat16, seed=n + 1) for n in sizes],
                torch.zeros(70, dtype=torch.bfloat16),
                squares(),
                layout_host.clone(),
                scalar(512.0, torch.float32),
            ),
            lambda t: t.to(device),
        )

    eager_arguments, compiled_arguments = arguments(), arguments()
    expected = window(*eager_arguments)
    torch._dynamo.reset()
    compiled = torch.compile(window, backend=compiler, fullgraph=True, dynamic=dynamic)
    actual = compiled(*compiled_arguments)
    torch._dynamo.reset()
    for one, other in zip(tensors((actual, compiled_arguments)), tensors((expected, eager_arguments)), strict=True):
        assert_same_bits(one, other.cpu())
    assert eager_arguments[1].tolist() == [0.6, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("op", [OPS.accumulate_, reference.accumulate_], ids=["op", "reference"])
def test_gradients_may_require_grad(op):
    """A gradient of `backward(create_graph=True)` is accumulated like any other; the buffer joins no graph."""
    (buffer, state, grads, *rest), kwargs = accumulate()
    expected = buffer.clone()
    op(expected, state.clone(), grads, *rest, **kwargs)
    op(buffer, state, [grad.requires_grad_() for grad in grads], *rest, **kwargs)
    assert not buffer.requires_grad
    assert_same_bits(buffer, expected)
