"""torch.compile around the accumulator: compiled models, compiled steps, compiled autograd, compiled optimizers."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from tests.support.models import batch, mlp, relative_error

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

SIZES = (2, 4)
EXACT = 1e-6  # relative L2: the same fp32 arithmetic, of which compilers may reorder sums
# bf16 has 2**-9 per rounding; a compiled graph keeps intermediates in fp32 where eager rounds.
BF16 = 2e-2


@pytest.fixture
def fresh_dynamo():
    """No compiled code and no settings of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def expected_grads(model, x, y, autocast):
    """The weighted mean of stock micro-batches, eager."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = mse_loss(model(xs), ys)
        for t, g in zip(total, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            t += len(xs) / sum(SIZES) * g.double()
    return total


def check(acc, model, micro_batch, autocast=False):
    """Three windows, each compared."""
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(sum(SIZES))
    for _ in range(3):
        expected = expected_grads(copy.deepcopy(model), x, y, autocast)
        for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
            micro_batch(xs, ys)
        acc.finalize(optimizer)
        assert relative_error([p.grad for p in model.parameters()], expected) < (BF16 if autocast else EXACT)
        optimizer.step()
        acc.zero_()


def loss_of(model, x, y, autocast):
    """The plain loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return mse_loss(model(x), y)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_model_in_an_eager_loop(compiler, release, autocast):
    """The usual way: the model is compiled, the loop is not."""
    model = mlp()
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    acc = ak.FusedAccumulator(compiled, release=release, bucket_bytes=100)

    def micro_batch(x, y):
        acc.backward(loss_of(compiled, x, y, autocast), weight=len(x))

    check(acc, model, micro_batch, autocast)


@pytest.mark.starts
@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_inductor(release):
    """Generated code on the CPU, also for a part of a model whose rest is eager."""
    model = mlp()
    model[2].compile()
    acc = ak.FusedAccumulator(model, release=release, bucket_bytes=100)
    check(acc, model, lambda x, y: acc.backward(loss_of(model, x, y, False), weight=len(x)))


def no_recompilation():
    """Errors instead of the warnings after which Dynamo gives up."""
    return torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True)


# With release="backward", compiled autograd breaks its graph at each hook, and compiles torch's `call_hook` for each
# shape of parameter: right, and slow; see test_compiled_autograd.
@pytest.mark.parametrize(
    ("compiled_autograd", "release"), [(False, "microbatch"), (False, "backward"), (True, "microbatch")]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_backward_inside_a_compiled_function(compiled_autograd, release, autocast):
    """forward, loss and acc.backward in one compiled function: our part stays out of the graph, and nothing recompiles.

    Dynamo guarded on our counters before, compiled the accumulator anew for each micro-batch, and gave up after eight.
    """
    model = mlp()
    acc = ak.FusedAccumulator(model, release=release, bucket_bytes=100)

    def micro_batch(x, y, weight):
        acc.backward(loss_of(model, x, y, autocast), weight=weight)

    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd), no_recompilation():
        micro_batch = torch.compile(micro_batch, backend="eager", dynamic=True)
        check(acc, model, lambda x, y: micro_batch(x, y, len(x)), autocast)


def test_fullgraph_says_why_not():
    """In the first compiled call of a method, and in later ones."""
    model = mlp()
    acc = ak.FusedAccumulator(model)

    def broken(x, y):
        acc.backward(loss_of(model, x, y, False))

    def whole(x, y):  # code of its own: Dynamo would take what it has compiled for the other
        acc.backward(loss_of(model, x, y, False))

    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="calls of a FusedAccumulator break the graph"):
            torch.compile(whole, backend="eager", fullgraph=True)(*batch(2))
        torch.compile(broken, backend="eager")(*batch(2))
    assert acc.micro_batches == 2


@pytest.mark.parametrize(("release", "bucket_bytes"), [("microbatch", 1), ("backward", 1), ("backward", 2**25)])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_autograd(release, bucket_bytes, autocast):
    """A backward that compiled autograd runs, with the buckets' hooks in its graph, then accumulate().

    It forgets callbacks for the end of a backward; the window counted as broken.
    """
    model = mlp()
    acc = ak.FusedAccumulator(model, release=release, bucket_bytes=bucket_bytes)

    def forward_and_backward(x, y):
        # A bare backward has weight 1 with release="backward"; the loss carries the weight.
        loss = loss_of(model, x, y, autocast) * len(x)
        loss.backward()

    def micro_batch(x, y):
        forward_and_backward(x, y)
        acc.accumulate(1)

    with torch._dynamo.config.patch(compiled_autograd=True):
        forward_and_backward = torch.compile(forward_and_backward, backend="eager")  # reads the setting
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        x, y = batch(sum(SIZES))
        for _ in range(3):
            expected = expected_grads(copy.deepcopy(model), x, y, autocast)
            for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
                micro_batch(xs, ys)
            acc.finalize(optimizer, divisor=len(x))
            assert relative_error([p.grad for p in model.parameters()], expected) < (BF16 if autocast else EXACT)
            optimizer.step()
            acc.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_optimizer(dtype):
    """The long form with torch.compile(optimizer.step): gradients are views of the flat buffer, masters are rounded."""
    results = []
    for compiled in (False, True):
        model = mlp(dtype)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = torch.optim.AdamW(acc.parameters(), lr=0.01)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        x, y = batch(6, dtype)
        for _ in range(2):
            for xs, ys in zip(x.split(SIZES), y.split(SIZES), strict=True):
                acc.backward(mse_loss(model(xs), ys), weight=len(xs))
            acc.finalize(optimizer)
            acc.clip_grad_norm_(0.01)
            step()
            acc.zero_()
        results.append([p.detach().clone() for p in model.parameters()])
    assert relative_error(results[1], results[0]) < (1e-6 if dtype == torch.float32 else 2**-9)


@pytest.mark.starts
def test_import_without_dynamo():
    """Importing accumkernels does not import Dynamo, which takes a second."""
    code = "import sys, accumkernels; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_reduce_overhead(release):
    """CUDA graphs of forward and backward: gradients in their memory pool are consumed before the next run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    acc = ak.FusedAccumulator(compiled, release=release, bucket_bytes=1000)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = torch.randn(3, 16, 64, device="cuda"), torch.randn(3, 16, 8, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(4):  # warm-up, capture, replays
            twin.load_state_dict(model.state_dict())
            twin.zero_grad()
            for i in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                acc.backward(mse_loss(compiled(x[i]), y[i]), weight=i + 1)
                (mse_loss(twin(x[i]), y[i]) * (i + 1) / 6).backward()
            acc.finalize(optimizer)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
            optimizer.step()
            acc.zero_()
