"""Compiled models on the autocast route: one compilation, the bits of compiled autocast, no casts in the graph."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import accumkernels as ak
from accumkernels.capture.compiled import casting_modules, split
from accumkernels.demo.model import GPT
from tests.support.backends import same_bits

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

WINDOWS = 20
HOW = ["torch.compile", "compile()", "blocks", "blocks' compile()"]


@pytest.fixture
def fresh_dynamo():
    """Graphs of other tests count towards the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts the graphs it is given, and their casts to 16 bit."""

    def __init__(self, name):
        self.graphs, self.backend = [], lookup_backend(name)

    def __call__(self, graph, inputs):
        self.graphs.append([i.dtype for i in inputs if isinstance(i, torch.Tensor)])
        return self.backend(graph, inputs)


def compiled_gpt(how, backend, tied=True):
    """The demo's model in small, and what is called in its place."""
    torch.manual_seed(0)
    model = GPT(vocabulary=40, width=16, depth=2, heads=2, context=8)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    options = {"backend": backend, "fullgraph": True}
    if how == "torch.compile":
        return model, torch.compile(model, **options)
    if how == "compile()":
        model.compile(**options)
    elif how == "blocks":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, **options)
    elif how == "blocks' compile()":
        for block in model.blocks:
            block.compile(**options)
    return model, model


def train(how, backend="aot_eager", windows=WINDOWS, tied=True, **options):
    """The parameters after windows of two micro-batches, the graphs that were compiled, and the accumulator."""
    counting = Counting(backend)
    model, called = compiled_gpt(how, counting, tied)
    acc = ak.FusedAccumulator(called, **options)
    optimizer = torch.optim.AdamW(acc.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(windows):
        for _ in range(2):
            ids, targets = torch.randint(40, (2, 2, 8), generator=generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = called(ids, targets)
            acc.backward(loss)
        acc.step(optimizer, max_norm=1.0)
    return [p.detach().clone() for p in model.parameters()], counting.graphs, acc


def routed(acc):
    """The share of elements that take the route or are fused."""
    counts = [int(n.split()[0].replace(",", "")) for n in repr(acc).partition("elements: ")[2].split(", ")[:3]]
    return 1 - counts[2] / sum(counts)


@functools.cache
def eager_autocast(tied):
    """What the model becomes without a compiler and without the route."""
    found, _, acc = train("eager", tied=tied, autocast_route=False, fuse_weight_gradients=False)
    assert routed(acc) == 0
    return found


@pytest.mark.parametrize("release", ["microbatch", "backward"])
@pytest.mark.parametrize("how", HOW)
def test_the_bits_of_autocast(how, release):
    """Twenty windows, one graph, 16-bit weights in it, and every bit that of eager autocast without the route.

    But for a tied weight in buckets, whose parts are added one by one.
    """
    tied = release == "microbatch"
    found, graphs, acc = train(how, tied=tied, release=release, bucket_bytes=1000, fuse_weight_gradients=False)
    assert all(map(same_bits, found, eager_autocast(tied)))
    assert len(graphs) == 1  # blocks share theirs
    assert graphs[0].count(torch.bfloat16) >= 8  # weights and biases of a block's four layers
    assert routed(acc) > (0.95 if tied else 0.85)  # untied, the embedding's own weight is not


@pytest.mark.starts
@pytest.mark.parametrize("how", HOW)
def test_inductor(how):
    """Generated code too."""
    expected, _, plain = train(how, "inductor", 3, autocast_route=False)
    plain.remove()
    torch._dynamo.reset()
    found, graphs, acc = train(how, "inductor", 3)
    assert all(map(same_bits, found, expected))
    assert len(graphs) == 1
    assert routed(acc) > 0.95


def test_embeddings_outside_compiled_blocks_are_fused():
    """The blocks' weights are routed, the embedding and the tied head are added where they are computed."""
    _, graphs, acc = train("blocks", windows=3, fuse_weight_gradients=True)
    assert len(graphs) == 1
    assert f"{40 * 16:,} fused" in repr(acc)


def test_without_autocast_nothing_changes():
    """Slots hold parameters; so they do in evaluation, without gradients, after the call and after an exception."""
    counting = Counting("eager")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    called = torch.compile(model, backend=counting)
    acc = ak.FusedAccumulator(called)
    x = torch.randn(3, 4)
    acc.backward(called(x).sum())
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            called(x)
        called(x)
        with pytest.raises(Exception, match=r"shape|size"):
            called(torch.randn(3, 5))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert torch.bfloat16 not in graphs_without_gradients(counting)


def graphs_without_gradients(counting):
    """The dtypes in the first two graphs: without autocast, and without gradients."""
    return [dtype for graph in counting.graphs[:2] for dtype in graph]


@pytest.mark.parametrize("how", ["torch.compile", "compile()"])
def test_copies_and_removal(how):
    """Copies and pickles are free of us, and `remove` gives back what `compile()` had made."""
    counting = Counting("eager")
    model, called = compiled_gpt(how, counting)
    before = model._compiled_call_impl
    acc = ak.FusedAccumulator(called)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._compiled_call_impl is None
        twin(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))
    acc.remove()
    assert model._compiled_call_impl is before
    assert not called._forward_pre_hooks


def test_a_changed_parameter_is_rounded_anew():
    """An optimizer's step, or `load_state_dict` in mid-window: compiled code reads what the parameters hold."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    called = torch.compile(model, backend="aot_eager")
    acc = ak.FusedAccumulator(called)
    x = torch.ones(1, 4)

    def output():
        with torch.autocast("cpu", torch.bfloat16):
            return called(x)

    for value in (1.0, 2.0, 3.0):
        model.load_state_dict({"weight": torch.full((2, 4), value), "bias": torch.zeros(2)})
        y = output()
        assert y.tolist() == [[4 * value, 4 * value]]
        acc.backward(y.sum())
    assert acc.main_grad(model.weight).tolist() == [[3.0] * 4] * 2


def test_a_tied_weight_in_a_compiled_model():
    """The embedding reads it as fp32, the head as 16 bit: both parts come, in buckets too."""
    torch.manual_seed(0)
    results = []
    for options in ({"autocast_route": False}, {"release": "backward", "bucket_bytes": 1}, {"release": "microbatch"}):
        torch._dynamo.reset()
        found, _, acc = train("torch.compile", windows=1, fuse_weight_gradients=False, **options)
        results.append(found)
        acc.remove()
    assert all(map(same_bits, results[0], results[2]))
    for a, b in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_split_and_casting_modules():
    """The outermost compiled parts, and inside them the layers that are torch's own."""

    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t() + self.weight.sum()

    inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), Own(2, 2), nn.Conv1d(2, 2, 1))
    inner[0].compile(backend="eager")
    model = nn.Sequential(nn.Embedding(2, 2), torch.compile(inner, backend="eager"))
    eager, compiled = split(model)
    assert eager == [model, model[0]]
    assert compiled == [model[1]]
    assert casting_modules(compiled[0]) == [inner[0], inner[3]]
