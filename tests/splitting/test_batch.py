"""acc.backward_batch: exact whatever the split, and whatever runs out of memory."""

from __future__ import annotations

import dataclasses
import math
import random
import weakref
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.splitting.memory import LiveBytes
from accumkernels.splitting.run import adding_nothing
from tests.splitting.test_samples import Encoding, Pair
from tests.support.models import batch, grads_of, mlp, relative_error
from tests.support.splitting import ERRORS, Planted, room, truth

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-12  # of float64
SINGLE = 2e-6  # of float32, in which sums are
LEFT = 8 * 14  # bytes after an error: a scaler's state, and the weights of micro-batches that ended
HALF = 3e-2  # of bfloat16, in which autocast computes


@dataclasses.dataclass
class Record:
    """A batch with parts that have no samples."""

    x: Any
    y: Any
    w: Any
    scale: Any


TREES = {
    "tuple": (lambda x, y, w, s: (x, (y, w), s, "text"), lambda t: (t[0], *t[1], t[2])),
    "dict": (lambda x, y, w, s: {"x": x, "rest": [y, w, s]}, lambda t: (t["x"], *t["rest"])),
    "record": (Record, lambda t: (t.x, t.y, t.w, t.scale)),
    "encoding": (lambda x, y, w, s: Encoding({"x": x, "y": y, "w": w, "s": s}, [1]), lambda t: tuple(t.values())),
    "named": (lambda x, y, w, s: Pair(x, {"y": y, "w": w, "s": s}), lambda t: (t.x, *t.y.values())),
}


def limited(options):
    """Options whose memory_limit counts from what is alive."""
    return {**options, "memory_limit": room(options["memory_limit"])} if "memory_limit" in options else options


def weighted(model, x, y, w, scale):
    """The mean of samples' losses by their weights; 0 / 0 without any."""
    losses = ((model(x) - y) ** 2).mean(1)
    return scale.sum() * (losses * w).sum() / w.sum()


def drawn(count, seed, dtype=torch.float64):
    """Inputs, targets and weights, of which some are 0."""
    x, y = batch(count, dtype, seed)
    w = torch.randint(0, 4, (count,), generator=torch.Generator().manual_seed(seed)).to(dtype)
    w[0] = 1.0
    return x, y, w


SPLITS = st.fixed_dictionaries(
    {},
    optional={
        "micro_batch": st.integers(1, 12) | st.just("auto"),
        "budget": st.integers(1, 30),
        "multiple_of": st.integers(1, 3),
        "cost": st.lists(st.integers(0, 9), min_size=12, max_size=12) | st.just(lambda sample: 2.0),
    },
)
OPTIONS = st.fixed_dictionaries(
    {"release": st.sampled_from(["auto", "backward", "microbatch"])},
    optional={
        "bucket_bytes": st.sampled_from([8, 100, 600]),
        "overflow": st.sampled_from(["window", "microbatch", None]),
        "memory_limit": st.sampled_from([20_000, 100_000, 2**40]),  # beside what is alive
    },
).filter(lambda o: not (o["release"] == "backward" and o.get("overflow") == "microbatch"))


