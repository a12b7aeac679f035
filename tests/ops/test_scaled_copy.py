"""scaled_copy_ on every backend: to the last bit what the plain-torch reference does."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accumkernels.ops import reference
from tests.support.backends import (
    FLOATS,
    SIZES,
    assert_same_bits,
    compared,
    dtype_id,
    every_pattern,
    on_every_backend,
    place,
    random,
    scalar,
)


def check(backend, inputs, dtypes, divisor=None, checked=True, shift=0):
    """Compare outputs of these dtypes, and what is behind them, with the reference. Returns found_inf."""
    results = []
    for module, device in ((reference, torch.device("cpu")), (backend.module, backend.device)):
        outputs = []
        for tensor, dtype in zip(inputs, dtypes, strict=True):
            canary = random(tensor.numel() + shift + 40, dtype, seed=5).to(device)
            outputs.append((canary, canary.as_strided(tensor.shape, tensor.stride(), shift)))
        found = scalar(0.0).to(device)
        kwargs = {"found_inf": found} if checked else {}
        if divisor is not None:
            kwargs["divisor"] = scalar(divisor).to(device)
        module.scaled_copy_([o for _, o in outputs], [place(t, device, shift) for t in inputs], **kwargs)
        results.append(([canary.cpu() for canary, _ in outputs], found.item()))
    for i, (actual, expected) in enumerate(zip(results[1][0], results[0][0], strict=True)):
        assert_same_bits(actual, expected, f"outputs[{i}]")
    assert results[1][1] == results[0][1]
    return results[1][1]


@pytest.mark.parametrize("divisor", [None, 3.0, 1e-4], ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("target", FLOATS, ids=dtype_id)
@compared
def test_dtypes(backend, target, source, divisor):
    """All pairs, from subnormal to overflowing values, at sizes around every width."""
    sizes = [1, 9, 33, 4097] if backend.slow else SIZES
    inputs = [random(n, source, seed=n, magnitude=10.0 ** (n % 12 - 7)) for n in sizes]
    check(backend, inputs, [target] * len(inputs), divisor)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@compared
def test_mixed_pairs(backend, shift):
    """All pairs of dtypes in one call, empty tensors between them."""
    pairs = list(itertools.product(FLOATS, FLOATS))
    inputs = [random(17 + i if i % 5 else 0, source, seed=i) for i, (_, source) in enumerate(pairs)]
    assert check(backend, inputs, [target for target, _ in pairs], 0.3, shift=shift) == 0.0


@pytest.mark.parametrize(
    "value",
    [
        65519.99609375, 65520.0, -65520.0, 2.0**-25, 2.0**-25 * 1.5, 2.0**-24, 1 + 2.0**-11, 1 + 3 * 2.0**-11,
        3.3895313892515355e38, 3.3961775292304957e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-134, 2.0**-134 * 1.5,
        math.inf, -math.inf, math.nan, -0.0, 1e-45, 1 + 2.0**-11 + 2.0**-40, 1e300,
    ],
    ids=str,
)  # fmt: skip
@compared
def test_rounding(backend, value):
    """Ties to even, overflow by rounding, subnormal numbers: in fp16 and bf16, from fp32 and fp64."""
    wide = torch.full((40,), value, dtype=torch.float64)
    inputs = [wide.float(), wide.float(), wide, wide]
    check(backend, inputs, [torch.float16, torch.bfloat16] * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@compared
def test_every_16_bit_pattern(backend, dtype):
    """Every pattern survives the way to fp32 and back, and to the other format."""
    patterns = every_pattern(dtype)
    assert check(backend, [patterns] * 3, [torch.float32, torch.float16, torch.bfloat16]) == 1.0


@pytest.mark.parametrize("position", [0, 4096, 5000], ids=str)
@pytest.mark.parametrize(("value", "bad"), [(65519.0, 0.0), (65520.0, 1.0), (math.nan, 1.0)])
@on_every_backend
def test_found_inf(backend, value, bad, position):
    """A finite fp32 value that fp16 cannot hold is found wherever it is; found_inf is never taken back."""
    source = torch.zeros(5001)
    source[position] = value
    for before in (0.0, 1.0):
        found = scalar(before).to(backend.device)
        output = torch.empty(5001, dtype=torch.float16, device=backend.device)
        backend.module.scaled_copy_([output], [source.to(backend.device)], found_inf=found)
        assert found.item() == max(bad, before)


@pytest.mark.parametrize("divisor", [0.0, -0.0, math.inf, math.nan, -2.0, 1e-310], ids=str)
@compared
def test_odd_divisors(backend, divisor):
    """Divisors are not judged: what the division gives is stored, and found when it is not finite."""
    check(backend, [random(70, torch.float32)] * 2, [torch.float32, torch.float64], divisor)


@compared
def test_without_found_inf(backend):
    """Nothing is reported where nothing was asked."""
    assert check(backend, [torch.full((70,), 1e30)], [torch.float16], checked=False) == 0.0


@compared
def test_layouts(backend):
    """Outputs are filled in memory order."""
    image = random((2, 8, 3, 5), torch.float32).contiguous(memory_format=torch.channels_last)
    check(backend, [image, random((7, 9), torch.float32).t()], [torch.bfloat16, torch.float16], 7.0)


@on_every_backend
def test_in_place(backend):
    """Inputs may be the outputs: a flat buffer divided where it lies."""
    tensor = random(5000, torch.float32)
    there = tensor.clone().to(backend.device)
    backend.module.scaled_copy_([there], [there], divisor=scalar(3.0).to(backend.device))
    assert_same_bits(there, tensor / 3)


@on_every_backend
def test_empty(backend):
    """An empty list, and tensors of no elements."""
    backend.module.scaled_copy_([], [])
    found = scalar(0.0).to(backend.device)
    empty = torch.empty(0, device=backend.device)
    backend.module.scaled_copy_([empty], [empty], found_inf=found)
    assert found.item() == 0.0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@compared
def test_any_list(backend, data):
    """Random sizes, dtypes, alignments and divisors."""
    count = data.draw(st.integers(0, 8))
    pairs = data.draw(st.lists(st.tuples(*[st.sampled_from(FLOATS)] * 2), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 70), st.integers(0, 9000)), min_size=count, max_size=count))
    inputs = [
        random(n, source, seed=n, magnitude=data.draw(st.sampled_from([1e-7, 1.0, 4e4])))
        for n, (_, source) in zip(sizes, pairs, strict=True)
    ]
    divisor = data.draw(st.one_of(st.none(), st.floats(1e-3, 1e6)))
    check(backend, inputs, [target for target, _ in pairs], divisor, shift=data.draw(st.integers(0, 3)))
