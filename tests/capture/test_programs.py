"""Programs that do more with their weights than layers do, or run backward in other ways: they train as in stock.

Under bf16 autocast with default options, so that large weights are added in backward. The truth is the big batch in
fp64: nobody is nearer to it than bf16 allows, and ours must be as near as stock is.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import accumkernels as ak
from tests.support.models import relative_error

WIDE = 512  # a weight of WIDE * WIDE elements is taken from the graph by default
ROWS, K, WINDOWS = 8, 3, 3
# Of stock's distance to the truth. Roundings of bf16 differ by chance where gradients are not rounded in between.
AS_NEAR = 1.1

pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def fresh_dynamo():
    """Graphs of other tests count towards the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stack(layer, count=3):
    """Layers with functions between."""
    return nn.Sequential(*(part for _ in range(count) for part in (layer(), nn.Tanh())))[:-1]


def square():
    """A large layer."""
    return nn.Linear(WIDE, WIDE)


def at_least_fp32(x):
    """In fp32, but for the truth."""
    return x if x.dtype == torch.float64 else x.float()


def mse(model, x, y):
    """The usual loss."""
    return F.mse_loss(at_least_fp32(model(x)), y)


# ---- functions of the user's own


class OwnLinear(torch.autograd.Function):
    """`F.linear` under autocast, whose backward is in fp32 and needs the fp32 weight that it saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad.to(w.dtype)
        return grad @ w, grad.t() @ x.to(w.dtype)


class InChunks(OwnLinear):
    """Sums rows one by one into a gradient made like the weight."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        total = torch.zeros_like(w)
        for row, input in zip(grad.split(1), x.split(1), strict=True):
            total += row.t().to(w.dtype) @ input.to(w.dtype)
        return grad.to(w.dtype) @ w, total


class Own(nn.Linear):
    """Calls it."""

    function = OwnLinear

    def forward(self, x):
        return self.function.apply(x, self.weight)


class OwnInChunks(Own):
    """Calls the other."""

    function = InChunks


# ---- weights that are changed where they are used


class MaxNorm(nn.Module):
    """A parent that keeps the columns of its layer's weight short, in place."""

    def __init__(self):
        super().__init__()
        self.layer = square()

    def forward(self, x):
        with torch.no_grad():
            weight = self.layer.weight
            weight *= (0.4 / weight.norm(dim=0, keepdim=True)).clamp(max=1)
        return self.layer(x)


class Positive(MaxNorm):
    """By `.data`."""

    def forward(self, x):
        self.layer.weight.data.clamp_(min=-0.02)
        return self.layer(x)


def hooked():
    """A layer whose pre-hook changes it."""
    layer = square()

    def clamp(layer, _):
        layer.weight.data.clamp_(min=-0.02)

    layer.register_forward_pre_hook(clamp)
    return layer


