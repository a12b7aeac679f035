"""Losses that couple samples: chunk by chunk as the big batch, in every mode."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

import accumkernels as ak
from tests.support.models import relative_error
from tests.support.towers import Towers, chunked, data, truth

OPTIONS = [
    {},
    {"release": "microbatch"},
    {"release": "backward", "bucket_bytes": 64},
    {"overflow": "microbatch"},
    {"overflow": "raise"},
    {"overflow": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_big_batch(options):
    """Two micro-batches of unequal weight, with dropout and a parameter in the loss, to fp64 rounding."""
    model = Towers()
    acc = ak.FusedAccumulator(model, **options)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    batches, seeds, weights = [data(1), data(2)], [5, 6], [1.0, 3.0]
    expected, losses = truth(model, batches, seeds, weights)
    found = []
    for (x, y), seed, weight in zip(batches, seeds, weights, strict=True):
        torch.manual_seed(seed)
        loss = acc.backward_coupled(chunked(x, y), model.encode, model.loss, weight=weight)
        assert not loss.requires_grad
        found.append(loss.item())
    assert found == pytest.approx(losses, rel=1e-12)
    assert acc.micro_batches == 2
    acc.finalize(optimizer)
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / 4
    assert acc.metrics()["loss"].item() == pytest.approx(mean, rel=1e-12)


def test_plain_accumulation_is_something_else():
    """The reason for the method: chunks with losses of their own have another gradient."""
    model = Towers().eval()
    x, y = data()
    expected, _ = truth(model, [(x, y)], [0])
    acc = ak.FusedAccumulator(model)
    for pair in chunked(x, y):
        acc.backward(model.loss(*model.encode(pair)))
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], expected) > 0.1


def test_random_numbers_go_on_as_after_one_pass():
    """The second pass repeats the first one's random numbers and takes none of those that follow."""
    model = Towers()
    acc = ak.FusedAccumulator(model)
    x, y = data()
    torch.manual_seed(3)
    with torch.no_grad():
        for pair in chunked(x, y):
            model.encode(pair)
    expected = torch.rand(3)
    torch.manual_seed(3)
    acc.backward_coupled(chunked(x, y), model.encode, model.loss)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("structure", ["tensor", "tuple", "one argument", "dict", "whole dict"])
def test_structures(structure):
    """A tensor, a tuple as arguments or as one, a dict as keywords or as one: the same gradient."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64)

    def pull(a, b):
        return (a @ b.T).square().mean()

    encode, loss_fn = {
        "tensor": (model, lambda z: pull(z, z)),
        "tuple": (lambda c: (model(c), model(-c)), pull),
        "one argument": (lambda c: (model(c), model(-c)), lambda both: pull(*both)),
        "dict": (lambda c: {"b": model(-c), "a": model(c)}, pull),
        "whole dict": (lambda c: {"b": model(-c), "a": model(c)}, lambda both: pull(both["a"], both["b"])),
    }[structure]
    expected = torch.autograd.grad(
        pull(model(x), model(x) if structure == "tensor" else model(-x)), list(model.parameters())
    )
    acc = ak.FusedAccumulator(model)
    acc.backward_coupled(x.split(2), encode, loss_fn)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], list(expected)) < 1e-12


def test_a_builtin_loss():
    """A function without a signature gets a pair as two arguments."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    expected = torch.autograd.grad(torch.dist(model(x), model(-x)), list(model.parameters()))
    acc = ak.FusedAccumulator(model)
    acc.backward_coupled(x.split(2), lambda c: (model(c), model(-c)), torch.dist)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], list(expected)) < 1e-12


