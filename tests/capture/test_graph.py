"""Which way each weight's gradient goes, by the graph that it is in; and everybody else gets what they always get."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from accumkernels.capture import graph
from accumkernels.capture.graph import EVERY, SMALLEST_CAST
from accumkernels.capture.inbox import have_hooks
from tests.support.backends import same_bits
from tests.support.models import InPlace, elements, relative_error
from tests.support.seen import Seen
from tests.support.stock import stock_sums

pytestmark = pytest.mark.usefixtures("one_thread")

FUSED, HALF = "fused", "taken in 16 bits"
FP32, BF16 = 1e-6, 2e-2  # relative L2 against fp64: sums of few terms; roundings of 2**-9 in forward and backward


class Double(torch.autograd.Function):
    """A function of the user's own, which saves the weight."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w * 2

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors[0].dtype == torch.float32
        return grad * 2


class OwnLinear(torch.autograd.Function):
    """A product of the user's own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class BackwardInside(torch.autograd.Function):
    """Identity, whose backward runs another one, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).sum().backward()
        return grad


def recompute(grad):
    """What reentrant checkpoints do, which refuse to run where the engine is told what to compute."""
    assert torch.autograd._is_checkpoint_valid()
    return grad


class BackwardInHelper(BackwardInside):
    """The same, out of a function that its backward calls."""

    @staticmethod
    def backward(ctx, grad):
        return recompute(grad)


def decorated(function):
    """A decorator that leaves no trace of what it wraps."""
    return lambda *args: function(*args)


class BackwardDecorated(BackwardInside):
    """The same, behind a decorator."""

    backward = staticmethod(decorated(lambda ctx, grad: recompute(grad)))


def autocast(dtype=torch.bfloat16):
    """To 16 bit."""
    return torch.autocast("cpu", dtype)


def under_autocast(run):
    """The same graph with casts."""

    def wrapped(w, h):
        with autocast():
            return run(w, h)

    return wrapped


def checkpointed(reentrant):
    """The product runs again in backward."""
    return lambda w, h: checkpoint(lambda h: F.linear(h, w), h, use_reentrant=reentrant)