class Criterion(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return F.mse_loss(output, target) * torch.exp(-self.scale) + self.scale


class Halves(nn.Module):
    """Whose own forward is never called."""

    def __init__(self, layer):
        super().__init__()
        self.encoder, self.decoder = stack(layer, 2), stack(layer, 2)


def by_halves(model, x, y):
    """An encoder, then a decoder."""
    return F.mse_loss(at_least_fp32(model.decoder(model.encoder(x))), y)


# ---- forwards that change


class Remembers(nn.Linear):
    """Knows where its weight began."""

    def __init__(self):
        super().__init__(WIDE, WIDE)
        self.register_buffer("start", self.weight.detach().clone())
        self.penalty = 0.0


class Changing(Remembers):
    """Does something more from the second window on; what, subclasses say."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        # The truth's whole window is one call.
        return self.later(x) if self.calls > (1 if x.dtype == torch.float64 else K) else super().forward(x)


class FakeQuantized(Changing):
    """A weight of four bits in forward, straight through in backward."""

    def later(self, x):
        scale = self.weight.abs().amax(dim=1, keepdim=True) / 7
        rounded = torch.round(self.weight / scale).clamp(-8, 7) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


class Pulled(Changing):
    """A penalty on the distance from the start."""

    def later(self, x):
        self.penalty = 10 * (self.weight - self.start).square().sum()
        return F.linear(x, self.weight, self.bias)


class Decayed(Changing):
    """The squared norm in the loss."""

    def later(self, x):
        self.penalty = 0.01 * self.weight.square().sum()
        return F.linear(x, self.weight, self.bias)


class Precise(Changing):
    """Autocast off inside the layer."""

    def later(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Renormalized(Changing):
    """Rows of norm 0.5 at most, kept in place."""

    def later(self, x):
        with torch.no_grad():
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
        return F.linear(x, self.weight, self.bias)


class Replaced(Changing):
    """The same by assignment to `.data`."""

    def later(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return F.linear(x, self.weight, self.bias)


def penalized(model, x, y):
    """With what the layers ask for."""
    loss = mse(model, x, y)
    return loss + sum(getattr(layer, "penalty", 0.0) for layer in model)


# ---- weights that leave their layer


class HandsOut(Remembers):
    """Returns its weight beside its output."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias), self.weight


class Around(nn.Module):
    """Layers around one."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = square(), inner(), square()

    def forward(self, x):
        x, weight = self.inner(torch.tanh(self.first(x)))
        self.seen = weight
        return self.last(torch.tanh(x))


def with_seen(model, x, y):
    """A penalty on the weight that forward has handed out."""
    return mse(model, x, y) + 10 * (model.seen - model.inner.start).square().sum()


def watched(kind):
    """Layers with forward hooks that read their weights for a penalty."""

    def make():
        model = stack(Remembers)
        for layer in model[::2]:

            def read(layer, *_):
                layer.penalty = 10 * (layer.weight - layer.start).square().sum()

            getattr(layer, f"register_forward_{kind}")(read)
        return model

    return make


# ---- compiled code


def compiled(make):
    """The whole model, in place; the truth is not."""

    def made():
        model = make()
        model.compile(backend="aot_eager")
        return model

    return made


class Block(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = square(), square()

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Decorated(Block):
    """A forward that is compiled code."""

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def patched():
    """Blocks whose forward is replaced by compiled code."""
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return model


compiled_linear = torch.compile(lambda x, w, b: torch.tanh(F.linear(x, w, b)), backend="aot_eager")


class ByFunction(nn.Linear):
    """Gives its weight to a compiled function."""

    def __init__(self):
        super().__init__(WIDE, WIDE)

    def forward(self, x):
        return compiled_linear(x, self.weight, self.bias)


class PreciseHead(nn.Module):
    """A part in fp32."""

    def __init__(self):
        super().__init__()
        self.body, self.head = square(), square()

    def forward(self, x):
        x = torch.tanh(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(at_least_fp32(x))


class Distance(PreciseHead):
    """An output and a penalty."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", self.head.weight.detach().clone())

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))), (self.head.weight - self.start).square().sum()


def with_distance(model, x, y):
    """Both of them."""
    output, distance = model(x)
    return F.mse_loss(at_least_fp32(output), y) + 10 * distance


class Normalized(nn.Module):
    """A head of unit rows."""

    def __init__(self):
        super().__init__()
        self.body, self.head = square(), nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, x):
        return 8 * F.linear(F.normalize(self.body(x)), F.normalize(self.head.weight))


def normed(norm):
    """Layers whose weight is computed."""
    return lambda: stack(lambda: norm(square()))


# ---- recomputed forwards


class Recomputed(nn.Module):
    """A body that runs again in backward."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.body, self.options = square(), stack(square), options

    def forward(self, x):
        x = self.first(x)
        return x + checkpoint(self.body, x, **self.options)


def selective():
    """Keeps products."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    return Recomputed(use_reentrant=False, context_fn=context)