@given(
    st.sampled_from(sorted(TREES)),
    st.integers(1, 12),
    SPLITS,
    OPTIONS,
    st.sets(st.integers(1, 150), max_size=4),
    st.sampled_from(ERRORS),
    st.sampled_from(["given", "returned"]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
@pytest.mark.native
def test_equals_the_big_batch(tree, count, split, options, at, error, weights, scaled):
    """Random trees, splits, weights and options, with memory that runs out in any op; and nothing is left of that."""
    make, take = TREES[tree]
    if isinstance(split.get("cost"), list):
        split["cost"] = split["cost"][:count]
    model = mlp(torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    scale = torch.tensor(0.5, dtype=torch.float64) if count % 2 else torch.full((1,), 0.5, dtype=torch.float64)
    with ak.FusedAccumulator(model, scaler=scaler, **limited(options)) as acc:
        optimizer = torch.optim.SGD(model.parameters())
        planted, counter = Planted(at, error), LiveBytes()
        planted.watch(acc)
        left = []
        let_go = acc.engine.batches._memory.let_go
        acc.engine.batches._memory.let_go = lambda: (let_go(), left.append(counter.live))

        def loss_fn(part):
            x, y, w, s = take(part)
            planted.size = len(x) if w.sum() else 0  # what has no weight is left out, and not accumulated afterwards
            loss = weighted(model, x, y, w, s)
            return (loss, w.sum()) if weights == "returned" else loss

        def weight(part):
            planted.tick()
            return take(part)[2].sum()

        for window in range(3):
            data = drawn(count, window)
            counter.add([*model.parameters(), *acc.flat_buffers, *data, scale])
            before = counter.live
            with planted, counter:
                report = acc.backward_batch(
                    make(*data, scale), loss_fn, weight=weight if weights == "given" else None, **split
                )
            assert max(left, default=0) - before <= LEFT
            left.clear()
            loss, grads = truth(model, lambda twin, data=data: weighted(twin, *data, scale))
            acc.finalize(optimizer)
            assert report.loss.item() == pytest.approx(loss, rel=EXACT)
            assert acc.weight.item() == data[2].sum()
            assert relative_error(grads_of(acc), grads) < EXACT
            assert max(report.sizes) <= (split["micro_batch"] if isinstance(split.get("micro_batch"), int) else count)
            acc.zero_()


def sequences(count, seed):
    """Samples of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [{"x": torch.randn(n, 5, generator=generator, dtype=torch.float64)} for n in lengths]


def padded(samples):
    """Padded to the longest, and which tokens count."""
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample["x"]) for sample in samples])
    return x, torch.arange(x.shape[1]) < lengths[:, None]


def token_loss(model, x, mask):
    """The mean over tokens that count."""
    return (model(x) ** 2).sum(-1)[mask].mean()


@given(
    st.integers(1, 12),
    st.none() | st.integers(1, 60),
    OPTIONS,
    st.sets(st.integers(1, 150), max_size=4),
    st.sampled_from(ERRORS),
)
@settings(max_examples=15, deadline=None)
def test_lists_with_collate(count, budget, options, at, error):
    """Each micro-batch is padded to its own longest; memory may run out in collate, too."""
    model = mlp(torch.float64)
    with ak.FusedAccumulator(model, **limited(options)) as acc:
        planted = Planted(at, error)
        planted.watch(acc)
        collated = []

        def collate(samples):
            planted.size = len(samples)
            planted.tick()
            collated.append([len(sample["x"]) for sample in samples])
            return padded(samples)

        for window in range(3):
            samples = sequences(count, window)
            collated.clear()
            with planted:
                report = acc.backward_batch(
                    samples,
                    lambda part: token_loss(model, *part),
                    collate=collate,
                    budget=budget,
                    weight=lambda part: part[1].sum(),
                )
            loss, grads = truth(model, lambda twin, samples=samples: token_loss(twin, *padded(samples)))
            acc.finalize()
            assert report.loss.item() == pytest.approx(loss, rel=EXACT)
            assert relative_error(grads_of(acc), grads) < EXACT
            assert sum(report.sizes) == count
            if budget is not None:
                assert all(len(part) == 1 or max(part) * len(part) <= budget for part in collated)
            acc.zero_()


def seeded():
    """Python, numpy and torch begin alike."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def numbers():
    """A number of each."""
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@given(st.sets(st.integers(1, 150), max_size=4), OPTIONS, st.integers(2, 12))
@settings(max_examples=15, deadline=None)
def test_random_numbers(at, options, micro_batch):
    """Dropout's masks, and Python's and numpy's numbers, are those of a run that was split so from the start."""
    model = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.Linear(9, 3)).double()
    x, y = batch(12, torch.float64)
    planted = Planted(at)

    def loss_of(x, y):
        noise = sum(numbers())
        return noise * mse_loss(model(x), y)

    def loss_fn(part):
        planted.size = len(part[0])
        return loss_of(*part), len(part[0])

    with ak.FusedAccumulator(model, **limited(options)) as acc:
        planted.watch(acc)
        for _ in range(2):
            seeded()
            with planted:
                report = acc.backward_batch((x, y), loss_fn, micro_batch=micro_batch)
            after = numbers()
            acc.finalize()
            grads = [grad.clone() for grad in grads_of(acc)]
            acc.zero_()
            seeded()
            expected = [torch.zeros_like(p) for p in model.parameters()]
            for rows in torch.arange(12).split(report.sizes):
                loss = loss_of(x[rows], y[rows])
                for total, grad in zip(expected, torch.autograd.grad(loss, model.parameters()), strict=True):
                    total += grad * len(rows) / 12
            assert relative_error(grads, expected) < EXACT
            assert after == numbers()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("release", ["auto", "backward", "microbatch"])
def test_nothing_is_left_alive(where, release):
    """Not what frames, chained errors or graphs of the failed try held, when the next one begins."""
    model = mlp()
    held = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if len(grad) > 2 and where == "backward":
                raise torch.OutOfMemoryError("planted")
            return grad

    def loss_fn(part):
        assert [ref for ref in held if ref() is not None] == []
        hidden = Fails.apply(model[:2](part[0]))
        held.append(weakref.ref(hidden))
        if len(hidden) <= 2:  # it will run; what the user's own code leaves alive is the user's
            held.clear()
            return mse_loss(model[2:](hidden), part[1])
        cycle = [hidden]
        cycle.append(cycle)
        if where == "forward":
            try:
                raise torch.OutOfMemoryError("planted")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("a library's own") from error
        return mse_loss(model[2:](hidden), part[1])

    with ak.FusedAccumulator(model, release=release, bucket_bytes=100) as acc:
        try:
            raise KeyError("of the caller")
        except KeyError as outer:
            report = acc.backward_batch(batch(8), loss_fn)
            assert outer.__traceback__ is not None  # it is the caller's
        assert report.sizes == [2, 2, 2, 2] and report.out_of_memory == 2


# ---- the rest of a window


def simple(model):
    """A mean over samples."""
    return lambda part: mse_loss(model(part[0]), part[1])


def test_several_calls_are_one_window():
    """Their samples count alike."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model)
    x, y = batch(13, torch.float64)
    losses = [
        acc.backward_batch((x[a:b], y[a:b]), simple(model), micro_batch=2).loss for a, b in ((0, 5), (5, 6), (6, 13))
    ]
    acc.finalize()
    loss, grads = truth(model, lambda twin: mse_loss(twin(x), y))
    assert relative_error(grads_of(acc), grads) < EXACT
    assert sum(n * part.item() for n, part in zip((5, 1, 7), losses, strict=True)) / 13 == pytest.approx(loss)


def test_masters():
    """A bf16 model through fp32 masters: the sums are those of the same micro-batches by hand, to the bit."""
    x, y = batch(12, torch.bfloat16)
    found = []
    for by_hand in (False, True):
        model = mlp(torch.bfloat16)
        acc = ak.FusedAccumulator(model, master_weights=True)
        optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
        if by_hand:
            for start in range(0, 12, 4):
                part = slice(start, start + 4)
                acc.backward(mse_loss(model(x[part]), y[part]), weight=4)
        else:
            acc.backward_batch((x, y), simple(model), micro_batch=4)
        acc.step(optimizer)
        found.append([p.detach().clone() for p in acc.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_noise_scale():
    """Micro-batches of unequal size are weighted as they are: McCandlish's estimate from their own gradients."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, noise_scale=True)
    x, y = batch(11, torch.float64)
    report = acc.backward_batch((x, y), simple(model), budget=3)
    acc.finalize()
    start, squares = 0, 0.0
    _, mean = truth(model, lambda twin: mse_loss(twin(x), y))
    norm = sum(float(g.square().sum()) for g in mean)
    for size in report.sizes:
        part = slice(start, start + size)
        _, grads = truth(model, lambda twin, part=part: mse_loss(twin(x[part]), y[part]))
        squares += size * sum(float(g.square().sum()) for g in grads)
        start += size
    trace = (squares - 11 * norm) / (len(report.sizes) - 1)
    scale = acc.noise_scale()
    assert float(scale.trace) == pytest.approx(trace, rel=1e-9)
    assert float(scale.grad_squared_norm) == pytest.approx(norm - trace / 11, rel=1e-9)


def test_compiled():
    """Sizes are multiples, so that a compiled model sees two of them; the gradient is the big batch's."""
    model = mlp(torch.float64)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    acc = ak.FusedAccumulator(model)
    x, y = batch(14, torch.float64)
    report = acc.backward_batch((x, y), lambda part: mse_loss(compiled(part[0]), part[1]), micro_batch=5, multiple_of=4)
    assert report.sizes == [4, 4, 4, 2]
    acc.finalize()
    _, grads = truth(model, lambda twin: mse_loss(twin(x), y))
    assert relative_error(grads_of(acc), grads) < EXACT


def test_counting_bytes_does_not_keep_a_model_from_being_compiled():
    """What a memory limit measures runs eagerly; what has run once is compiled."""
    model, graphs = mlp(), []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph

    compiled = torch.compile(model, backend=backend, dynamic=False)
    acc = ak.FusedAccumulator(model, memory_limit=2**30)
    peaks = []
    for window in range(3):
        assert len(graphs) == (window == 2)
        report = acc.backward_batch(batch(8), lambda part: mse_loss(compiled(part[0]), part[1]))
        peaks.append(report.peak_bytes is not None)
        acc.zero_()
    assert peaks == [True, False, False]


@pytest.mark.parametrize("options", [{}, {"fuse_weight_gradients": True}], ids=str)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_and_autocast(options, outside, autocast):
    """With weights fused or in 16 bits, by autocast of the loss's own or around the call, and errors in between."""
    model = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = batch(12)
    acc = ak.FusedAccumulator(model, bucket_bytes=1000, **options)
    casts = [torch.autocast("cpu", torch.bfloat16, enabled=autocast and inner) for inner in (outside, not outside)]
    fails = []

    def loss_fn(part):
        with casts[1]:
            loss = mse_loss(model(part[0]).float(), part[1])
        if fails:
            raise fails.pop()
        return loss

    _, grads = truth(model, lambda twin: mse_loss(twin(x.double()), y.double()))
    for window in range(4):
        fails[:] = [torch.OutOfMemoryError("planted")] * (window == 1)
        with casts[0]:
            report = acc.backward_batch((x, y), loss_fn, micro_batch=5)
        assert report.out_of_memory == (window == 1)
        acc.finalize()
        assert relative_error(grads_of(acc), grads) < (HALF if autocast else SINGLE)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        acc.zero_()


def test_proven_one_that_fails():
    """A window with nothing else begins anew; one with other micro-batches says what to do."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model, release="backward", bucket_bytes=8)
    x, y = batch(8, torch.float64)
    acc.backward_batch((x, y), simple(model))
    acc.zero_()
    fails = []

    def late(grad):
        if fails:
            raise fails.pop()

    model[0].weight.register_hook(late)
    fails.append(torch.OutOfMemoryError("planted"))
    report = acc.backward_batch((x, y), simple(model))
    assert (report.sizes, report.out_of_memory) == ([4, 4], 1)
    acc.finalize()
    assert relative_error(grads_of(acc), truth(model, lambda twin: mse_loss(twin(x), y))[1]) < EXACT
    acc.zero_()
    acc.backward_batch((x, y), simple(model))
    fails.append(torch.OutOfMemoryError("planted"))
    with pytest.raises(RuntimeError, match=r"memory ran out in a micro-batch of cost 4, which had fitted before"):
        acc.backward_batch((x, y), simple(model))
    acc.zero_()
    acc.backward_batch((x, y), simple(model))
    acc.finalize()
    assert relative_error(grads_of(acc), truth(model, lambda twin: mse_loss(twin(x), y))[1]) < EXACT


def test_one_sample_that_does_not_fit():
    """Its cost, the bytes and the allocator's words are in the error; what ran before stays."""
    model = mlp()
    acc = ak.FusedAccumulator(model, memory_limit=10**7)

    def loss_fn(part):
        if part[0][0, 0] == 7:
            raise torch.OutOfMemoryError("of the allocator")
        return mse_loss(model(part[0]), part[1])

    x, y = batch(4)
    x[3, 0] = 7
    cost = [3.0, 2.0, 1.5, 2.5]
    text = r"one sample of cost 2.5, which is expected to take .* does not fit in memory of 9.5 MiB: of the allocator"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        acc.backward_batch((x, y), loss_fn, cost=cost, micro_batch=1)
    assert acc.micro_batches == 1 and acc.weight.item() == 1
    acc.step(torch.optim.SGD(model.parameters(), lr=0.1))
    acc.remove()
    with pytest.raises(torch.OutOfMemoryError, match="one sample of cost 1 does not fit in memory: of the allocator"):
        ak.FusedAccumulator(model).backward_batch((x[3:], y[3:]), loss_fn)


@pytest.mark.parametrize("release", ["backward", "microbatch"])
@pytest.mark.parametrize("proven", [False, True])
def test_one_sample_that_breaks_the_window(release, proven):
    """Where its gradients were added in buckets before memory ran out, the error says so, and zero_() goes on."""
    model = mlp(torch.float64)
    x, y = batch(4, torch.float64)
    acc = ak.FusedAccumulator(model, release=release, bucket_bytes=8)
    if proven:
        acc.backward_batch((x, y), simple(model), micro_batch=1)
        acc.zero_()
    acc.backward_batch((x[:2], y[:2]), simple(model), micro_batch=1)

    def late(grad):
        raise torch.OutOfMemoryError("of the allocator")

    hook = model[0].weight.register_hook(late)
    with pytest.raises(torch.OutOfMemoryError, match="one sample of cost 1.* does not fit in memory: of") as caught:
        acc.backward_batch((x[2:3], y[2:3]), simple(model))
    hook.remove()
    breaks = release == "backward"
    assert ("the window is broken: drop it with acc.zero_()" in str(caught.value)) == breaks
    rows = slice(2)
    if breaks:
        with pytest.raises(RuntimeError, match="this window is broken"):
            acc.backward_batch((x, y), simple(model))
        acc.zero_()
        acc.backward_batch((x, y), simple(model))
        rows = slice(4)
    acc.finalize()
    expected = truth(model, lambda twin: mse_loss(twin(x[rows]), y[rows]))[1]
    assert relative_error(grads_of(acc), expected) < EXACT


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), RuntimeError("CUDA error: illegal access")])
def test_other_exceptions(error):
    """They come out as they are, with a note; what ran counts, the failed one adds nothing."""
    model = mlp(torch.float64)
    acc = ak.FusedAccumulator(model)
    x, y = batch(6, torch.float64)

    def loss_fn(part):
        if part[2][0] == 4:
            raise error
        return mse_loss(model(part[0]), part[1])

    with pytest.raises(type(error)) as raised:
        acc.backward_batch((x, y, torch.arange(6)), loss_fn, micro_batch=2)
    assert raised.value is error
    assert error.__notes__ == ["backward_batch(): 2 of 3 micro-batches ran"]
    acc.finalize()
    assert relative_error(grads_of(acc), truth(model, lambda twin: mse_loss(twin(x[:4]), y[:4]))[1]) < EXACT


