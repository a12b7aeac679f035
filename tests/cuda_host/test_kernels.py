"""The CUDA kernels, executed on the host: `python tests/cuda_host/build.py --run` does it under the sanitizers.

Every .cu file under csrc is compiled with g++ against `cuda_host/cuda_runtime.h`. Results are compared with the
reference ops, bit for bit, and with float64; what the kernels may not touch is checked by AddressSanitizer and by
comparing whole buffers, gaps between segments included.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accumkernels.ops import reference
from accumkernels.ops.schema import State, VerdictField
from tests.cuda_host.build import compiler
from tests.support.backends import (
    BUFFERS,
    FLOATS,
    Accumulate,
    Backend,
    assert_close_sum,
    assert_same_bits,
    dtype_id,
    place,
    random,
    scalar,
    squares,
)

pytestmark = pytest.mark.cuda_host
__test__ = compiler() is not None

if __test__:
    from tests.cuda_host import ops

    HOST = Backend("cuda-host", ops, torch.device("cpu"))
    kernels = ops.kernels

INF = math.inf
NAN = math.nan
# A lane takes 16 bytes, a warp 64 to 256 elements, all blocks 8,192 or more; sizes around those borders, and past them.
SIZES = [0, 1, 2, 3, 7, 8, 9, 255, 2047, 2048, 2049, 4095, 4096, 4097, 12_345]


@pytest.fixture(autouse=True)
def _default_schedule() -> Iterator[None]:
    """Every test starts with threads and blocks in ascending order, on a machine with two good GPUs."""
    kernels.reset()
    yield
    kernels.reset()


def grads_of(sizes: list[int], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Random gradients, the dtypes taken in turn."""
    return [random(size, dtypes[i % len(dtypes)], seed=i, magnitude=30) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "first"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_accumulate_all_dtypes_and_sizes(dtype, buffer_dtype, shift, overwrite):
    """All sizes in one launch; gradients also one element off their alignment, so that nothing loads 16 bytes."""
    case = Accumulate(grads_of(SIZES, [dtype]), buffer_dtype, overwrite=[overwrite] * len(SIZES), shift=shift)
    case.kwargs.update(weight=0.3, loss_scale=scalar(1024.0, torch.float32), sq_norm=squares(2.5))
    before = kernels.launches()
    result = case.check(HOST)
    assert kernels.launches() - before == 2  # the kernel, and the sum of its blocks' sums of squares
    exact = sum(float(grad.double().square().sum()) for grad in case.grads)
    assert_close_sum(result["sq_norm"][:1], scalar(2.5 + 0.3 / 1024.0**2 * exact))


@st.composite
def cases(draw: st.DrawFn) -> Accumulate:
    """Lists of mixed dtypes and random sizes, in random order of segments, at random alignments of both sides."""
    sizes = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), max_size=12))
    grads = [random(n, draw(st.sampled_from(FLOATS)), seed=i, magnitude=9) for i, n in enumerate(sizes)]
    case = Accumulate(
        grads,
        draw(st.sampled_from(BUFFERS)),
        segments=draw(st.permutations(range(len(grads)))),
        overwrite=[draw(st.booleans()) for _ in grads],
        alignment=draw(st.sampled_from([1, 2, 3, 32])),
        shift=draw(st.integers(0, 4)),
        checked=draw(st.booleans()),
        state=[3.0, 0.0, 2.0, 0.0],
    )
    case.kwargs["weight"] = draw(st.sampled_from([0.0, 1.0, 0.1, 77.0, -1.0, NAN, INF]))
    optional = {
        "weight_tensor": st.sampled_from([0.0, 3.0, -2.0, NAN]).map(scalar),
        "loss_scale": st.sampled_from([1.0, 65536.0, 3e-39]).map(lambda v: scalar(v, torch.float32)),
        "drop": st.sampled_from([0.0, 1.0]).map(scalar),
        "sq_norm": st.just(squares(1.0)),
        "count": st.booleans(),
        "tag": st.integers(1, 9),
    }
    case.kwargs.update(draw(st.fixed_dictionaries({}, optional=optional)))
    return case


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_accumulate_random_calls(case, seed):
    """Any combination of layout and arguments does what the reference does, whatever order the threads run in."""
    kernels.settings.seed = seed
    case.check(HOST)