def with_packed(w, h):
    """Saved tensors that may be given out only once."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return F.linear(h, w)


def offloaded(w, h):
    """Saved tensors that lie elsewhere."""
    with torch.autograd.graph.save_on_cpu():
        return F.linear(h, w)


def twice_cast(w, h):
    """Outside of autocast, nobody keeps the first copy."""
    return F.linear(h.bfloat16(), w.bfloat16()) + F.linear(h.bfloat16(), w.bfloat16())


def cast_for_two(w, h):
    """A copy that does not go into products alone."""
    cast = w.bfloat16()
    return F.linear(h.bfloat16(), cast).sum() + cast.square().sum()


IDS = torch.tensor([0, 3, 3, 7])
GRAPHS = {  # of a weight `w` of 8 x 6 and `h` of 5 x 6, whose gradient is wanted; the way, if all is to be fused
    "linear": (lambda w, h: F.linear(h, w), FUSED),
    "linear with bias": (lambda w, h: F.linear(h, w, torch.ones(8, requires_grad=True)), FUSED),
    "transposed": (lambda w, h: h @ w.t(), FUSED),
    "as it is": (lambda w, h: h @ h.t() @ h.new_ones(5, 8) @ w, FUSED),
    "tokens": (lambda w, h: F.linear(h.expand(2, 5, 6), w), FUSED),
    "a vector": (lambda w, h: F.linear(h[0], w), FUSED),
    "two products": (lambda w, h: F.linear(F.linear(h, w) @ w, w), FUSED),
    "addmm": (lambda w, h: torch.addmm(h.new_ones(5, 8), h, w.t(), beta=2.0), FUSED),
    "addmm, alpha": (lambda w, h: torch.addmm(h.new_ones(5, 8), h, w.t(), alpha=2.0), None),
    "embedding": (lambda w, h: F.embedding(IDS, w), FUSED),
    "embedding and head": (lambda w, h: F.linear(F.embedding(IDS, w), w), FUSED),
    "first operand": (lambda w, h: w @ h.t(), None),
    "transposed twice": (lambda w, h: h @ w.t().t().t(), None),
    "a part": (lambda w, h: F.linear(h, w[:4]), None),
    "a batch of products": (lambda w, h: h.expand(2, 5, 6).bmm(w.t().expand(2, 6, 8)), None),
    "a product and a norm": (lambda w, h: F.linear(h, w).sum() + w.square().sum(), None),
    "elementwise": (lambda w, h: w.square() + h[0], None),
    "the loss itself": (lambda w, h: w.sum(), None),
    "a first layer": (lambda w, h: F.linear(h.detach(), w), None),  # which does not save its weight
    "packed": (with_packed, None),
    "offloaded": (offloaded, None),
    "own function": (lambda w, h: F.linear(h, Double.apply(w)), None),
    "own product": (lambda w, h: OwnLinear.apply(h, w), None),
    "backward inside": (lambda w, h: BackwardInside.apply(F.linear(h, w)), None),
    "backward in a helper": (lambda w, h: BackwardInHelper.apply(F.linear(h, w)), None),
    "backward decorated": (lambda w, h: BackwardDecorated.apply(F.linear(h, w)), None),
    "checkpoint": (checkpointed(False), FUSED),
    "reentrant checkpoint": (checkpointed(True), None),
    "autocast": (under_autocast(lambda w, h: F.linear(h, w)), FUSED),
    "autocast, tokens": (under_autocast(lambda w, h: F.linear(h.expand(2, 5, 6), w)), FUSED),
    "autocast, checkpoint": (under_autocast(checkpointed(False)), FUSED),
    "autocast, reentrant checkpoint": (under_autocast(checkpointed(True)), None),
    "autocast, embedding and head": (under_autocast(lambda w, h: F.linear(F.embedding(IDS, w), w)), FUSED),
    "autocast, a product and a norm": (under_autocast(lambda w, h: F.linear(h, w).sum() + w.square().sum()), None),
    "autocast, a first layer": (under_autocast(lambda w, h: F.linear(h.detach(), w)), HALF),
    "autocast, packed": (under_autocast(with_packed), HALF),
    "autocast, backward inside": (under_autocast(lambda w, h: BackwardInside.apply(F.linear(h, w))), HALF),
    "autocast, convolution": (under_autocast(lambda w, h: F.conv1d(h.view(5, 6, 1), w.view(8, 6, 1))), None),
    "cast": (lambda w, h: F.linear(h.bfloat16(), w.bfloat16()), FUSED),
    "cast, two ways": (cast_for_two, HALF),
    "a cast beside what writes to its gradient": (
        lambda w, h: InPlace.apply(torch.cat([h, h[:3]]).bfloat16()) + w.bfloat16(),
        HALF,
    ),
    "a cast's view beside it": (
        lambda w, h: InPlace.apply(torch.cat([h, h[:3]]).bfloat16()[None]) + w.bfloat16()[None],
        HALF,
    ),
    "two casts": (twice_cast, FUSED),
    "a cast and a square": (lambda w, h: w.bfloat16().square().sum() + w.square().sum(), None),
    "two casts, one square": (lambda w, h: w.bfloat16().square().sum() + w.bfloat16().sum(), None),
    "two casts, one product": (
        lambda w, h: F.linear(h.bfloat16(), w.bfloat16()).sum() + w.bfloat16().square().sum(),
        FUSED,
    ),
    "wider": (lambda w, h: w.double().sum() + F.linear(h.double(), w.double()).sum(), None),
    "not used": (lambda w, h: h, None),
}


def parts(dtype=torch.float32):
    """A weight, and an input whose gradient is wanted."""
    generator = torch.Generator().manual_seed(0)
    w, h = torch.randn(8, 6, generator=generator), torch.randn(5, 6, generator=generator)
    return Parameter(w.to(dtype)), h.to(dtype).requires_grad_()


def loss_of(run, w, h):
    """A scalar, whose gradient differs everywhere."""
    out = run(w, h)
    return (out.float() if out.itemsize < 4 else out).square().sum()


def way_of(acc):
    """How the one weight went."""
    return next((way for way, count in elements(acc).items() if count), None)


@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.native
def test_the_way_of_a_weight(name, fuse, release):
    """The way is the expected one, and the sum stock's: to the last bit, but for what was fused."""
    run, expected = GRAPHS[name]
    w, h = parts()
    acc = ak.FusedAccumulator([w], fuse_weight_gradients=fuse, release=release, bucket_bytes=1)
    acc.backward(loss_of(run, w, h))
    found = way_of(acc)
    casts = "cast" in name and not name.startswith("two casts")
    assert found == (expected if fuse else HALF if casts and expected and "embedding" not in name else None)
    twin, of_twin = (t.detach().clone().requires_grad_() for t in (w, h))
    (stock,) = stock_sums([twin], [loss_of(run, twin, of_twin)])
    assert same_bits(h.grad, of_twin.grad) if of_twin.grad is not None else h.grad is None
    assert w.grad is None
    if found != FUSED:
        assert same_bits(acc.main_grad(w), torch.zeros_like(w) if stock is None else stock)
    else:
        assert relative_error([acc.main_grad(w)], [stock]) < (BF16 if casts or "cast" in name else FP32)