def test_weight_of_zero():
    """A part without weight has no backward, and no forward if its weight is known before; its NaN spoils nothing."""
    model = mlp(torch.float64)
    x, y = batch(6, torch.float64)
    x[2:4] = math.nan
    w = torch.tensor([1.0, 1, 0, 0, 1, 1], dtype=torch.float64)
    keep = torch.tensor([0, 1, 4, 5])
    _, grads = truth(model, lambda twin: mse_loss(twin(x[keep]), y[keep]))
    for returned in (False, True):
        ran = []

        def loss_fn(part, returned=returned, ran=ran):
            ran.append(1)
            loss = mse_loss(model(part[0]), part[1])
            return (loss, part[2].sum()) if returned else loss

        weight = None if returned else lambda part: part[2].sum()
        with ak.FusedAccumulator(model) as acc:
            report = acc.backward_batch((x, y, w), loss_fn, micro_batch=2, weight=weight)
            acc.finalize()
            assert relative_error(grads_of(acc), grads) < EXACT
            acc.zero_()
        assert report.sizes == [2, 2] and len(ran) == 2 + returned
        assert math.isfinite(report.loss)


def test_empty_batches():
    """Nothing runs; the window is as it was."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    report = acc.backward_batch((torch.ones(0, 5), torch.ones(0, 3)), simple(model))
    assert report.sizes == [] and math.isnan(report.loss)
    assert acc.backward_batch([], simple(model), collate=list).sizes == []
    assert acc.micro_batches == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"micro_batch": 0}, ValueError, "micro_batch must be positive, got 0"),
        ({"micro_batch": True}, TypeError, "micro_batch must be 'auto' or a number of samples, got True"),
        ({"budget": -1.5}, ValueError, "budget must be positive and finite, got -1.5"),
        ({"budget": math.nan}, ValueError, "budget must be positive and finite, got nan"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be positive, got 0"),
        ({"cost": lambda sample: math.nan}, ValueError, "cost of sample 0 .*, got nan"),
        ({"loss_fn": lambda part: part[0]}, ValueError, r"loss of one element, got a tensor of shape \(4, 5\)"),
        ({"loss_fn": lambda part: 3.0}, TypeError, "what loss_fn returns must be a tensor, .* got 3.0"),
        ({"loss_fn": lambda part: (1, 2, 3, 4)}, ValueError, r"got 4 values; .* third: \(loss, weight, extra\)"),
        ({"weight": lambda part: -2}, ValueError, "weight must be non-negative and finite, got -2"),
        ({"weight": lambda part: math.nan}, ValueError, "weight must be non-negative and finite, got nan"),
        ({"weight": lambda part: torch.ones(2)}, ValueError, r"weight must be a number .* shape \(2,\)"),
        (
            {"weight": len, "loss_fn": lambda part: (part[0].sum(), 1)},
            ValueError,
            "loss_fn returned a weight, and weight= was given",
        ),
    ],
)
def test_misuse_names_the_value(arguments, error, text):
    """And nothing is counted; an int larger than the batch is none."""
    model = mlp()
    acc = ak.FusedAccumulator(model)
    with pytest.raises(error, match=text):
        acc.backward_batch(batch(4), **{"loss_fn": simple(model), **arguments})
    assert acc.micro_batches == 0
    assert acc.backward_batch(batch(4), simple(model), micro_batch=10**6).sizes == [4]
    acc.finalize()
    with pytest.raises(RuntimeError, match=r"backward_batch\(\) after finalize\(\)"):
        acc.backward_batch(batch(4), simple(model))


def test_nothing_stays_on_nodes_that_somebody_holds():
    """As DistributedDataParallel holds those of parameters: the next backward has its gradient."""
    p = nn.Parameter(torch.ones(3))
    held = p.view_as(p).grad_fn.next_functions[0][0]
    loss = (p * torch.nan).sum()
    with adding_nothing(loss):
        loss.backward()
    assert p.grad.tolist() == [0.0] * 3
    p.grad = None
    p.sum().backward()
    assert p.grad.tolist() == [1.0] * 3 and held is not None


class Island(nn.Module):
    """A part in fp32 inside of autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.last(self.first(x).tanh())


def test_autocast_around_backward_batch_is_for_the_forward():
    """Else backward would multiply in bf16 what the forward has kept in fp32."""
    model = Island()
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    expected = torch.autograd.grad(mse_loss(model(x), y), list(model.parameters()))
    acc = ak.FusedAccumulator(model, fuse_weight_gradients=False)
    with torch.autocast("cpu", torch.bfloat16):
        acc.backward_batch((x, y), lambda part: mse_loss(model(part[0]), part[1]), micro_batch=4)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-6
