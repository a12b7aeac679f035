"""The model is the same object with and without an accumulator: what it holds, and ops and bits of every forward."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import accumkernels as ak
from tests.support.backends import same_bits
from tests.support.models import elements

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = 512  # a weight of WIDE * WIDE elements is taken from the graph by default


def mlp(*layers):
    """Layers with functions between."""
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def square():
    """A large layer."""
    return nn.Linear(WIDE, WIDE)


class Attention(nn.Module):
    """By torch's module, or by its function."""

    def __init__(self, by_module):
        super().__init__()
        self.whole = nn.MultiheadAttention(WIDE, 4, batch_first=True) if by_module else None
        self.query, self.key, self.value = (square() for _ in range(3))

    def forward(self, x):
        x = x.unsqueeze(0)
        parts = self.query(x), self.key(x), self.value(x)
        return F.scaled_dot_product_attention(*parts) if self.whole is None else self.whole(*parts)[0]


class Language(nn.Module):
    """An embedding and a head, which may be one parameter."""

    def __init__(self, tied):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(600, WIDE), square(), nn.Linear(WIDE, 600, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding((x * 100).long().abs() % 600))) / WIDE


class Mixture(nn.Module):
    """Rows go to the expert that a router in fp32 chooses."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDE, 3), nn.ModuleList(square() for _ in range(3))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            gates = self.router(x).softmax(-1)
        best = gates.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero()[:, 0]
            out = out.index_add(0, rows, (gates[rows, i, None] * expert(x[rows])).to(x.dtype))
        return out


class Adapted(nn.Module):
    """A frozen layer, and what is learned beside it, of low rank."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = square(), square().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDE, 8, bias=False), nn.Linear(8, WIDE, bias=False)

    def forward(self, x):
        x = self.first(x)
        return self.frozen(x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    """The body runs again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.body, self.reentrant = square(), mlp(square(), square()), reentrant

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)


def compiled(model, *parts, backend="eager"):
    """In place."""
    torch._dynamo.reset()
    for part in parts or [model]:
        part.compile(backend=backend)
    return model


def compiled_parts():
    """Two of three layers."""
    model = mlp(square(), square(), square())
    return compiled(model, model[0], model[4], backend="aot_eager")


MODELS = {
    "linear": lambda: mlp(square(), square()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (32, 4, 4)), nn.Conv2d(32, 1024, 3), nn.BatchNorm2d(1024)),
    "attention": lambda: Attention(True),
    "attention by function": lambda: Attention(False),
    "lstm": lambda: nn.LSTM(WIDE, WIDE // 2),
    "language": lambda: Language(False),
    "tied": lambda: Language(True),
    "mixture of experts": Mixture,
    "low rank": Adapted,
    "weight_norm": lambda: mlp(square(), nn.utils.parametrizations.weight_norm(square())),
    "weight_norm, by hooks": lambda: mlp(square(), nn.utils.weight_norm(square())),
    "spectral_norm, by hooks": lambda: mlp(square(), nn.utils.spectral_norm(square())),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "compiled": lambda: compiled(mlp(square(), square())),
    "compiled parts": compiled_parts,
    "scripted": lambda: torch.jit.script(mlp(square(), square())),
    "traced": lambda: torch.jit.trace(mlp(square(), square()), torch.ones(4, WIDE)),
}


TORCHSCRIPT = ("scripted", "traced")  # whose executor chooses ops anew in each of the first calls, and nodes of its own


class Log(TorchDispatchMode):
    """Notes the ops of a forward, and the parameters that the modules hold meanwhile."""

    def __init__(self, model):
        super().__init__()
        self.ops, self.held, self._model = [], [], model

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        self.held.append([id(p) for p in self._model.parameters()])
        return func(*args, **(kwargs or {}))


def contents(model):
    """Everything that its modules and parameters hold; containers with what is in them."""
    found = []
    for holder in (*model.modules(), *model.parameters()):
        found += [type(holder), *vars(holder)]
        for value in vars(holder).values():
            inside = value if isinstance(value, dict) else {}
            found += [value, *inside.keys(), *inside.values()]
    return found


def same_objects(found, expected):
    """Whether two lists hold the very same objects; strings are compared."""
    pairs = zip(found, expected, strict=True)
    return len(found) == len(expected) and all(a is b or (isinstance(a, (str, int)) and a == b) for a, b in pairs)


@contextlib.contextmanager
def untouched(model):
    """What happens inside changes nothing that the model holds."""
    before = contents(model)
    yield
    assert same_objects(contents(model), before)


def forward(model, step, casts):
    """The output under autocast or without it."""
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        output = model(x)
    return (output[0] if isinstance(output, tuple) else output).float()


def checked_forward(model, twin, step, casts, logs):
    """The output, made with the ops and the bits of a model without an accumulator."""
    with torch.no_grad():
        for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
            theirs.copy_(ours)
    held = [id(p) for p in model.parameters()]
    with Log(model) if logs else contextlib.nullcontext() as log:
        output = forward(model, step, casts)
    with Log(twin) if logs else contextlib.nullcontext() as theirs:
        expected = forward(twin, step, casts)
    assert same_bits(output, expected)
    if logs:
        assert log.ops == theirs.ops
        assert all(now == held for now in log.held)
    return output


def copies(model, casts):
    """What a deep copy and a pickled one answer, or the kinds of errors; whether the pickle knows of us."""
    found = []
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        try:
            found.append(forward(make(model), 0, casts))
        except Exception as error:
            found.append(type(error))
    with contextlib.suppress(Exception):
        found.append(b"accumkernels" in pickle.dumps(model))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:None of the inputs")
@pytest.mark.parametrize("options", [{}, {"fuse_weight_gradients": True, "release": "microbatch"}], ids=str)
@pytest.mark.parametrize("casts", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_a_model_changes(name, casts, options):
    """Before, in and after windows, after an error and after Ctrl-C in backward; nor do copies and pickles."""
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.manual_seed(0)
    twin = MODELS[name]()
    logs = not name.startswith("compiled") and name not in TORCHSCRIPT
    with untouched(model):
        acc = ak.FusedAccumulator(model, **options)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.01)
    first = next(p for p in acc.parameters() if p.dim() > 1)
    for step, fails in enumerate([None, None, RuntimeError, None, KeyboardInterrupt, None]):
        output = checked_forward(model, twin, step, casts, logs)
        loss = output.square().mean()

        def fail(grad, fails=fails):
            raise fails("planted")

        hook = None if fails is None else first.register_hook(fail)
        with untouched(model):
            if fails is None:
                acc.backward(loss)
            else:
                with pytest.raises(fails, match="planted"):
                    acc.backward(loss)
                acc.zero_()
        if hook is not None:
            hook.remove()
        with torch.no_grad():
            checked_forward(model, twin, 10 + step, casts, logs)
    assert sum(elements(acc).values()) > 0 or not casts or name in TORCHSCRIPT
    ours, theirs = copies(model, casts), copies(twin, casts)
    assert all(same_bits(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs, strict=True))
    assert True not in ours[2:]
    with untouched(model):
        acc.step(optimizer)
    checked_forward(model, twin, 20, casts, logs)
    with untouched(model):
        acc.remove()
    checked_forward(model, twin, 21, casts, logs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["jvp", "jacrev", "vmap", "grad", "trace", "export", "script"])
def test_transforms_and_traces_run_the_model_itself(what):
    """They get what they get without an accumulator, inside a window."""
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(0))

    def run(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=what != "script"):
            if what == "jvp":
                return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
            if what == "jacrev":
                return torch.func.jacrev(lambda x: model(x)[:, :2])(x[:1])
            if what == "vmap":
                return torch.vmap(model)(x)
            if what == "grad":
                return torch.func.grad(lambda x: model(x).float().sum())(x)
            if what == "trace":
                return torch.jit.trace(model, x, check_trace=False)(x)
            if what == "export":
                return torch.export.export(model, (x,)).module()(x)
            return torch.jit.script(model)(x)

    torch.manual_seed(0)
    model = mlp(square(), square())
    torch.manual_seed(0)
    twin = mlp(square(), square())
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=True)
    acc.backward(forward(model, 0, True).sum())
    assert same_bits(run(model).detach(), run(twin).detach())


def test_an_interrupt_in_forward_leaves_nothing():
    """What is saved on Ctrl-C is the parameters, and the next forward and step are right."""
    torch.manual_seed(0)
    model = mlp(square(), square())
    acc = ak.FusedAccumulator(model)
    acc.backward(forward(model, 0, True).sum())
    saved = copy.deepcopy(model.state_dict())

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, 1, True)
    hook.remove()
    found = model.state_dict()
    assert found.keys() == saved.keys()
    assert all(same_bits(found[name], saved[name]) for name in saved)
    twin = copy.deepcopy(model)
    assert same_bits(forward(model, 2, True), forward(twin, 2, True))
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
