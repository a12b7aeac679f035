"""What users call the parameters: every kind that serves, what is wrong with others, and drift that is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

import accumkernels as ak
from accumkernels.buffers.parameters import NamedParameter, local, shaped_like
from accumkernels.buffers.store import Store
from tests.support.backends import same_bits
from tests.support.frozen import CAN_BE_UNFROZEN, KINDS, Adapted, trainable
from tests.support.models import batch, big_batch_grads, mlp, relative_error

LEAF = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "no parameters"),
        (nn.ReLU(), ValueError, "no parameters"),
        (torch.zeros(3, requires_grad=True), TypeError, "module or an iterable of parameters, got tensor"),
        (3, TypeError, "module or an iterable of parameters, got 3"),
        (["weight"], TypeError, "item 0 must be a Parameter.*got 'weight'"),
        ([{"lr": 0.1}], ValueError, "group 0 has no 'params'"),
        ([LEAF, LEAF], ValueError, "'param1' and 'param0' are the same parameter"),
        ([("a", LEAF), ("a", nn.Parameter(torch.zeros(2)))], ValueError, "two parameters are called 'a'"),
        ([LEAF * 2], ValueError, "'param0' is not a leaf"),
        ([("n", torch.zeros(2).to(torch.float8_e4m3fn).requires_grad_())], ValueError, "'n' is torch.float8_e4m3fn"),
        ([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], ValueError, "torch.complex64.*view_as_complex"),
        ([torch.zeros(2, device="meta", requires_grad=True)], ValueError, "'param0' is on the meta device"),
        ([torch.zeros(2, 2).to_sparse().requires_grad_()], ValueError, "'param0' has layout torch.sparse_coo"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4)), ValueError, "'1.weight' is lazy.*run the model once"),
        ([nn.parameter.UninitializedParameter(requires_grad=False)], ValueError, "'param0' is lazy"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_wrong_params(params, error, message):
    """Every kind of unusable params is refused with what it is."""
    with pytest.raises(error, match=message):
        ak.FusedAccumulator(params)


def test_buffers_and_names_of_every_kind_of_params():
    """Modules, parameters, (name, parameter) pairs and param groups all serve; names are as documented."""
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": [model[2].weight, model[2].bias], "lr": 0.1}]
    for params, name in (
        (model, "0.weight"),
        (list(model.parameters()), "param0"),
        (model.parameters(), "param0"),
        (model.named_parameters(), "0.weight"),
        (groups, "group0.param0"),
        (torch.compile(model), "0.weight"),
    ):
        with ak.FusedAccumulator(params) as acc:
            p = next(acc.parameters())
            assert p is model[0].weight
            p.grad = torch.full_like(p, float("inf"))
            acc.accumulate()
            assert acc.overflow_report() == [name]
            acc.zero_()


def swapping(call, *args):
    """Call something that changes a module while torch swaps parameters instead of copying into them."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return call(*args)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.half(), "'.*' was torch.float32 at construction and is torch.float16 now"),
        (lambda m: m.load_state_dict(m.state_dict() | {"0.bias": torch.zeros(9)}, assign=True), "was replaced"),
        (
            lambda m: setattr(m[0].bias, "data", torch.zeros(4)),
            r"'0.bias' was of shape \(9,\) at construction and is of \(4,\) now \(AK05\)",
        ),
        (lambda m: setattr(m[0], "bias", nn.Parameter(torch.zeros(9))), "'0.bias' was replaced"),
        (lambda m: prune.l1_unstructured(m[0], "weight", 0.3), "'0.weight' was renamed to 'weight_orig'"),
        (lambda m: nn.utils.parametrizations.weight_norm(m[0]), "'0.weight' was replaced"),
        (lambda m: swapping(m.half), "'0.weight' was torch.float32 at construction and is torch.float16 now"),
        pytest.param(lambda m: m.cuda(), "was on cpu at construction and is on cuda:0 now", marks=pytest.mark.gpu),
    ],
    ids=["half", "assign", "data", "setattr", "prune", "weight_norm", "swap", "cuda"],
)
def test_drift_is_named(change, message):
    """A parameter that changed dtype, shape, device or identity is named at the next window's first accumulate."""
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


WINDOW, WINDOWS = 2, 3
OPTIONS = [
    {},
    {"release": "backward"},
    {"release": "microbatch", "overflow": "microbatch"},
    {"master_weights": True},
]


def train(model, acc=None, between=lambda window: None):
    """Windows of two micro-batches, in which our means have the bits of stock's; `between` is called after each."""
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    for window in range(WINDOWS):
        for i in range(WINDOW):
            x, y = batch(3, seed=10 * window + i)
            loss = mse_loss(model(x), y)
            if acc is None:
                (loss / WINDOW).backward()
            else:
                acc.backward(loss)
        del loss  # its graph holds the parameters, which torch would not swap
        if acc is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            acc.step(optimizer)
        between(window)
    return model


