"""The plain-torch ops against numpy, written anew from the text of schema.py."""

import math
import platform

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accumkernels.ops import reference
from accumkernels.ops.schema import SCHEMAS, State
from tests.support.backends import BUFFERS, FLOATS, Accumulate, dtype_id, random, scalar, squares

NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
# (bits of the fraction, exponent of the smallest normal number, largest number)
FORMATS = {
    torch.float16: (10, -14, 65504.0),
    torch.bfloat16: (7, -126, 3.3895313892515355e38),
    torch.float32: (23, -126, 3.4028234663852886e38),
}


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float64 values to the nearest of a narrower format, ties to even; the result is again float64."""
    if dtype == torch.float64:
        return values
    fraction, smallest, largest = FORMATS[dtype]
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(values)[1] - 1, smallest)
        quantum = np.ldexp(1.0, np.where(np.isfinite(values), exponent, 0) - fraction)
        result = np.where(np.isfinite(values), np.rint(values / quantum) * quantum, values)
        return np.where(np.abs(result) > largest, np.copysign(np.inf, result), result)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """The elements in memory order, in float64."""
    return tensor.as_strided((tensor.numel(),), (1,)).double().numpy()


def accumulated(main_grad, grad, weight: float, loss_scale: float, dtype: torch.dtype, overwrite: bool) -> np.ndarray:
    """What accumulate_ must leave in a segment, computed in the buffer's own arithmetic by numpy."""
    kind = NUMPY[dtype]
    with np.errstate(all="ignore"):
        multiplier = kind(np.float64(weight) / np.float64(loss_scale))
        product = grad.astype(kind) * multiplier
        return product if overwrite else main_grad.astype(kind) + product


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "first"])
@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_accumulate_is_one_multiplication_and_one_addition(dtype, buffer_dtype, overwrite):
    """Each element is converted, multiplied and added, every step rounded to the buffer's dtype."""
    case = Accumulate([random(1000, dtype, magnitude=30)], buffer_dtype, overwrite=[overwrite])
    case.kwargs.update(weight=0.3, loss_scale=scalar(1000.0, torch.float32))
    buffer = case.run(reference)["buffer"]
    before, after = (case.segment(b, 0).numpy() for b in (case.buffer, buffer))
    expected = accumulated(before, exact(case.grads[0]), 0.3, 1000.0, buffer_dtype, overwrite)
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 17.5, 2.0]], ids=str)
def test_window_is_a_weighted_mean(weights):
    """K micro-batches, then a scaled copy with the sum of the weights: sum(w g) / sum(w), with a scale that changes."""
    grads = [random(257, torch.float32, seed=i) for i in range(len(weights))]
    buffer, state = torch.full((257,), math.nan), torch.zeros(4, dtype=torch.float64)
    layout = torch.tensor([[0, 257]])
    for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        scale = 2.0**i
        reference.accumulate_(
            buffer, state, [grad * scale], [0], [i == 0], layout, layout,
            weight=weight, loss_scale=scalar(scale, torch.float32),
        )  # fmt: skip
    mean = torch.empty(257)
    reference.scaled_copy_([mean], [buffer], divisor=state[State.WEIGHT : State.WEIGHT + 1])
    expected = sum(w * g.double() for w, g in zip(weights, grads, strict=True)) / sum(weights)
    # Each of the K products and sums is off by at most 2**-24 of a partial sum of at most some 5 sum(w).
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=2.0**-24 * 2 * 5 * len(weights))
    assert state.tolist() == [sum(weights), 0, sum(w > 0 for w in weights), 0]


@pytest.mark.parametrize(
    ("weight", "drop", "expected"),
    [
        (2.5, None, [3.5, 0, 8, 0]),
        (2.5, 0.0, [3.5, 0, 8, 0]),
        (2.5, 1.0, [1.0, 1, 7, 0]),
        (0.0, None, [1.0, 0, 7, 0]),
        (-1.0, None, [1.0, 1, 7, 1]),
        (math.nan, None, [1.0, 1, 7, 1]),
        (math.inf, 0.0, [1.0, 1, 7, 1]),
        (-1.0, 1.0, [1.0, 1, 7, 0]),
    ],
)
def test_state_takes_in_the_weight(weight, drop, expected):
    """Sum of weights, found_inf, micro-batches used and poisoned, from (1, 0, 7, 0), by weight and drop."""
    case = Accumulate([], state=(1.0, 0.0, 7.0, 0.0), kwargs={"weight": weight})
    if drop is not None:
        case.kwargs["drop"] = scalar(drop)
    assert case.run(reference)["state"].tolist() == expected


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "first"])
def test_flags_name_the_segment(bad, overwrite):
    """Of three gradients the second has one value that is not finite: its flag alone, FOUND_INF and POISONED."""
    grads = [random(n, torch.float16) for n in (5, 6, 7)]
    grads[1][3] = bad
    result = Accumulate(grads, overwrite=[overwrite] * 3, kwargs={"tag": 9}).run(reference)
    assert result["flags"].tolist() == [0, 9, 0]
    assert result["state"].tolist() == [1, 1, 1, 1]