class Offloaded(Recomputed):
    """Saved tensors that lie elsewhere."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.body(self.first(x))


def scripted():
    """TorchScript."""
    return torch.jit.script(stack(square))


def traced():
    """TorchScript, by example."""
    return torch.jit.trace(stack(square), torch.ones(ROWS, WIDE))


# ---- training


def data():
    """Windows of micro-batches."""
    generator = torch.Generator().manual_seed(1)
    return [[[torch.randn(ROWS, WIDE, generator=generator) for _ in "xy"] for _ in range(K)] for _ in range(WINDOWS)]


def noise(model, seed):
    """As large as its parameters' last digits."""
    generator = torch.Generator().manual_seed(seed)
    return [0.02 * torch.randn(p.shape, generator=generator).to(p) for p in model.parameters()]


def add_to_data(p, change):
    """In place, which no version counts."""
    p.data.add_(change)


def copy_to_data(p, change):
    """As swapped averages do."""
    p.data.copy_(p.data + change)


def foreach_on_data(p, change):
    """As optimizers do."""
    torch._foreach_add_([p.data], [change])


def assign_data(p, change):
    """As `vector_to_parameters` does."""
    p.data = p.data + change


def add_in_place(p, change):
    """As `load_state_dict` does."""
    with torch.no_grad():
        p.add_(change)


EDITS = [add_to_data, copy_to_data, foreach_on_data, assign_data, add_in_place]


def train(kind, make, loss_fn=mse, *, lr=0.1, in_flight=1, edit=None, whole=True, early=False, options=None):
    """Train stock, ours or the truth; with noise on the weights in each micro-batch, taken off again, by `edit`.

    Args:
        kind: "stock", "ours" or "truth".
        make: Makes the model.
        loss_fn: Of model, input and target.
        lr: SGD's.
        in_flight: How many forwards run before the first backward.
        edit: Changes a parameter.
        whole: Whether the truth is the big batch; else its forwards are those of stock.
        early: Whether the first forward runs before there is an accumulator.
        options: The accumulator's.

    Returns:
        The parameters before and after.
    """
    torch.manual_seed(0)
    model = make()
    model = model.double() if kind == "truth" else model
    start = [p.detach().clone() for p in model.parameters()]
    acc = ak.FusedAccumulator(model, **(options or {})) if kind == "ours" and not early else None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seed = 0

    def edited(sign):
        for p, change in zip(model.parameters(), noise(model, seed), strict=True):
            edit(p, sign * change)

    def forward(x, y):
        x, y = (t.to(start[0].dtype) for t in (x, y))
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "truth"):
            return loss_fn(model, x, y)

    for window in data():
        parts = window if kind != "truth" or not whole else [[torch.cat(t) for t in zip(*window, strict=True)]]
        losses = []
        for number, (x, y) in enumerate(parts):
            seed += 1
            if edit:
                edited(1)
            losses.append(forward(x, y))
            if kind == "ours" and acc is None:
                acc = ak.FusedAccumulator(model, **(options or {}))
            while losses and (len(losses) >= in_flight or number == len(parts) - 1):
                loss = losses.pop(0)
                acc.backward(loss) if kind == "ours" else (loss / len(parts)).backward()
            if edit:
                edited(-1)
        if kind == "ours":
            acc.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
    return start, [p.detach() for p in model.parameters()]


