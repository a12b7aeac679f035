"""accumulate_ on every backend: to the last bit what the plain-torch reference does."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accumkernels.ops import reference
from tests.support.backends import (
    BAD,
    BUFFERS,
    FLOATS,
    SIZES,
    Accumulate,
    assert_close_sum,
    assert_same_bits,
    compared,
    dtype_id,
    every_bad_value,
    every_dtype,
    every_pattern,
    on_every_backend,
    one_bad,
    place,
    random,
    scalar,
    squares,
)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@every_dtype
@compared
def test_sizes(backend, dtype, buffer_dtype, shift):
    """Sizes around every width, added and stored in turns, with a weight and a loss scale that round."""
    grads = [random(n, dtype, seed=n, magnitude=100) for n in SIZES]
    overwrite = [i % 2 == 0 for i in range(len(grads))]
    case = Accumulate(grads, buffer_dtype, overwrite=overwrite, shift=shift)
    case.kwargs.update(weight=0.3, loss_scale=scalar(1000.0, torch.float32), sq_norm=squares(0.5))
    case.check(backend)


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@compared
def test_every_16_bit_pattern(backend, dtype, buffer_dtype):
    """Subnormal numbers, both zeros, infinities and all NaNs: stored as they are, then added."""
    case = Accumulate([every_pattern(dtype)] * 2, buffer_dtype, overwrite=[True, False])
    case.check(backend)


@pytest.mark.parametrize(
    "grad",
    [
        random((3, 16, 5, 7), torch.float32).contiguous(memory_format=torch.channels_last),
        random((33, 65), torch.bfloat16).t(),
        random((5, 6, 7), torch.float16).permute(2, 0, 1),
        random((1, 9, 1), torch.float32).as_strided((1, 9, 1), (77, 1, 55)),
    ],
    ids=["channels_last", "transposed", "permuted", "odd strides of size-1 dimensions"],
)
@compared
def test_layouts(backend, grad):
    """Elements are taken in memory order, whatever the dimensions' order."""
    Accumulate([grad, random(3, grad.dtype)], overwrite=[True, False]).check(backend)


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@compared
def test_mixed_dtypes(backend, buffer_dtype):
    """One call takes fp16, bf16, fp32 and fp64, aligned and not, in any order."""
    grads = [random(100 + i, FLOATS[i * 3 % 4], seed=i) for i in range(12)]
    case = Accumulate(grads, buffer_dtype, overwrite=[i % 3 == 0 for i in range(12)], alignment=5)
    case.kwargs["sq_norm"] = squares(0.0)
    case.check(backend)


@pytest.mark.parametrize("alignment", [1, 3, 4, 32])
@compared
def test_segments_anywhere(backend, alignment):
    """Segments at odd offsets of the buffer, some without a gradient, given in another order than theirs."""
    grads = [random(n, torch.bfloat16, seed=n) for n in (70, 5, 4099, 64)]
    Accumulate(grads, segments=[6, 0, 3, 1], alignment=alignment).check(backend)


@pytest.mark.parametrize("first", [True, False], ids=["stored", "added"])
@pytest.mark.parametrize("count", [1, 3])
@on_every_backend
def test_short_lists(backend, count, first):
    """Without segments, gradients are those of the first ones, in order; one `overwrite` is for all gradients."""
    case = Accumulate([random(n, torch.bfloat16, seed=n) for n in (70, 5, 4099)[:count]], overwrite=[first] * count)
    expected = case.run(reference)
    case.segments, case.overwrite = [], [first]
    for name, tensor in case.run(backend.module, backend.device).items():
        assert_same_bits(tensor, expected[name], name)


@on_every_backend
def test_contiguous(backend):
    """With `contiguous`, gradients in index order are taken, and any other is refused before anything is added."""
    good, other = random((3, 5), torch.float16), random((3, 5), torch.float16).t()
    Accumulate([good], kwargs={"contiguous": True}).check(backend)
    buffer, state = torch.zeros(64, device=backend.device), torch.zeros(4, dtype=torch.float64, device=backend.device)
    layout = torch.tensor([[0, 15], [32, 15]])
    grads = [good.to(backend.device), place(other, backend.device)]
    with pytest.raises(RuntimeError, match="not contiguous"):
        backend.module.accumulate_(buffer, state, grads, [], [True], layout.to(backend.device), layout, contiguous=True)
    assert not buffer.any()
    assert not state.any()