def test_infinite_sum_is_not_the_gradients_fault():
    """Finite terms whose fp32 sum overflows, and a buffer that is already infinite: no flag, but the step is off."""
    for value, addend in [(3e38, 3e38), (math.inf, 1.0), (math.nan, 1.0)]:
        case = Accumulate([torch.tensor([addend])])
        case.segment(case.buffer, 0).fill_(value)
        result = case.run(reference)
        assert result["flags"].tolist() == [0]
        assert result["state"].tolist() == [1, 1, 1, 1]


def test_dropped_micro_batch():
    """A dropped micro-batch of NaNs: a first touch stores zeros, another segment stays, only FOUND_INF says so."""
    case = Accumulate([torch.full((4,), math.nan)] * 2, overwrite=[True, False], kwargs={"drop": scalar(1.0)})
    case.segment(case.buffer, 0).fill_(math.nan)
    case.kwargs["sq_norm"] = squares(5.0)
    result = case.run(reference)
    assert case.segment(result["buffer"], 0).tolist() == [0.0] * 4
    assert torch.equal(case.segment(result["buffer"], 1), case.segment(case.buffer, 1))
    assert (result["flags"].tolist(), result["state"].tolist()) == ([0, 0], [0, 1, 0, 0])
    assert result["sq_norm"].tolist() == [5.0, 10.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_sq_norm(dtype):
    """Adds weight * sum((g / loss_scale)**2), and what the buffer's squares grow by; math.fsum is the exact sum."""
    case = Accumulate([random(300, dtype, seed=i) for i in range(3)])
    case.kwargs.update(weight=0.7, loss_scale=scalar(24.0, torch.float32), sq_norm=squares(2.0))
    case.overwrite = [True, False, False]
    total = math.fsum((exact(torch.cat(case.grads)) ** 2).tolist())
    result = case.run(reference)
    before = [exact(case.segment(case.buffer, i)) for i in (1, 2)]
    after = [exact(case.segment(result["buffer"], i)) for i in range(3)]
    growth = math.fsum([*np.concatenate(after) ** 2, *-(np.concatenate(before) ** 2)])
    expected = [2.0 + 0.7 * total / 24.0**2, 4.0 + growth]
    assert result["sq_norm"].tolist() == pytest.approx(expected, rel=1e-12)  # see SUM_RTOL


def test_unchecked_accumulation_sets_nothing():
    """Without flags a gradient is not looked at, while a bad weight still is."""
    case = Accumulate([torch.full((4,), math.inf)], checked=False)
    assert case.run(reference)["state"].tolist() == [1, 0, 1, 0]
    case.kwargs["weight"] = -1.0
    assert case.run(reference)["state"].tolist() == [0, 1, 0, 1]


def test_dimensions_are_taken_in_memory_order():
    """channels_last and transposed gradients arrive as they lie in memory."""
    image = random((2, 8, 3, 5), torch.float32).contiguous(memory_format=torch.channels_last)
    matrix = random((7, 9), torch.float32).t()
    case = Accumulate([image, matrix], overwrite=[True, True])
    buffer = case.run(reference)["buffer"]
    assert torch.equal(case.segment(buffer, 0), image.permute(0, 2, 3, 1).flatten())
    assert torch.equal(case.segment(buffer, 1), matrix.t().flatten())


@pytest.mark.parametrize("position", [0, 4, 8])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 65504.0], ids=str)
def test_check_finite(bad, position):
    """Finds inf and nan at any place, and takes the largest fp16 number for what it is."""
    grads = [torch.ones(3, dtype=torch.float16), torch.ones(9, dtype=torch.float16)]
    grads[1][position] = bad
    found_inf, flags = scalar(0.0), torch.zeros(4, dtype=torch.int32)
    reference.check_finite_(grads, [0, 2], found_inf, flags, tag=3)
    overflow = bad != 65504.0
    assert found_inf.item() == overflow
    assert flags.tolist() == [0, 0, 3 * overflow, 0]