@pytest.mark.parametrize("name", ["autocast, a first layer", "autocast, packed", "cast, two ways"])
def test_gradients_that_nobody_else_has_are_not_copied(name, monkeypatch):
    """With each torch, which may hold more references to them."""
    seen, unshared = [], graph._unshared
    monkeypatch.setattr(graph, "_unshared", lambda grad: seen.append(unshared(grad) is grad) or grad)
    w, h = parts()
    ak.FusedAccumulator([w], fuse_weight_gradients=False).backward(loss_of(GRAPHS[name][0], w, h))
    assert seen == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.native
def test_weights_of_other_dtypes(dtype):
    """Products and embeddings of any are fused; what is cast from fp64 goes the ordinary way."""
    w, h = parts(dtype)
    acc = ak.FusedAccumulator([w], fuse_weight_gradients=True)
    acc.backward(loss_of(GRAPHS["embedding and head"][0], w, h))
    assert way_of(acc) == FUSED
    acc.zero_()
    acc.backward(loss_of(lambda w, h: F.linear(h.half(), w.half()) if dtype == torch.float64 else w.float(), w, h))
    assert way_of(acc) is None
    assert acc.main_grad(w).any()


class Watched(Parameter):
    """A subclass, whose operations may be anything."""


def test_parameters_of_other_classes():
    """They are autograd's."""
    w, h = parts()
    w = Watched(w.detach())
    acc = ak.FusedAccumulator([w], fuse_weight_gradients=True)
    acc.backward(loss_of(GRAPHS["linear"][0], w, h))
    assert way_of(acc) is None
    assert acc.main_grad(w).any()


# ---- hooks of the user's own


def leaf_of(w):
    """The node that adds to `.grad`."""
    return w.view_as(w).grad_fn.next_functions[0][0]


HOOKS = {  # where a hook goes that gets a tensor or node: of the weight, its cast, what is multiplied, the product
    "weight": lambda w, cast, operand, out, seen: w.register_hook(seen),
    "weight, after": lambda w, cast, operand, out, seen: w.register_post_accumulate_grad_hook(lambda w: seen(w.grad)),
    "cast": lambda w, cast, operand, out, seen: cast.register_hook(seen),
    "operand": lambda w, cast, operand, out, seen: operand.register_hook(seen),
    "leaf": lambda w, cast, operand, out, seen: leaf_of(w).register_hook(lambda _, grads: seen(grads[0])),
    "leaf, before": lambda w, cast, operand, out, seen: leaf_of(w).register_prehook(lambda grads: seen(grads[0])),
    "cast's node": lambda w, cast, operand, out, seen: cast.grad_fn.register_hook(lambda made, _: seen(made[0])),
    "operand's node": lambda w, cast, operand, out, seen: operand.grad_fn.register_hook(lambda made, _: seen(made[0])),
    "operand's node, before": lambda w, cast, operand, out, seen: operand.grad_fn.register_prehook(
        lambda grads: seen(grads[0])
    ),
    "product": lambda w, cast, operand, out, seen: out.grad_fn.register_hook(lambda made, _: seen(made[-1])),
    "product, before": lambda w, cast, operand, out, seen: out.grad_fn.register_prehook(lambda grads: seen(grads[0])),
    "cast keeps": lambda w, cast, operand, out, seen: cast.retain_grad(),
    "operand keeps": lambda w, cast, operand, out, seen: operand.retain_grad(),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("name", "casts"), [(name, casts) for name in HOOKS for casts in (False, True) if casts or name[:4] != "cast"]
)
def test_hooks_see_what_they_see_in_stock(name, casts, fuse):
    """On the weight, on tensors that it became, and on nodes; the sum has stock's bits."""
    found = []
    for ours in (True, False):
        w, h = parts()
        acc = ak.FusedAccumulator([w], fuse_weight_gradients=fuse) if ours else None
        seen = []
        cast = w.bfloat16() if casts else w
        operand = cast.t()
        out = (h.to(cast.dtype) * 2).mm(operand)
        hook = HOOKS[name](w, cast, operand, out, lambda grad, seen=seen: seen.append(grad.clone()))
        loss = out.float().square().sum()
        leaf = leaf_of(w)
        acc.backward(loss) if ours else loss.backward()
        if ours:
            assert way_of(acc) != FUSED
        kept = [t.grad for t in (cast, operand) if not t.is_leaf and t.retains_grad]
        found.append([*seen, *kept, acc.main_grad(w).clone() if ours else w.grad])
        del leaf, hook
    assert len(found[0]) == len(found[1]) == 2
    assert all(map(same_bits, *found))