PROGRAMS = {  # a model, and what `train` is to do
    "own function": (lambda: nn.Sequential(square(), nn.Tanh(), Own(WIDE, WIDE), nn.Tanh(), square()), {}),
    "own function, in chunks": (lambda: nn.Sequential(square(), OwnInChunks(WIDE, WIDE), nn.Tanh(), square()), {}),
    "norms kept by the parent": (lambda: stack(MaxNorm), {"lr": 1.0}),
    "signs kept by the parent": (lambda: stack(Positive), {"lr": 1.0}),
    "signs kept by a hook": (lambda: stack(hooked), {"lr": 1.0}),
    "norms kept, by halves": (lambda: Halves(MaxNorm), {"loss_fn": by_halves, "lr": 1.0}),
    "signs kept, by halves": (lambda: Halves(Positive), {"loss_fn": by_halves, "lr": 1.0}),
    "a criterion that learns": (
        lambda: nn.ModuleList([stack(hooked), Criterion()]),
        {"loss_fn": lambda model, x, y: model[1](at_least_fp32(model[0](x)), y)},
    ),
    "fake quantization later": (lambda: stack(FakeQuantized), {}),
    "a penalty later": (lambda: stack(Pulled), {"loss_fn": penalized, "lr": 1e-2}),
    "decay later": (lambda: stack(Decayed), {"loss_fn": penalized}),
    "autocast off later": (lambda: stack(Precise), {}),
    "renormalized later": (lambda: stack(Renormalized), {"lr": 1.0}),
    "replaced later": (lambda: stack(Replaced), {"lr": 1.0}),
    "a weight handed out": (lambda: Around(HandsOut), {"loss_fn": with_seen, "lr": 1e-2}),
    "read by a hook": (watched("hook"), {"loss_fn": penalized, "lr": 1e-2}),
    "read by a pre-hook": (watched("pre_hook"), {"loss_fn": penalized, "lr": 1e-2}),
    "blocks with compiled forwards": (patched, {}),
    "decorated forwards": (lambda: nn.Sequential(Decorated(), Decorated()), {}),
    "a compiled function": (lambda: nn.Sequential(ByFunction(), ByFunction(), square()), {}),
    "compiled, with a part in fp32": (compiled(PreciseHead), {}),
    "compiled, with a penalty": (compiled(Distance), {"loss_fn": with_distance, "lr": 1e-2}),
    "compiled, norms kept": (compiled(lambda: stack(MaxNorm)), {"lr": 1.0}),
    "compiled, signs kept": (compiled(lambda: stack(hooked)), {"lr": 1.0}),
    "compiled, unit rows": (compiled(Normalized), {}),
    "compiled, weight_norm": (compiled(normed(nn.utils.weight_norm)), {}),
    "compiled, spectral_norm": (compiled(normed(nn.utils.spectral_norm)), {"whole": False}),
    "weight_norm": (normed(nn.utils.parametrizations.weight_norm), {}),
    "weight_norm, by hooks": (normed(nn.utils.weight_norm), {}),
    "spectral_norm, by hooks": (normed(nn.utils.spectral_norm), {"whole": False}),
    "checkpoint": (lambda: Recomputed(use_reentrant=False), {}),
    "reentrant checkpoint": (lambda: Recomputed(use_reentrant=True), {}),
    "selective checkpoint": (selective, {}),
    "checkpoints in flight": (lambda: Recomputed(use_reentrant=False), {"in_flight": 2}),
    "checkpoints, all forwards first": (lambda: Recomputed(use_reentrant=False), {"in_flight": K}),
    "selective checkpoints in flight": (selective, {"in_flight": 2}),
    "a checkpoint before the accumulator": (lambda: Recomputed(use_reentrant=False), {"early": True}),
    "a selective one before it": (selective, {"early": True}),
    "saved on the CPU": (Offloaded, {}),
    "forwards in flight": (lambda: stack(square), {"in_flight": 2}),
    "scripted": (scripted, {}),
    "traced": (traced, {}),
    **{f"noise, {edit.__name__}": (lambda: stack(square), {"edit": edit, "whole": False}) for edit in EDITS},
    **{
        f"compiled, noise, {edit.__name__}": (compiled(lambda: stack(square)), {"edit": edit, "whole": False})
        for edit in (add_to_data, add_in_place)
    },
}


def distance(found, truth):
    """Of parameters to the truth, relative to how far that has moved."""
    (_, ours), (start, right) = found, truth
    moved = [a - b for a, b in zip(right, start, strict=True)]
    return relative_error([a.double() - b for a, b in zip(ours, start, strict=True)], moved)


@pytest.mark.parametrize("options", [{}, {"fuse_weight_gradients": False}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_in_stock(name, options):
    """Parameters are as near to the truth as stock's."""
    make, how = PROGRAMS[name]
    truth, stock, ours = (train(kind, make, **how, options=options) for kind in ("truth", "stock", "ours"))
    assert distance(stock, truth) < 0.1
    assert distance(ours, truth) <= AS_NEAR * distance(stock, truth)