def assert_same(ours, stock):
    """Of all that was trained."""
    for a, b in zip(trainable(ours), trainable(stock), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_of_any_kind(kind, options):
    """A whole model is handed over, and trains as in stock torch; its state is saved and loaded."""
    model = Adapted(kind)
    acc = ak.FusedAccumulator(model, scaler=torch.amp.GradScaler("cpu", enabled=False), **options)
    assert len(list(acc.parameters())) == len(list(model.parameters()))
    assert next(acc.parameters()) is model.base or (kind == "bfloat16" and options == {"master_weights": True})
    assert acc.weight.device.type == "cpu"
    train(model, acc)
    assert_same(model, train(Adapted(kind)))
    acc.load_state_dict(acc.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_frozen_parameters(kind):
    """Windows are empty then."""
    model = Adapted(kind).requires_grad_(False)
    acc = ak.FusedAccumulator(model)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
    assert acc.step_was_skipped
    assert acc.weight.device.type == "cpu"


@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("form", ["backward", "accumulate"])
@pytest.mark.parametrize("kind", CAN_BE_UNFROZEN)
def test_unfrozen_later(kind, form, release):
    """What cannot be accumulated is named at the next window's first micro-batch, which goes on once it is frozen."""
    model = Adapted(kind)
    acc = ak.FusedAccumulator(model, release=release)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    model.base.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'base' .*: it was frozen at construction and requires a gradient now"):
        if form == "backward":
            acc.backward(mse_loss(model(x), y))
        else:
            mse_loss(model(x), y).backward()
            acc.accumulate()
    model.base.requires_grad_(False)
    acc.zero_()
    acc.backward(mse_loss(model(x), y))
    acc.finalize(optimizer)
    del model.base  # is not in the truth's way
    twin = nn.Sequential(model.a, model.b)
    assert relative_error([p.grad for p in trainable(model)], big_batch_grads(twin, x, y)) < 1e-6


def test_offloaded_parameters():
    """Frozen parameters that are other tensors in every forward, as offloading has it, are no drift."""

    class Offloaded(Adapted):
        def forward(self, x):
            away, self.base = self.base, nn.Parameter(KINDS["uint8"](), requires_grad=False)
            y = super().forward(x)
            self.base = nn.Parameter(torch.empty_like(away), requires_grad=False)
            return y

    ours, stock = Offloaded("meta"), Offloaded("meta")
    train(ours, ak.FusedAccumulator(ours))
    assert_same(ours, train(stock))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_swapped_parameters(options):
    """A model's state may be loaded by swapping parameters: torch refuses to swap those with weak references."""
    ours, stock = mlp(), mlp()
    state = mlp(seed=1).state_dict()

    def load(model):
        return lambda window: window == 1 and swapping(model.load_state_dict, state)

    train(ours, ak.FusedAccumulator(ours, **options), load(ours))
    assert_same(ours, train(stock, between=load(stock)))


@pytest.mark.parametrize(
    "compile_", [torch.jit.script, lambda m: torch.jit.trace(m, batch(3)[0])], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript(compile_):
    """Modules that keep no dict of their parameters."""
    ours = compile_(mlp())
    assert_same(train(ours, ak.FusedAccumulator(ours)), train(compile_(mlp())))


@pytest.fixture
def alone():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("master_weights", [False, True])
def test_offloaded_shards_stay_on_the_host(alone, master_weights):
    """FSDP2's CPUOffloadPolicy keeps them there, beside a mesh of GPUs: gradients and masters are not moved to it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    values = torch.randn(8, 4).to(torch.bfloat16 if master_weights else torch.float32)
    host = distribute_tensor(values, DeviceMesh("cpu", [0]), [Shard(0)])
    spec = host._spec
    spec.mesh = DeviceMesh("cuda", [0], _init_backend=False)
    weight = nn.Parameter(DTensor(host._local_tensor, spec, requires_grad=False))
    assert weight.device_mesh.device_type == "cuda" and weight._local_tensor.device.type == "cpu"

    store = Store([NamedParameter("weight", weight)], "reference", master_weights)
    target = store.target(weight)
    buffer = store.buffers[0]
    buffer.views[0].fill_(2)
    grad = shaped_like(buffer.views[0], target)
    assert grad.placements == weight.placements and grad.dtype == torch.float32
    assert grad._local_tensor.device.type == "cpu" and grad._local_tensor.eq(2).all()
    target.grad = grad
    torch.optim.SGD([target], lr=1.0).step()
    store.release_claim()
    torch.testing.assert_close(local(target), values.float() - 2)