@pytest.mark.parametrize("sq_norm", [False, True], ids=["", "sq_norm"])
@pytest.mark.parametrize("count", [2031, 2032])
def test_accumulate_many_tensors(count, sq_norm):
    """2,031 tensors fit one launch; of more launches only the first counts, and all add to sq_norm."""
    sizes = [1 + i % 11 for i in range(count)] + [0] * 3000  # what is empty takes no entry
    case = Accumulate(grads_of(sizes, list(FLOATS)), alignment=1, kwargs={"weight": 2.0})
    if sq_norm:
        case.kwargs["sq_norm"] = squares(0.0)
    before = kernels.launches()
    assert case.check(HOST)["state"].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert kernels.launches() - before == -(-count // 2031) * (2 if sq_norm else 1)


@pytest.mark.parametrize(("count", "limit"), [(1, 4608), (256, 4608), (257, 32_764)])
def test_small_launches_copy_little(count, limit):
    """Up to 256 tensors that are not empty take a table of 4 KB, more of them one of 32 KB."""
    kernels.largest_arguments()
    Accumulate(grads_of([1, 0] * count, [torch.float16]), alignment=1).check(HOST)
    assert limit * 0.9 < kernels.largest_arguments() <= limit


@pytest.mark.parametrize("numel", [0, 1, 4097])
def test_accumulate_skips_empty_tensors(numel):
    """Tensors without elements, first and last, take no block; the one launch updates the state all the same."""
    case = Accumulate(grads_of([0] * 2500 + [numel] + [0], [torch.float16]), alignment=1)
    before = kernels.launches()
    assert case.check(HOST)["state"][State.WEIGHT] == 1.0
    assert kernels.launches() - before == 1


def test_accumulate_nothing_to_do():
    """An empty list that is not counted launches nothing."""
    before = kernels.launches()
    Accumulate([], kwargs={"count": False}).check(HOST)
    assert kernels.launches() == before
    Accumulate([], kwargs={"weight": 3.0, "sq_norm": squares(1.0)}).check(HOST)
    assert kernels.launches() == before + 2


@pytest.mark.parametrize("dropped", [False, True], ids=["used", "dropped"])
@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
def test_first_touch_ignores_what_the_buffer_held(buffer_dtype, dropped):
    """Stale NaN and infinities vanish at a first touch, dropped or not, and raise no flag."""
    sizes = [1, 5000, 33]
    case = Accumulate(grads_of(sizes, [torch.bfloat16]), buffer_dtype, overwrite=[True] * 3)
    for i in range(3):
        case.segment(case.buffer, i)[::2] = NAN
        case.segment(case.buffer, i)[1::2] = INF
    case.kwargs.update(drop=scalar(float(dropped)))
    result = case.check(HOST)
    assert not result["flags"].any()
    for i, grad in enumerate(case.grads):
        expected = torch.zeros_like(grad) if dropped else grad
        assert torch.equal(case.segment(result["buffer"], i), expected.to(buffer_dtype))


def test_first_touch_keeps_the_sign_of_zero():
    """A stored product of -0 is -0."""
    case = Accumulate([torch.tensor([-0.0, 0.0] * 8)], overwrite=[True])
    stored = case.segment(case.check(HOST)["buffer"], 0)
    assert stored.signbit().tolist() == [True, False] * 8


def test_dropped_micro_batch_reads_no_gradient():
    """Gradients of a dropped micro-batch are not looked at: their address may be anything."""
    buffer, state = random(64, torch.float32), torch.zeros(4, dtype=torch.float64)
    expected = buffer.clone()
    layout = torch.tensor([[0, 40]])
    arguments = dict.fromkeys(("flags", "weight_tensor", "loss_scale", "sq_norm"), 0)
    arguments.update(buffer=buffer.data_ptr(), buffer_dtype=2, layout=layout.data_ptr(), state=state.data_ptr())
    drop = scalar(1.0)
    error = kernels.accumulate(
        gradients=[(16, 40, 0, 0, 0, False)], tag=1, weight=1.0, count=True, drop=drop.data_ptr(), **arguments
    )
    assert error == 0
    assert torch.equal(buffer, expected)
    assert state.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("size", [1, 9, 4096, 10_001])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_overflow_in_the_first_or_last_element(dtype, size, value):
    """One value that is not finite flags its own tensor alone, poisons the window and is also seen by check_finite_."""
    for position in (0, -1):
        case = Accumulate(grads_of([size] * 3, [dtype]))
        case.grads[1][position] = value
        case.kwargs["tag"] = 7
        result = case.check(HOST)
        assert result["flags"].tolist() == [0, 7, 0]
        assert result["state"].tolist() == [1.0, 1.0, 1.0, 1.0]
        found_inf, flags = scalar(0.0), torch.zeros(3, dtype=torch.int32)
        ops.check_finite_(case.grads, [2, 0, 1], found_inf, flags, tag=5)
        assert (found_inf.item(), flags.tolist()) == (1.0, [5, 0, 0])


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
def test_poisoned_segments_are_not_flagged_again(buffer_dtype):
    """Where only the sum is not finite the window is poisoned, but this micro-batch's gradient is not to blame."""
    case = Accumulate(grads_of([100, 100], [torch.float32]), buffer_dtype)
    case.segment(case.buffer, 0)[99] = NAN
    result = case.check(HOST)
    assert result["flags"].tolist() == [0, 0]
    assert result["state"].tolist() == [1.0, 1.0, 1.0, 1.0]
    large = torch.finfo(buffer_dtype).max
    case = Accumulate([torch.full((9,), large, dtype=torch.float64)], buffer_dtype)
    case.segment(case.buffer, 0).fill_(large)
    result = case.check(HOST)  # both terms are finite, their sum is not
    assert result["flags"].tolist() == [0]
    assert result["state"][State.POISONED] == 1.0


@pytest.mark.parametrize("ord", [2.0, INF])
@pytest.mark.parametrize("shift", [0, 1])
def test_norm_is_deterministic(ord, shift):
    """Mixed dtypes against float64; neither the order of threads nor alignment changes a bit."""
    tensors = [place(grad, shift=shift) for grad in grads_of([*SIZES, 100_000], list(FLOATS))]
    results = []
    for seed in (0, 7):
        kernels.settings.seed = seed
        results.append(scalar(0.25))
        ops.norm_(results[-1], tensors, ord=ord)
    aligned, expected = scalar(0.25), scalar(0.25)
    ops.norm_(aligned, [place(tensor) for tensor in tensors], ord=ord)
    reference.norm_(expected, tensors, ord=ord)
    assert_close_sum(results[0], expected)
    assert results[0].item() == results[1].item() == aligned.item()


def exact_square_sum(tensor: torch.Tensor) -> float:
    """Rounded once: squares of all but fp64 numbers are exact in fp64, and fsum adds without error."""
    if tensor.dtype == torch.float64:
        return float(sum(Fraction(x) ** 2 for x in tensor.tolist()))
    return math.fsum(tensor.double().square().tolist())


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_norm_is_nearly_as_exact_as_fp64(dtype):
    """The stated bound of 1e-12 for what makes fp32 sums go wrong; of random numbers the error is some 1e-14."""
    noise = random(50_000, dtype, seed=1)
    one_large = torch.full((5000,), 1.0 / 3, dtype=dtype)
    one_large[::16] = 5000.0  # each group has squares that differ by 27 bits
    rising = torch.logspace(-3, 3, 5000).to(dtype)
    for values, bound in [(noise, 2e-14), (one_large, 1e-12), (rising, 1e-12), (-rising.flip(0), 1e-12)]:
        out = scalar(0.0)
        ops.norm_(out, [values])
        exact = exact_square_sum(values)
        assert abs(out.item() - exact) <= bound * exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("value", [3e38, 1e30, 1e-17, 1e-22, 1e-30, 1e-38, 1e-40, 0.0])
def test_norm_beyond_the_range_of_fp32_squares(value, dtype):
    """Squares that overflow or underflow fp32, alone and among ordinary numbers, as exact as others."""
    for others in (value, 1.0):
        values = torch.full((4097,), others).to(dtype)
        values[::7] = torch.tensor(value).to(dtype)
        out = scalar(0.0)
        ops.norm_(out, [values])
        exact = exact_square_sum(values)
        assert abs(out.item() - exact) <= 1e-12 * exact


@pytest.mark.parametrize("position", [0, 4097, -1])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_norm_of_values_that_are_not_finite(dtype, position):
    """NaN wins over infinity, wherever it is; an infinity is the largest magnitude."""
    for value in (INF, -INF, NAN):
        tensor = random(10_000, dtype)
        tensor[17] = INF
        tensor[position] = value
        for ord in (2.0, INF):
            out = scalar(1.0)
            ops.norm_(out, [tensor, random(9, dtype)], ord=ord)
            assert_same_bits(out, scalar(abs(value)))


@pytest.mark.parametrize("weight", [0.0, 4.0])
@pytest.mark.parametrize("given", [(), ("divisor",), ("norm", "max_norm"), ("divisor", "norm", "max_norm", "overflow")])
def test_decide(weight, given):
    """The verdict of plain torch, bit for bit; arguments that are left out are null."""
    scalars = {"divisor": scalar(3.0), "norm": scalar(7.0), "max_norm": scalar(0.1), "overflow": scalar(1.0)}
    state = torch.tensor([weight, 0.0, 2.0, 0.0], dtype=torch.float64)
    found = []
    for module in (ops, reference):
        verdict, single = torch.zeros(len(VerdictField), dtype=torch.float64), torch.zeros(len(VerdictField))
        module.decide_(verdict, single, state, **{name: scalars[name] for name in given})
        found.append((verdict, single))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_norm_of_many_tensors():
    """More tensors than one launch takes; empty ones add nothing, and an empty list leaves `out` alone."""
    tensors = grads_of([i % 5 for i in range(1800)], list(FLOATS))  # 1,440 of them are not empty; a launch takes 1,354
    for ord in (2.0, INF):
        out, expected = scalar(3.0), scalar(3.0)
        ops.norm_(out, [], ord=ord)
        assert out.item() == 3.0
        ops.norm_(out, tensors, ord=ord)
        reference.norm_(expected, tensors, ord=ord)
        assert_close_sum(out, expected)


@pytest.mark.parametrize("weight", [0.0, 1.0, -1.0, NAN, INF])
def test_check_finite_weight(weight):
    """A bad weight counts as overflow, also with an empty list; no weight tensor and no gradients is no launch."""
    for grads in ([], [random(5, torch.float16)], [random(0, torch.float16)]):
        found_inf, flags = scalar(0.0), torch.zeros(1, dtype=torch.int32)
        ops.check_finite_(grads, [0] * len(grads), found_inf, flags, weight_tensor=scalar(weight))
        assert found_inf.item() == float(not 0 <= weight < INF)
        assert flags.item() == 0
    before = kernels.launches()
    ops.check_finite_([], [], scalar(0.0), torch.zeros(1, dtype=torch.int32))
    assert kernels.launches() == before


@pytest.mark.parametrize("shift", [0, 1])
def test_check_finite_many_tensors(shift):
    """Every tenth of 1,500 tensors of mixed dtypes is bad, in its last element: exactly those are flagged."""
    grads = [place(grad, shift=shift) for grad in grads_of([1 + i % 20 for i in range(1500)], list(FLOATS))]
    for grad in grads[::10]:
        grad[-1] = -INF
    found_inf, flags = scalar(0.0), torch.zeros(1500, dtype=torch.int32)
    ops.check_finite_(grads, list(range(1500)), found_inf, flags, tag=3)
    assert flags.tolist() == [3 if i % 10 == 0 else 0 for i in range(1500)]
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("input_dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("output_dtype", FLOATS, ids=dtype_id)
def test_scaled_copy_all_dtypes_and_sizes(output_dtype, input_dtype, shift, divisor):
    """Each pair of dtypes, all sizes in one launch, against the reference and, without a divisor, torch's own `to`."""
    inputs = [place(grad, shift=shift) for grad in grads_of(SIZES, [input_dtype])]
    actual, expected = ([place(torch.full((n,), NAN, dtype=output_dtype), shift=1) for n in SIZES] for _ in range(2))
    arguments = {} if divisor is None else {"divisor": scalar(divisor)}
    found_inf = scalar(0.0)
    ops.scaled_copy_(actual, inputs, found_inf=found_inf, **arguments)
    reference.scaled_copy_(expected, inputs, **arguments)
    for output, truth, input in zip(actual, expected, inputs, strict=True):
        assert_same_bits(output, truth)
        if divisor is None:
            assert_same_bits(output, input.to(output_dtype))
    assert found_inf.item() == 0.0


@pytest.mark.parametrize("size", [1, 8, 5000])
@pytest.mark.parametrize("value", [65519.0, 65520.0, 1e30, INF, NAN])
def test_scaled_copy_finds_what_rounds_to_infinity(value, size):
    """A finite fp32 value that fp16 cannot hold is an overflow; without found_inf nothing is reported."""
    source = torch.full((3 * size,), 1.0)
    source[-1] = value
    output, found_inf = torch.empty(3 * size, dtype=torch.float16), scalar(0.0)
    ops.scaled_copy_([output], [source], found_inf=found_inf)
    assert_same_bits(output, source.half())
    assert found_inf.item() == float(not value < 65520.0)
    ops.scaled_copy_([output], [source])


def test_scaled_copy_many_pairs():
    """More pairs than the 1,015 that one launch takes, dtypes mixed, some empty."""
    sizes = [i % 7 for i in range(1300)]
    inputs = grads_of(sizes, list(FLOATS))
    outputs = [torch.empty(n, dtype=FLOATS[i % 3]) for i, n in enumerate(sizes)]
    expected = [torch.empty_like(output) for output in outputs]
    ops.scaled_copy_(outputs, inputs, divisor=scalar(7.0))
    reference.scaled_copy_(expected, inputs, divisor=scalar(7.0))
    for output, truth in zip(outputs, expected, strict=True):
        assert_same_bits(output, truth)


def reserved(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take an address range but memory only where they are written."""
    no_reserve = 0x4000  # MAP_NORESERVE, which the mmap module does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype)


def test_elements_past_two_to_the_31():
    """Offsets and indices beyond 2**31: of tensors that large only the last block runs, which has the last values."""
    kernels.settings.processors = 2048
    step = 4096 * 8 * 256  # elements of 16 bits that all warps move at once; of 32 bits half
    numel, offset = 2**31 + step - 125, 2**31 + 64
    grad, buffer = reserved(numel, torch.float16), reserved(offset + numel, torch.float32)
    grad[-4:] = torch.tensor([1.0, 2.0, -3.0, 4.0])
    buffer[-4:] = 0.5
    state, flags = torch.zeros(4, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)
    layout = torch.tensor([[0, 1], [offset, numel]])
    kernels.settings.last_blocks = 1
    ops.accumulate_(buffer, state, [grad], [1], [False], layout, layout, flags=flags, weight=2.0, count=False)
    assert buffer[-4:].tolist() == [2.5, 4.5, -5.5, 8.5]
    assert not flags.any()
    assert not state.any()

    out = scalar(0.0)
    ops.norm_(out, [grad])
    assert out.item() == 30.0
    ops.scaled_copy_([buffer[-numel:]], [grad], divisor=scalar(2.0))
    assert buffer[-4:].tolist() == [0.5, 1.0, -1.5, 2.0]

    grad[-1] = INF
    ops.check_finite_([grad], [1], out, flags)
    assert (out.item(), flags.tolist()) == (1.0, [0, 1])
    ops.accumulate_(buffer, state, [grad], [1], [True], layout, layout, flags=flags, tag=2, count=False)
    assert buffer[-4:].tolist() == [1.0, 2.0, -3.0, INF]
    assert (flags.tolist(), state.tolist()) == ([0, 2], [0.0, 1.0, 0.0, 1.0])