@pytest.mark.parametrize("sizes", [[0, 5, 0, 4097, 0], [5, 0], [0], [0, 0, 0], []], ids=str)
@compared
def test_empty(backend, sizes):
    """Tensors of no elements at any place, also last, and lists of nothing, still count as a micro-batch."""
    grads = [random(n, torch.float16, seed=n) for n in sizes]
    case = Accumulate(grads, overwrite=[True] * len(sizes), kwargs={"weight": 3.0, "sq_norm": squares(1.0)})
    assert case.check(backend)["state"].tolist() == [3.0, 0, 1, 0]


@compared
def test_many_tiny_tensors(backend):
    """3,000 tensors (100 where an interpreter runs) of a few elements; one is bad."""
    count = 100 if backend.slow else 3000
    grads = [random(i % 67, torch.float16, seed=i) for i in range(count)]
    grads[count // 2 + 1].fill_(math.inf)
    result = Accumulate(grads, overwrite=[i % 5 == 0 for i in range(count)]).check(backend)
    assert result["flags"].nonzero().tolist() == [[count // 2 + 1]]


@pytest.mark.parametrize("overwrite", [False, True], ids=["add", "first"])
@compared
def test_large_tensors(backend, overwrite):
    """Tensors of many blocks and a tail, shared by all threads; stored, more than the 32 MB that caches keep."""
    numel = 25_001 if backend.slow else 4_500_001 if overwrite else 1_500_001
    grads = [random(numel, dtype, seed=i) for i, dtype in enumerate((torch.bfloat16, torch.float16))]
    case = Accumulate(grads, overwrite=[overwrite] * 2, kwargs={"weight": 0.1, "sq_norm": squares(0.0)})
    case.check(backend)


@pytest.mark.parametrize("garbage", BAD, ids=str)
@on_every_backend
def test_first_touch_does_not_read_the_buffer(backend, garbage):
    """A first touch replaces NaN and inf, keeps the sign of a zero, and leaves the gaps alone."""
    case = Accumulate([random(5000, torch.bfloat16), torch.tensor([-0.0, 0.0])], overwrite=[True, True])
    case.buffer.fill_(garbage)
    result = case.run(backend.module, backend.device)
    assert_same_bits(case.segment(result["buffer"], 0), case.grads[0].float())
    assert_same_bits(case.segment(result["buffer"], 1), case.grads[1])
    gaps = torch.ones(len(case.buffer), dtype=torch.bool)
    for index in range(2):
        case.segment(gaps, index).fill_(False)
    assert_same_bits(result["buffer"][gaps], case.buffer[gaps])
    assert result["state"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@pytest.mark.parametrize("drop", [0.0, 1.0])
@pytest.mark.parametrize("checked", [True, False])
@compared
def test_drop(backend, drop, buffer_dtype, checked):
    """A dropped micro-batch of NaNs stores zeros at a first touch and nothing else, whatever its weight."""
    grads = [torch.full((n,), math.nan, dtype=torch.float16) for n in (5000, 70, 4096, 3)]
    case = Accumulate(grads, buffer_dtype, overwrite=[True, False, False, True], checked=checked)
    case.kwargs.update(drop=scalar(drop), sq_norm=squares(0.5), weight_tensor=scalar(math.nan))
    result = case.check(backend)
    if drop:
        assert torch.equal(result["state"], torch.tensor([0, 1, 0, 0], dtype=torch.float64))
        assert result["sq_norm"].tolist() == [0.5, 1.0]
        assert not case.segment(result["buffer"], 0).any()


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0, 2.0**-20, 0.0, math.inf, None], ids=str)
@pytest.mark.parametrize("weight", [1.0, 0.0, 0.1, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
@compared
def test_weight_and_loss_scale(backend, on_device, weight, scale):
    """The multiplier is weight / loss_scale in fp64, rounded once; both may be extreme."""
    case = Accumulate([random(67, torch.float16), random(67, torch.float32)], overwrite=[True, False])
    case.kwargs.update({"weight_tensor": scalar(weight), "weight": 77.0} if on_device else {"weight": weight})
    if scale is not None:
        case.kwargs["loss_scale"] = scalar(scale, torch.float32)
    case.check(backend)


@pytest.mark.parametrize("drop", [None, 0.0, 1.0])
@pytest.mark.parametrize("weight", [-1.0, -0.0, math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
@compared
def test_bad_weight(backend, on_device, weight, drop):
    """A negative or not finite weight is not added: FOUND_INF and, unless dropped, POISONED."""
    case = Accumulate([random(67, torch.float32)], state=(2.0, 0.0, 1.0, 0.0), kwargs={"sq_norm": squares(0.0)})
    case.kwargs["weight_tensor" if on_device else "weight"] = scalar(weight) if on_device else weight
    if drop is not None:
        case.kwargs["drop"] = scalar(drop)
    state = case.check(backend)["state"].tolist()
    good = weight == 0 and not drop
    assert state == [2.0, 0.0 if good else 1.0, 1.0, 0.0 if good or drop else 1.0]


@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 4999, 5000], ids=str)
@every_bad_value
@every_dtype
@compared
def test_overflow_is_found(backend, dtype, bad, position):
    """One bad value, in the first or last element, at the edge of a block or in a tail; tag names the segment."""
    grads = one_bad(dtype, bad, position)
    result = Accumulate(grads, overwrite=[False, position % 2 == 0, False], kwargs={"tag": -7}).check(backend)
    assert result["flags"].tolist() == [0, -7, 0]
    assert result["state"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("state", list(itertools.product([0.0, 1.0], repeat=2)), ids=str)
@on_every_backend
def test_state_is_only_raised(backend, state):
    """A clean micro-batch leaves FOUND_INF and POISONED as they were."""
    found_inf, poisoned = state
    case = Accumulate([random(70, torch.float16)], state=(4.0, found_inf, 3.0, poisoned), kwargs={"weight": 0.5})
    assert case.run(backend.module, backend.device)["state"].tolist() == [4.5, found_inf, 4.0, poisoned]


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("garbage", BAD, ids=str)
@on_every_backend
def test_poisoned_segment_is_not_flagged_again(backend, garbage, size):
    """What an earlier micro-batch left is not this gradient's fault: no flag, FOUND_INF and POISONED."""
    case = Accumulate([random(size, torch.float16), random(9, torch.float16)])
    case.segment(case.buffer, 0)[size // 2] = garbage
    result = case.run(backend.module, backend.device)
    assert result["flags"].tolist() == [0, 0]
    assert result["state"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("grad", "before", "flagged"),
    [(3e38, 3e38, False), (-3e38, -3e38, False), (3e38, -3e38, None), (1e39, 0.0, True)],
    ids=["sum", "negative sum", "finite sum", "conversion"],
)
@on_every_backend
def test_overflow_in_fp32(backend, grad, before, flagged):
    """A sum of finite terms poisons without a flag; a gradient that fp32 cannot hold is flagged."""
    case = Accumulate([torch.full((70,), grad, dtype=torch.float64)])
    case.buffer.fill_(before)
    result = case.run(backend.module, backend.device)
    assert result["flags"].tolist() == [1 if flagged else 0]
    assert result["state"].tolist() == [1, 0, 1, 0] if flagged is None else [1, 1, 1, 1]


@on_every_backend
def test_overflow_of_the_product(backend):
    """A finite gradient whose product with the multiplier is infinite is flagged."""
    case = Accumulate([torch.full((5,), 1e38), torch.ones(5)], kwargs={"weight": 10.0})
    result = case.run(backend.module, backend.device)
    assert result["flags"].tolist() == [1, 0]
    assert result["state"].tolist() == [10, 1, 1, 1]


@on_every_backend
def test_unchecked(backend):
    """Without flags gradients pass unseen."""
    case = Accumulate([torch.full((5000,), math.nan)], overwrite=[True], checked=False)
    result = case.run(backend.module, backend.device)
    assert result["state"].tolist() == [1, 0, 1, 0]
    assert case.segment(result["buffer"], 0).isnan().all()


@pytest.mark.parametrize("weight", [2.0, -1.0])
@on_every_backend
def test_without_count(backend, weight):
    """A second call of a micro-batch leaves its weight out of the state, and still finds overflow."""
    case = Accumulate([random(5, torch.float16)], kwargs={"count": False, "weight": weight})
    assert case.run(backend.module, backend.device)["state"].tolist() == [0, 0, 0, 0]
    case.grads[0][1] = math.inf
    assert case.run(backend.module, backend.device)["state"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("scale", [None, 3.0, 65536.0], ids=str)
@every_dtype
@on_every_backend
def test_sq_norm(backend, dtype, scale):
    """weight * sum((g / loss_scale)**2), also of numbers whose squares fp32 cannot hold; twice the same bits."""
    magnitude = {torch.float16: 1e-4, torch.bfloat16: 1e25, torch.float32: 1e-30, torch.float64: 1.0}[dtype]
    grads = [random(n, dtype, seed=n, magnitude=magnitude) for n in (5000, 3, 0, 20_000)]
    case = Accumulate(grads, torch.float64, overwrite=[True] * 4, kwargs={"weight": 0.7, "sq_norm": squares(0.0)})
    if scale is not None:
        case.kwargs["loss_scale"] = scalar(scale, torch.float32)
    first, second = (case.run(backend.module, backend.device)["sq_norm"] for _ in range(2))
    assert torch.equal(first, second)
    total = math.fsum((torch.cat(grads).double() ** 2).tolist())
    assert_close_sum(first[0], torch.tensor(0.7 * total / (scale or 1.0) ** 2, dtype=torch.float64))


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@on_every_backend
def test_sq_norm_grows_to_that_of_the_sum(backend, buffer_dtype):
    """Over micro-batches, one dropped, some segments first touched late or never: sq_norm[1] is the sum's square."""
    sizes = (5000, 3, 4096, 77)
    segments = [[0, 1], [1, 2], [0, 1, 2], [0, 2]]
    sq_norm, buffer, seen = squares(), None, set()
    for step, touched in enumerate(segments):
        grads = [random(sizes[i], torch.float16, seed=10 * step + i) for i in range(len(sizes))]
        case = Accumulate(grads, buffer_dtype, buffer=buffer)
        case.grads, case.segments = [grads[i] for i in touched], touched
        case.overwrite = [i not in seen for i in touched]
        case.kwargs.update(weight=0.3 + step, drop=scalar(float(step == 1)), sq_norm=sq_norm)
        result = case.run(backend.module, backend.device)
        buffer, sq_norm = result["buffer"], result["sq_norm"]
        seen.update(touched)
    values = torch.cat([case.segment(buffer, i) for i in sorted(seen)]).double()
    assert sq_norm[1].item() == pytest.approx(math.fsum((values**2).tolist()), rel=1e-12)


@on_every_backend
def test_sq_norm_shows_overflow(backend):
    """An infinite gradient makes the sum infinite, a NaN makes it NaN."""
    for bad, expected in [(math.inf, math.inf), (math.nan, math.nan)]:
        case = Accumulate([random(70, torch.float16)], kwargs={"sq_norm": squares(1.0)})
        case.grads[0][69] = bad
        result = case.run(backend.module, backend.device)["sq_norm"]
        assert_close_sum(result, torch.full_like(result, expected))


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
@on_every_backend
def test_offset_past_2_to_the_31(backend, buffer_dtype, tmp_path):
    """A segment behind element 2**31: a sparse file stands for the buffer on the CPU."""
    offset, grad = 2**31 + 5, random(4101, torch.bfloat16)
    numel = offset + 5000
    if backend.device.type == "cpu":
        buffer = torch.from_file(str(tmp_path / "sparse"), shared=True, size=numel, dtype=buffer_dtype)
    else:
        buffer = torch.zeros(numel, dtype=buffer_dtype, device=backend.device)
    layout = torch.tensor([[offset, 4101]])
    state = torch.zeros(4, dtype=torch.float64, device=backend.device)
    grad_there, layout_there = grad.to(backend.device), layout.to(backend.device)
    for first in (True, False):
        backend.module.accumulate_(buffer, state, [grad_there], [0], [first], layout_there, layout)
    expected = torch.cat([torch.zeros(5), 2 * grad.float(), torch.zeros(5)]).to(buffer_dtype)
    assert_same_bits(buffer[offset - 5 : offset + 4106], expected)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@compared
def test_any_layout(backend, data):
    """Random lists of tensors, dtypes, alignments, first touches, weights and drops."""
    count = data.draw(st.integers(0, 12))
    sizes = data.draw(st.lists(st.one_of(st.integers(0, 70), st.integers(0, 9000)), min_size=count, max_size=count))
    dtypes = data.draw(st.lists(st.sampled_from(FLOATS), min_size=count, max_size=count))
    overwrite = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    segments = data.draw(st.permutations(range(count)))
    grads = [random(n, dtype, seed=n) for n, dtype in zip(sizes, dtypes, strict=True)]
    for grad in grads:
        if grad.numel() and data.draw(st.integers(0, 4)) == 0:
            grad[data.draw(st.integers(0, grad.numel() - 1))] = data.draw(st.sampled_from([*BAD, -0.0, 6e4]))
    case = Accumulate(
        grads,
        data.draw(st.sampled_from(BUFFERS)),
        segments=list(segments),
        overwrite=overwrite,
        alignment=data.draw(st.sampled_from([1, 4, 32])),
        shift=data.draw(st.integers(0, 3)),
        checked=data.draw(st.booleans()),
    )
    case.kwargs.update(
        weight=data.draw(st.floats(0, 1e3)),
        loss_scale=scalar(data.draw(st.sampled_from([1.0, 1024.0, 0.7])), torch.float32),
        drop=scalar(data.draw(st.sampled_from([0.0, 0.0, 1.0]))),
        sq_norm=squares(0.0),
        count=data.draw(st.booleans()),
        tag=data.draw(st.integers(1, 2**31 - 1)),
    )
    case.check(backend)