def test_a_hook_that_changes_a_gradient():
    """As if no accumulator were there: on the 16-bit copy that the user made."""
    w, h = parts()
    acc = ak.FusedAccumulator([w], fuse_weight_gradients=True)
    cast = w.bfloat16()
    cast.register_hook(torch.zeros_like)
    acc.backward(F.linear(h.bfloat16(), cast).float().sum())
    assert not acc.main_grad(w).any()
    assert h.grad.any()


def test_hooks_that_come_after_forward_and_go():
    """Every graph is read anew: while the hook is there the weight goes the ordinary way, and then as before."""
    w, h = parts()
    acc = ak.FusedAccumulator([w, other := Parameter(torch.ones(8, 6))], fuse_weight_gradients=True)
    seen = []
    run = lambda: (F.linear(h, w) @ other).square().sum()  # noqa: E731
    for hooked in (False, True, False):
        loss = run()
        hook = w.register_hook(lambda grad: seen.append(grad.shape)) if hooked else None
        acc.backward(loss)
        assert elements(acc)[FUSED] == (48 if hooked else 96)
        if hook is not None:
            hook.remove()
    assert seen == [(8, 6)]


# ---- everybody else


def small_net(width=6):
    """Two bias-free layers behind an embedding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, width), nn.Linear(width, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    )


def test_others_in_the_same_loss_get_theirs():
    """Inputs, other models, tensors that keep their gradient, and hooks on them, bit for bit."""
    found = []
    for ours in (True, False):
        model, critic = small_net(), nn.Linear(3, 2)
        torch.manual_seed(1)
        offset, style = torch.randn(4, 6, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        acc = ak.FusedAccumulator(model, fuse_weight_gradients=True) if ours else None
        hidden = model[0](IDS) + offset
        hidden.retain_grad()
        out = model[1:](hidden) * style
        seen = []
        out.register_hook(seen.append)
        loss = critic(out).square().sum() + offset.sum()
        acc.backward(loss) if ours else loss.backward()
        found.append([t.grad for t in (hidden, offset, style, *critic.parameters())] + seen)
        if ours:
            assert elements(acc)[FUSED] == sum(p.numel() for p in model.parameters())
            assert all(p.grad is None for p in model.parameters())
    assert all(map(same_bits, *found))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("way", ["inputs", "grad", "create_graph", "retain_graph"])
@pytest.mark.parametrize("autocasts", [False, True])
def test_backwards_that_ask_for_something(way, autocasts):
    """`inputs=`, `torch.autograd.grad`, graphs of gradients and graphs that are used again."""
    model, twin = small_net(), small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    weight, other = model[1].weight, twin[1].weight
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        loss, expected = (net(IDS).float().square().sum() for net in (model, twin))
    if way == "inputs":
        acc.backward(loss, inputs=[weight])
        expected.backward(inputs=[other])
        assert same_bits(acc.main_grad(weight), other.grad)
        assert [p for p in model.parameters() if acc.main_grad(p).any()] == [weight]
    elif way == "grad":
        found = torch.autograd.grad(loss, [model[0].weight, weight], retain_graph=True)
        assert all(map(same_bits, found, torch.autograd.grad(expected, [twin[0].weight, other])))
        acc.backward(loss)  # the graph serves both
        assert elements(acc)[FUSED] > 0
    elif way == "create_graph":
        acc.backward(loss, create_graph=True)
        expected.backward()
        assert all(
            same_bits(acc.main_grad(p), q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )
    else:
        acc.backward(loss, retain_graph=True)
        acc.backward(loss)
        expected.backward(retain_graph=True)
        expected.backward()
        assert elements(acc)[FUSED] > 0
        sums = [acc.main_grad(p) for p in model.parameters()]
        assert relative_error(sums, [q.grad for q in twin.parameters()]) < (BF16 if autocasts else FP32)


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_gradient_penalty(autocasts):
    """A graph with gradients in it: nothing of the inner torch.autograd.grad is accumulated."""

    def penalised(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = model(IDS).float().square().sum()
        return loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        )

    model, twin = small_net(), small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward(penalised(model))
    stock = stock_sums(twin.parameters(), [penalised(twin)])
    assert relative_error([acc.main_grad(p) for p in model.parameters()], stock) < FP32


@pytest.mark.parametrize("autocasts", [False, True])
def test_a_hook_that_differentiates_the_graph_it_is_in(autocasts):
    """As implicit layers do, while the backward runs: the inner torch.autograd.grad adds nothing, and finds its own."""
    found, hooks = [], []
    for ours in (True, False):
        model = small_net()
        acc = ak.FusedAccumulator(model, fuse_weight_gradients=True) if ours else None
        inner = []
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            x = model[0](IDS)
            out = model[1:](x)
        asked = [model[1].weight, x]

        def solve(grad, out=out, asked=asked, inner=inner):
            hooks.pop().remove()
            inner += torch.autograd.grad(out, asked, grad, retain_graph=True)

        hooks.append(out.register_hook(solve))
        loss = out.float().square().sum()
        acc.backward(loss) if ours else loss.backward()
        found.append((inner, [acc.main_grad(p).clone() if ours else p.grad for p in model.parameters()]))
    (inner, sums), (stock_inner, stock) = found
    assert all(map(same_bits, inner, stock_inner))
    assert relative_error(sums, stock) < (BF16 if autocasts else FP32)


def test_a_function_that_runs_another_backward_over_the_same_graph():
    """Its gradients go to `.grad`, as torch has it, and are added once."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, loss):
            ctx.loss = loss
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.loss.backward(retain_graph=True)
            return grad, None

    sums = []
    for ours in (True, False):
        model = small_net()
        acc = ak.FusedAccumulator(model, fuse_weight_gradients=True) if ours else None
        with autocast():
            out = model(IDS).float()
        loss = Inner.apply(out, out.sum()).square().sum()
        acc.backward(loss) if ours else loss.backward()
        sums.append([acc.main_grad(p).clone() if ours else p.grad for p in model.parameters()])
    assert relative_error(*sums) < FP32


