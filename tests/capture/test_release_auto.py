"""release="auto": buckets where all gradients together exceed one, and in `acc.backward` alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accumkernels as ak
from accumkernels.capture.inbox import default_bucket_bytes
from tests.support.buckets import BUCKETS, Boom, Tied, hooks, train
from tests.support.models import batch, mlp

ALL = 4 * sum(p.numel() for p in mlp().parameters())  # bytes of all gradients


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({}, False),  # a small model
        ({"bucket_bytes": ALL}, False),
        ({"bucket_bytes": ALL - 1}, True),
        ({"bucket_bytes": 100, "overflow": "microbatch"}, False),
        ({"bucket_bytes": 100, "overflow": "raise"}, False),
        ({"bucket_bytes": 100, "overflow": None}, True),
        ({"bucket_bytes": 100, "release": "microbatch"}, False),
    ],
    ids=str,
)
def test_auto_takes_buckets_where_gradients_exceed_one(options, buckets):
    """And where a micro-batch need not be whole; repr says which, and parameters without buckets have no hooks."""
    model = mlp()
    acc = ak.FusedAccumulator(model, **options)
    assert hooks(model) == (6 if buckets else 0)
    if options.get("release") is None:
        said = f"release='auto' (buckets of {options['bucket_bytes']} bytes)" if buckets else "(whole micro-batches)"
        assert (said if "overflow" not in options or buckets else "release='microbatch'") in repr(acc)


@pytest.mark.parametrize(
    ("device", "largest", "expected"),
    [
        ("cpu", 0, 2 * 2**20),
        ("cpu", 2**20 + 4, 2 * 2**20 + 8),
        ("cpu", 16 * 2**20 + 4, 32 * 2**20),
        ("cuda", 2**30, 16 * 2**20),
    ],
)
def test_default_bucket(device, largest, expected):
    """As docs/memory.md says."""
    assert default_bucket_bytes(torch.device(device), largest) == expected


def test_default_bucket_is_by_the_largest_gradient():
    """Of the dtype that it comes in, which for bf16 is half of its segment."""
    model = nn.Sequential(nn.Linear(1025, 1024, bias=False), *(nn.Linear(8, 1) for _ in range(2)))
    acc = ak.FusedAccumulator(model.bfloat16(), release="backward")
    assert f"(buckets of {2 * 2 * 1025 * 1024:,} bytes)" in repr(acc)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", ["step", "bare"])
def test_auto_has_the_same_bits(bucket_bytes, scaled, form):
    """In `acc.backward` and in a loop's own backward."""
    expected = train(Tied, "microbatch", scaled=scaled, form=form)
    actual = train(Tied, "auto", bucket_bytes, scaled=scaled, form=form)
    assert all(torch.equal(a, e) for a, e in zip(actual[0], expected[0], strict=True))
    assert actual[1] == expected[1]


def test_auto_grows_into_buckets():
    """Parameters that are unfrozen can make a model large."""
    model = mlp()
    model[0].requires_grad_(False)
    acc = ak.FusedAccumulator(model, bucket_bytes=ALL - 1)
    optimizer = torch.optim.SGD(acc.parameters(), lr=0.1)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    acc.step(optimizer)
    assert hooks(model) == 0
    model[0].requires_grad_(True)
    for _ in range(2):
        acc.backward(mse_loss(model(x), y))
    assert hooks(model) == 6
    twin = copy.deepcopy(model)
    mse_loss(twin(x), y).backward()
    acc.finalize(optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_auto_leaves_a_loops_own_backward_to_torch():
    """Its `.grad`s are there, take any weight afterwards, and `zero_grad` throws them away."""
    model = mlp()
    acc = ak.FusedAccumulator(model, bucket_bytes=1)
    x, y = batch(3)
    mse_loss(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    mse_loss(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    acc.accumulate(weight=torch.tensor(2.0))
    assert acc.weight.item() == 2
    assert all(torch.equal(acc.main_grad(p), 2 * e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize(("bucket_bytes", "whole"), [(1, False), (ALL - 1, True), (2**25, True)])
def test_auto_and_an_exception_in_backward(bucket_bytes, whole):
    """The window is as before that micro-batch where nothing of it was added yet; else it is broken."""
    model = mlp()
    acc = ak.FusedAccumulator(model, bucket_bytes=bucket_bytes)
    x, y = batch(3)
    acc.backward(mse_loss(model(x), y))
    kept = [acc.main_grad(p).clone() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        acc.backward(mse_loss(model[2:](Boom.apply(model[:2](x))), y))
    acc.discard()
    if not whole:
        with pytest.raises(RuntimeError, match=r"this window is broken: a backward raised.*acc\.zero_\(\)"):
            acc.backward(mse_loss(model(x), y))
        return
    acc.backward(mse_loss(model(x), y))
    assert acc.micro_batches == 2
    assert all(torch.equal(acc.main_grad(p), 2 * k) for p, k in zip(model.parameters(), kept, strict=True))