@pytest.mark.parametrize(("weight", "bad"), [(1.0, 0), (0.0, 0), (-1.0, 1), (math.nan, 1), (math.inf, 1)])
def test_check_finite_looks_at_the_weight(weight, bad):
    """A weight that is negative or not finite is an overflow of no gradient."""
    found_inf, flags = scalar(0.0), torch.zeros(1, dtype=torch.int32)
    reference.check_finite_([torch.ones(1)], [0], found_inf, flags, weight_tensor=scalar(weight))
    assert (found_inf.item(), flags.tolist()) == (bad, [0])


def test_norm():
    """Sum of squares and largest magnitude over a mixed list, added to and compared with what `out` holds."""
    tensors = [random(100, dtype, seed=i) for i, dtype in enumerate(FLOATS)] + [torch.empty(0)]
    values = np.concatenate([exact(t) for t in tensors])
    out, largest = scalar(3.0), scalar(0.25)
    reference.norm_(out, tensors)
    reference.norm_(largest, tensors, ord=math.inf)
    assert out.item() == pytest.approx(3.0 + math.fsum((values**2).tolist()), rel=1e-14)  # as for sq_norm
    assert largest.item() == np.abs(values).max()
    reference.norm_(largest, [torch.zeros(3)], ord=math.inf)
    assert largest.item() == np.abs(values).max()
    reference.norm_(largest, [torch.tensor([math.inf]), torch.tensor([math.nan]), torch.ones(1)], ord=math.inf)
    assert math.isnan(largest.item())


@pytest.mark.parametrize("source", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("target", FLOATS, ids=dtype_id)
def test_scaled_copy_rounds_once(target, source):
    """Divides in fp32, or fp64 where either is fp64, and rounds to the output.

    From fp64 to 16 bits torch rounds by way of fp32, and so do we: the one case of two roundings. ARM's processors have
    an instruction from fp64 to fp16, and both use it.
    """
    tie = torch.tensor([3 * (1 + 2.0**-11 + 2.0**-40), 3 * (1 + 2.0**-8 + 2.0**-40)], dtype=torch.float64).to(source)
    value = torch.cat([tie, *(random(500, source, magnitude=m) for m in (1e-7, 1e-4, 1.0, 3e4))])
    output, found_inf = torch.empty(2002, dtype=target), scalar(0.0)
    reference.scaled_copy_([output], [value], divisor=scalar(3.0), found_inf=found_inf)
    if torch.float64 in (source, target):
        quotient = exact(value) / 3.0
        if target != torch.float64 and not (target == torch.float16 and platform.machine() in ("aarch64", "arm64")):
            quotient = rounded(quotient, torch.float32)
    else:
        quotient = (exact(value).astype(np.float32) / np.float32(3.0)).astype(np.float64)
    expected = rounded(quotient, target)
    np.testing.assert_array_equal(exact(output), expected)
    assert found_inf.item() == float(not np.isfinite(expected).all())


@pytest.mark.parametrize(("value", "expected", "bad"), [(65519.0, 65504.0, 0), (65520.0, math.inf, 1)])
def test_scaled_copy_notices_a_rounded_overflow(value, expected, bad):
    """A finite fp32 value from 65520 on is an fp16 infinity."""
    output, found_inf = torch.empty(1, dtype=torch.float16), scalar(0.0)
    reference.scaled_copy_([output], [torch.tensor([value])], found_inf=found_inf)
    assert (output.item(), found_inf.item()) == (expected, bad)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20),
    st.floats(0, 1e6),
    st.sampled_from([1.0, 3.0, 65536.0]),
    st.booleans(),
)
def test_accumulate_any_value(values, weight, loss_scale, overwrite):
    """Any fp32 gradient, infinite and NaN too: numpy agrees on the segment, the flag and the state."""
    case = Accumulate([torch.tensor(values)], overwrite=[overwrite])
    case.kwargs.update(weight=weight, loss_scale=scalar(loss_scale, torch.float32))
    result = case.run(reference)
    before = case.segment(case.buffer, 0).numpy()
    grad = exact(case.grads[0])
    expected = accumulated(before, grad, weight, loss_scale, torch.float32, overwrite)
    np.testing.assert_array_equal(case.segment(result["buffer"], 0).numpy(), expected)
    product = accumulated(before, grad, weight, loss_scale, torch.float32, True)
    assert result["flags"].tolist() == [int(not np.isfinite(product).all())]
    bad = float(not np.isfinite(expected).all())
    assert result["state"].tolist() == [weight, bad, float(weight > 0), bad]


def test_every_op_has_a_reference_of_its_signature():
    """The functions' parameters are those of the schemas."""
    for name, schema in SCHEMAS.items():
        parameters = torch._C.parse_schema("accumkernels::" + name + schema).arguments
        function = getattr(reference, name)
        assert [p.name for p in parameters] == list(function.__annotations__)[:-1]