@pytest.mark.parametrize("order", ["as they came", "reversed"])
def test_several_forwards_in_flight(order):
    """All forwards, then all backwards, of one weight's graphs."""
    model, twin = small_net(), small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    batches = [IDS, IDS + 1, IDS[:2]]
    losses, expected = ([net(ids).square().sum() for ids in batches] for net in (model, twin))
    if order == "reversed":
        losses.reverse()
    for loss in losses:
        acc.backward(loss)
    stock = stock_sums(twin.parameters(), expected)
    assert relative_error([acc.main_grad(p) for p in model.parameters()], stock) < FP32


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.parametrize("wraps", [False, True])
def test_anomaly_mode(wraps):
    """A NaN that arises in a weight's gradient alone is reported; and without one, gradients are as always."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    x = torch.ones(4, 6)
    mode = torch.autograd.set_detect_anomaly(True)
    with mode:
        acc.backward(model(x).sum())
        assert elements(acc).get(FUSED, 0) == 0
        x[2] = float("inf")
        # 0 * inf: the masked row has no gradient, and makes NaN of the weight's.
        with autocast() if wraps else contextlib.nullcontext():
            out = torch.where(x.isfinite(), model[0](x), torch.zeros(4, 6))
            loss = model[1:](out).float().sum()
        with pytest.raises(RuntimeError, match="returned nan values"):
            acc.backward(loss)


def test_hooks_are_there_for_one_backward():
    """However it ends, nodes, tensors and the parameters have nothing of ours after it."""
    model = small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    for fails in (KeyboardInterrupt, RuntimeError, None):
        out = model(IDS)
        loss = out.sum()
        product = out.grad_fn

        def fail(grad, fails=fails, product=product):
            assert have_hooks([product]) == (fails is not None)
            if fails is not None:
                raise fails("planted")

        if fails is None:
            acc.backward(loss, retain_graph=True)
        else:
            handle = model[1].weight.register_hook(fail)
            with pytest.raises(fails, match="planted"):
                acc.backward(loss, retain_graph=True)
            handle.remove()
            acc.zero_()
        assert not have_hooks([product])
    twin = small_net()
    twin(IDS).sum().backward()
    loss.backward()  # the loop's own, over the same graph
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_a_graph_that_outlives_remove(release, autocasts):
    """What was recorded before gives its gradients to `.grad`."""
    model, twin = small_net(), small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True, release=release)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        acc.backward(model(IDS).sum())
        loss, expected = model(IDS).sum(), twin(IDS).sum()
    acc.remove()
    loss.backward()
    expected.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert same_bits(p.grad, q.grad)


# ---- when graphs are read


@pytest.fixture
def looks(monkeypatch):
    """Counts walks over graphs."""
    seen, real = [], graph._read
    monkeypatch.setattr(graph, "_read", lambda roots: seen.append(roots) or real(roots))
    return seen


def test_looks_now_and_then_where_nothing_is_found(looks):
    """And at every graph, once there is something."""
    model = small_net()
    acc = ak.FusedAccumulator(model)
    for backwards in range(2 * EVERY + 1):
        assert len(looks) == -(-backwards // EVERY)
        acc.backward(model(IDS).sum())
    assert elements(acc) == {FUSED: 0, HALF: 0}
    looks.clear()
    for _ in range(EVERY + 3):
        with autocast():
            loss = model(IDS).sum()
        acc.backward(loss)
    assert 3 <= len(looks) <= EVERY + 3
    assert elements(acc) == {FUSED: 0, HALF: 72}


@pytest.mark.parametrize("release", ["microbatch", "backward"])
def test_graphs_of_small_models_are_not_read(monkeypatch, looks, release):
    """Where no parameter is large enough to gain, no backward pays for a walk."""
    monkeypatch.setattr(graph, "SMALLEST_CAST", SMALLEST_CAST)
    width = SMALLEST_CAST // 8
    for large in (False, True):
        model = small_net(width if large else 6)
        acc = ak.FusedAccumulator(model, release=release)
        with autocast():
            loss = model(IDS).sum()
        acc.backward(loss)
        assert len(looks) == large
    assert elements(acc) == {FUSED: 0, HALF: 8 * width}


def test_backwards_that_are_not_ours_are_left_alone(looks):
    """Those of the loop, torch.autograd.grad's, and any between finalize and the next window."""
    model, twin = small_net(), small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    for net in (model, twin):
        net(IDS).sum().backward()
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    acc.accumulate()
    torch.autograd.grad(model(IDS).sum(), list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    acc.finalize(optimizer)
    before = [p.grad.clone() for p in model.parameters()]
    model(IDS).sum().backward()
    for p, b, q in zip(model.parameters(), before, twin.parameters(), strict=True):
        assert same_bits(p.grad, b + q.grad)
    acc.zero_()
    assert not looks


def test_gradients_of_inputs_cost_what_they_cost():
    """`torch.autograd.grad(loss, x)` multiplies as often as in stock, before, inside and after a window."""

    def products(model):
        x = torch.ones(4, 6, requires_grad=True)
        loss = model[1:](x).sum()
        with Seen() as seen:
            torch.autograd.grad(loss, x)
        return sum(name in ("mm", "addmm") for name in seen.names)

    expected = products(small_net())
    assert expected == 2
    model = small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    assert products(model) == expected
    acc.backward(model(IDS).sum())
    assert products(model) == expected
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert products(model) == expected


def test_a_copy_of_the_model_is_no_business_of_ours():
    """Its backward fills `.grad`, also with the accumulator inside a window."""
    model = small_net()
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward(model(IDS).sum())
    before = acc.main_grad(model[1].weight).clone()
    twin = copy.deepcopy(model)
    twin(IDS).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert same_bits(acc.main_grad(model[1].weight), before)
