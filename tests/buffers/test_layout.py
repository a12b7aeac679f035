"""Flat buffers: alignment, order and growth of segments, on random sets of parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accumkernels as ak
from accumkernels.buffers.flat import ALIGNMENT_BYTES, flat_buffers
from accumkernels.buffers.parameters import named_parameters, strip_prefixes
from accumkernels.ops import reference
from tests.support.models import mlp

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=12)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def params_of(shapes, dtypes, permute=False):
    """Parameters of these shapes; some with their dimensions in reverse memory order."""
    made = []
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
        tensor = (
            torch.empty(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1]) if permute and i % 2 else None
        )
        made.append(nn.Parameter(torch.empty(shape, dtype=dtype) if tensor is None else tensor))
    return made


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.booleans())
def test_segments_are_aligned_disjoint_and_complete(shapes, dtypes, permute):
    """Every parameter has one segment, 128-byte aligned, overlapping no other, with a view of its own shape."""
    params = params_of(shapes, dtypes, permute)
    buffers = flat_buffers(named_parameters(params), {torch.device("cpu"): reference})
    placed = {id(s.param): (b, s) for b in buffers for s in b.segments}
    assert set(placed) == {id(p) for p in params}
    for buffer in buffers:
        end = 0
        for segment in buffer.segments:
            assert segment.offset * buffer.tensor.element_size() % ALIGNMENT_BYTES == 0
            assert segment.offset >= end
            end = segment.offset + segment.numel
        assert end <= buffer.tensor.numel()
        assert buffer.layout.tolist() == [[s.offset, s.numel] for s in buffer.segments]
    for p in params:
        buffer, segment = placed[id(p)]
        view = buffer.views[segment.index]
        assert buffer.dtype == (torch.float64 if p.dtype == torch.float64 else torch.float32)
        assert (view.shape, view.stride()) == (p.shape, torch.empty_like(p).stride())
        assert view.numel() == 0 or view.data_ptr() == buffer.tensor[segment.offset :].data_ptr()


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.data())
def test_touched_ranges_cover_exactly_what_was_touched(shapes, dtypes, data):
    """Dividing the touched ranges, one for each run, divides every touched segment and leaves every other one alone."""
    params = params_of(shapes, dtypes)
    for buffer in flat_buffers(named_parameters(params), {torch.device("cpu"): reference}):
        buffer.tensor.fill_(6.0)
        touched = data.draw(st.lists(st.booleans(), min_size=len(buffer.segments), max_size=len(buffer.segments)))
        buffer.touched = bytearray(touched)
        ranges = buffer.ranges(buffer.touched_segments())
        assert len(ranges) == sum(hit for hit, _ in itertools.groupby(touched))
        for part in ranges:
            part /= 2
        for view, hit in zip(buffer.views, touched, strict=True):
            assert (view == (3.0 if hit else 6.0)).all()


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.lists(DTYPES, min_size=12, max_size=12), st.integers(1, 4))
def test_accumulate_on_random_layouts(shapes, dtypes, micro_batches):
    """Sums of small integers are exact, whatever the shapes, dtypes and strides are."""
    params = params_of(shapes, dtypes, permute=True)
    with ak.FusedAccumulator(params) as acc:
        totals = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        for i in range(micro_batches):
            for p, total in zip(params, totals, strict=True):
                p.grad = torch.randint(-8, 8, p.shape).to(p.dtype)
                total += p.grad.double() * (i + 1)
            acc.accumulate(weight=i + 1)
        for p, total in zip(params, totals, strict=True):
            assert torch.equal(acc.main_grad(p).double(), total)
        acc.zero_()


def test_segments_are_in_reverse_order_of_registration():
    """Gradients that backward produces together lie together."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    (buffer,) = flat_buffers(named_parameters(params), {torch.device("cpu"): reference})
    assert [s.name for s in buffer.segments] == ["param3", "param2", "param1", "param0"]


def test_wrapper_prefixes_do_not_count():
    """Names are the same under DistributedDataParallel, torch.compile and Lightning Fabric; dots inside survive."""
    assert strip_prefixes(["_forward_module.module.0.weight", "_forward_module.module.head"]) == ["0.weight", "head"]
    assert strip_prefixes(["_forward_module.weight", "weight"]) == ["_forward_module.weight", "weight"]
    assert strip_prefixes(["module._orig_mod.block.0.weight", "module.head"]) == ["block.0.weight", "head"]
    assert strip_prefixes(["encoder._orig_mod.weight", "submodule.weight"]) == ["encoder.weight", "submodule.weight"]
    assert strip_prefixes(["module.weight", "weight"]) == ["module.weight", "weight"]
    assert strip_prefixes(["my.module.weight"]) == ["my.module.weight"]


@pytest.mark.parametrize("make", [
    lambda: mlp().to(memory_format=torch.contiguous_format),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last),
    lambda: nn.ParameterList([nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(3, 8)[:, ::2])]),
], ids=["contiguous", "channels_last", "transposed and sliced"])  # fmt: skip
def test_main_grad_is_strided_like_the_parameter(make):
    """Views of the buffer have the parameter's shape and order of dimensions; their elements are not permuted."""
    model = make()
    acc = ak.FusedAccumulator(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p, memory_format=torch.contiguous_format)
    expected = [p.grad.clone() for p in model.parameters()]
    acc.accumulate()
    for p, e in zip(model.parameters(), expected, strict=True):
        assert acc.main_grad(p).stride() == torch.empty_like(p).stride()
        assert torch.equal(acc.main_grad(p), e)


class FewOps(torch.Tensor):
    """A weight like those of torchao's quantized training: it knows the ops of its layer, and nothing else."""

    def __new__(cls, inner):
        """Wrap it."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Refuse all but what a Parameter takes."""
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


class OfFewOps(torch.autograd.Function):
    """`x @ weight.T`."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x @ weight.inner.T

    @staticmethod
    def backward(ctx, grad):
        return None, grad.T @ ctx.saved_tensors[0]


@pytest.mark.parametrize("release", ["auto", "backward", "microbatch"])
def test_weights_that_know_few_ops(release):
    """A subclass that can be trained need not know `empty_like`."""
    torch.manual_seed(0)
    inner, x = torch.randn(3, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    weight = nn.Parameter(FewOps(inner))
    acc = ak.FusedAccumulator([weight], release=release, bucket_bytes=1)
    for part in x.split(3):
        acc.backward(OfFewOps.apply(part, weight).square().mean(), weight=len(part))
    acc.finalize()
    torch.testing.assert_close(weight.grad, 2 / (7 * 3) * (x @ inner.T).T @ x, rtol=1e-12, atol=0)