def test_chunks_without_a_graph():
    """Encodings that are not trained, as of a memory bank, are in the loss and need no backward."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(6, 3, dtype=torch.float64)

    def loss_fn(z):
        return (z @ z.T).square().mean()

    encoded = torch.cat([model(x[:4]), model(x[4:]).detach()])
    expected = torch.autograd.grad(loss_fn(encoded), list(model.parameters()))
    acc = ak.FusedAccumulator(model)
    *chunks, bank = x.split(2)
    acc.backward_coupled([*chunks, bank], lambda c: model(c).detach() if c is bank else model(c), loss_fn)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], list(expected)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"release": "backward", "fuse_weight_gradients": True}], ids=str)
def test_autocast_and_scaler(options):
    """Under bf16 autocast with a GradScaler: to the rounding of bf16, and the scale is divided out."""
    model = Towers(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    acc = ak.FusedAccumulator(model, scaler=scaler, **options)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = data(dtype=torch.float32)
    for seed in (5, 6):
        expected, _ = truth(model, [(x, y)], [seed])
        torch.manual_seed(seed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            acc.backward_coupled(chunked(x, y), model.encode, model.loss)
        acc.finalize(optimizer)
        assert relative_error([p.grad for p in model.parameters()], expected) < 0.03
        acc.zero_()


@pytest.mark.parametrize("options", [{}, {"release": "backward", "bucket_bytes": 8}], ids=str)
@pytest.mark.parametrize("when", ["first", "second"])
def test_exceptions(options, when):
    """An exception in either pass leaves the window as it was; with buckets already added, it is broken and says so."""
    model = Towers().eval()
    acc = ak.FusedAccumulator(model, **options)
    x, y = data()
    acc.backward_coupled(chunked(x, y), model.encode, model.loss)
    calls = 0

    def encode(pair):
        nonlocal calls
        calls += 1
        if calls == (2 if when == "first" else 5):
            raise ValueError("planted")
        return model.encode(pair)

    with pytest.raises(ValueError, match="planted"):
        acc.backward_coupled(chunked(x, y), encode, model.loss)
    assert all(p.grad is None for p in model.parameters())
    assert acc.micro_batches == 1
    if options and when == "second":
        with pytest.raises(RuntimeError, match="broken"):
            acc.finalize()
        return
    acc.finalize()
    expected, _ = truth(model, [(x, y)], [0])
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12


def test_overflow_drops_the_whole_micro_batch():
    """With overflow="microbatch", a chunk whose gradient is not finite drops all chunks, and nothing else."""
    model = Towers().eval()
    acc = ak.FusedAccumulator(model, overflow="microbatch")
    x, y = data()
    expected, losses = truth(model, [(x, y)], [0])
    acc.backward_coupled(chunked(x, y), model.encode, model.loss)
    bad = x.clone()
    bad[5] = torch.inf
    acc.backward_coupled(chunked(bad, y), model.encode, model.loss)
    acc.finalize()
    assert relative_error([p.grad for p in model.parameters()], expected) < 1e-12
    assert acc.metrics()["loss"].item() == pytest.approx(losses[0], rel=1e-12)


def test_what_is_refused():
    """BatchNorm in training, no chunks, encodings without rows, and an encoder that changes its mind."""
    x = torch.randn(4, 3)
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    acc = ak.FusedAccumulator(normed)
    with pytest.raises(ValueError, match=r"backward_coupled\(\): '1' is a BatchNorm in training.*replace_batchnorm"):
        acc.backward_coupled(x.split(2), normed, torch.sum)
    normed.eval()
    acc.backward_coupled(x.split(2), normed, torch.sum)
    acc.zero_()
    with pytest.raises(ValueError, match="chunks must not be empty"):
        acc.backward_coupled([], normed, torch.sum)
    with pytest.raises(TypeError, match="encode must return a tensor.*got list for chunk 0"):
        acc.backward_coupled(x.split(2), lambda c: [normed(c)], torch.sum)
    with pytest.raises(ValueError, match=r"one row per sample, got shapes \[\(\)\]"):
        acc.backward_coupled(x.split(2), lambda c: normed(c).sum(), torch.sum)
    counts = iter([1, 2])
    with pytest.raises(ValueError, match="encode returned 1 tensors for chunk 0 and 2 for chunk 1"):
        acc.backward_coupled(x.split(2), lambda c: (normed(c),) * next(counts), torch.sum)
    sizes = iter([2, 2, 1])
    with pytest.raises(RuntimeError, match=r"shapes \[\(1, 3\)\] for chunk 0 in the second pass"):
        acc.backward_coupled(x.split(2), lambda c: normed(c[: next(sizes)]), torch.sum)
    assert acc.micro_batches == 0


def test_one_chunk_of_activations_is_alive():
    """What autograd saves for backward never spans two chunks."""
    model = Towers().eval()
    acc = ak.FusedAccumulator(model)
    x, y = data()
    alive, peak = 0, 0

    class Counted:
        def __init__(self, tensor):
            nonlocal alive, peak
            self.tensor, self.nbytes = tensor, tensor.nbytes
            alive += self.nbytes
            peak = max(peak, alive)

        def __del__(self):
            nonlocal alive
            alive -= self.nbytes

    def encode(pair):
        with torch.autograd.graph.saved_tensors_hooks(Counted, lambda counted: counted.tensor):
            return model.encode(pair)

    acc.backward_coupled(chunked(x, y), encode, model.loss)
    of_chunks, peak = peak, 0
    acc.backward_coupled([(x, y)], encode, model.loss)
    assert 0 < of_chunks <= peak / 2  # parameters that are saved do not shrink


@pytest.mark.parametrize("overflow", ["window", "microbatch"])
def test_a_loss_with_parameters_of_the_encoders(overflow):
    """Under autocast its 16-bit gradient and the chunks' are one gradient: added as in stock, and measured as one."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6, bias=False)
    twin = copy.deepcopy(model)

    def encode(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def loss(encodings, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return (encodings @ weight).float().square().mean()

    acc = ak.FusedAccumulator(model, release="microbatch", overflow=overflow, noise_scale=True)
    batches = [torch.randn(4, 6), torch.randn(4, 6)]
    for x in batches:
        acc.backward_coupled(x.split(2), encode, lambda e: loss(e, model.weight))
        with torch.autocast("cpu", torch.bfloat16):
            encodings = twin(x).detach().requires_grad_()
        loss(encodings, twin.weight).backward()
        for part, grad in zip(x.split(2), encodings.grad.split(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                encoded = twin(part)
            encoded.backward(grad)
    acc.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert relative_error([model.weight], [twin.weight - twin.weight.grad / 2]) < 1e-6  # fp32, in another order
    assert acc.noise_scale().windows == 1


@pytest.mark.parametrize("options", [{}, {"fuse_weight_gradients": True}, {"release": "microbatch"}], ids=str)
def test_noise_scale(options):
    """By hand in float64, also where a bucket holds less than all gradients."""
    model = Towers().eval()
    acc = ak.FusedAccumulator(model, bucket_bytes=64, noise_scale=True, **options)
    batches, weights = [data(1), data(2)], [1.0, 3.0]
    grads = [torch.cat([g.flatten() for g in truth(model, [pair], [0])[0]]) for pair in batches]
    for (x, y), weight in zip(batches, weights, strict=True):
        acc.backward_coupled(chunked(x, y), model.encode, model.loss, weight=weight)
    acc.step(torch.optim.SGD(acc.parameters(), lr=0.1))
    mean = (grads[0] + 3 * grads[1]) / 4
    trace = grads[0].square().sum() + 3 * grads[1].square().sum() - 4 * mean.square().sum()
    found = acc.noise_scale()
    assert found.windows == 1
    assert found.trace == pytest.approx(trace.item(), rel=1e-9)
    assert found.grad_squared_norm == pytest.approx((mean.square().sum() - trace / 4).item(), rel=1e-9)


def test_random_numbers_go_on_after_the_loss():
    """The second pass draws the numbers of the first again; what comes next is what comes after the loss."""
    model = Towers()
    acc = ak.FusedAccumulator(model)
    x, y = data(1)

    def loss(*encodings):
        return model.loss(*encodings) + 0 * torch.rand(())

    torch.manual_seed(5)
    with torch.no_grad():
        pairs = [model.encode(chunk) for chunk in chunked(x, y)]
        loss(*map(torch.cat, zip(*pairs, strict=True)))
    expected = torch.rand(4)
    torch.manual_seed(5)
    acc.backward_coupled(chunked(x, y), model.encode, loss)
    assert torch.equal(torch.rand(4), expected)


class Pair(NamedTuple):
    """Encodings by name."""

    x: torch.Tensor
    y: torch.Tensor


def test_named_encodings_keep_their_names():
    """A loss of one argument finds them under these."""
    model = Towers()
    acc = ak.FusedAccumulator(model)
    x, y = data(1)
    loss = acc.backward_coupled(
        chunked(x, y), lambda chunk: Pair(*model.encode(chunk)), lambda both: model.loss(both.x, both.y)
    )
    assert torch.isfinite(loss)
