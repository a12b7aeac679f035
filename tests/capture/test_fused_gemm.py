"""The GEMMs that add to a segment: each against fp64, and which one is chosen."""

from __future__ import annotations

import pytest
import torch

from accumkernels.capture.fused import gemm
from accumkernels.ops import native
from tests.support.backends import same_bits
from tests.support.models import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

# The last one is more than a block of the library's own kernel in each direction.
SHAPES = [(1, 1, 1), (5, 7, 3), (33, 64, 17), (64, 33, 30), (16, 48, 0), (53, 1100, 301)]
OWN = [dtype for dtype in (torch.float32, torch.bfloat16) if native.multiplies(dtype)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WAYS = ["own", "MKL", "neither"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """What multiplies: processors have AVX2, AVX512_BF16 or neither, and torch's wheels for x86 have MKL."""
    if request.param == "own" and not OWN:
        pytest.skip("this processor has no AVX2")
    if request.param == "MKL" and gemm.mkl_gemm(torch.bfloat16) is None:
        pytest.skip("this build of torch exports no MKL")
    set_way(monkeypatch, request.param)
    return request.param


def set_way(monkeypatch, way):
    """As if the machine had that alone."""
    monkeypatch.setattr(native, "multiplies", lambda dtype: way == "own" and dtype in OWN)
    monkeypatch.setattr(gemm, "_mkl_widens", lambda: way == "own" and torch.bfloat16 in OWN)
    if way != "MKL":
        monkeypatch.setattr(gemm, "mkl_gemm", lambda dtype: None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_product(shape, dtype, way):
    """alpha * grad.T @ input on top, or in the place, of what was there; operands that are no contiguous rows too."""
    rows, columns, tokens = shape
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(rows, tokens, generator=generator).to(dtype).t()
    input = torch.randn(tokens, 2 * columns, generator=generator).to(dtype)[:, ::2]
    start = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    for beta in (0.0, 1.0):
        view = start.clone().to(torch.promote_types(dtype, torch.float32))
        if beta == 0:
            view.fill_(float("nan"))  # what is overwritten is never read
        add = gemm.choose(view, dtype, tokens) or gemm.widened
        few = tokens <= gemm._FEW_TOKENS or torch.bfloat16 in OWN
        assert (add is gemm.native) == (way == "own" and dtype in OWN and few)
        add(view, grad, input, 0.375, beta)
        expected = 0.375 * grad.double().t() @ input.double() + (start if beta else 0)
        if expected.any():
            # Products and sums in fp32, whatever the operands: a 16-bit result would be off by 2**-9.
            assert relative_error([view], [expected]) < (1e-12 if dtype == torch.float64 else 1e-6)
        else:
            assert not view.any()


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("shape", [(65, 130, 9), (97, 1030, 257)])
def test_own_kernel_writes_the_view_alone(shape, dtype):
    """Tiles that the view ends in go no further; what is not finite stays, and does not spread to other rows."""
    rows, columns, tokens = shape
    memory = torch.full((rows * columns + 200,), 7.0)
    view = memory[100:-100].view(rows, columns)
    grad, input = torch.randn(tokens, rows).to(dtype), torch.randn(tokens, columns).to(dtype)
    grad[3, 5] = float("inf")
    input[4, 6] = float("nan")
    native.add_product_(view, grad, input, 1.0, 1.0)
    assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()
    bad = ~view.isfinite()
    assert bad[5].all() and bad[:, 6].all() and bad.sum() == rows + columns - 1


@pytest.mark.parametrize("dtype", OWN)
def test_own_kernel_repeats_whatever_the_threads(dtype):
    """Bit for bit: the order of sums is that of tokens."""
    grad, input = torch.randn(300, 100).to(dtype), torch.randn(300, 1100).to(dtype)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        view = torch.ones(100, 1100)
        native.add_product_(view, grad, input, 0.3, 1.0)
        found.append(view)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("processor", ["AVX512_BF16", "AMX", "neither"])
def test_the_choice_is_by_shape_and_dtype(way, processor, monkeypatch):
    """With many tokens what only torch multiplies fast is faster as an ordinary gradient: fp16 with AMX, bf16."""
    mkl_widens = gemm._mkl_widens.__wrapped__  # not what it said of this machine
    set_way(monkeypatch, way)
    monkeypatch.setattr(native, "multiplies", lambda dtype: way == "own")
    monkeypatch.setattr(gemm, "_mkl_widens", mkl_widens)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: processor != "neither")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    view = torch.zeros(8, 8)
    many, few = (gemm.choose(view, torch.bfloat16, tokens) for tokens in (4096, 8))
    if processor == "AVX512_BF16":
        assert many is few is (gemm.native if way == "own" else None)
    else:
        assert few is gemm.mkl
        assert many is (gemm.mkl if way == "MKL" else None)
    many, few = (gemm.choose(view, torch.float32, tokens) for tokens in (4096, 8))
    assert few is (gemm.native if way == "own" else gemm.same_dtype)
    assert many is (gemm.native if way == "own" and processor == "AVX512_BF16" else gemm.same_dtype)
    for instructions, most in (("avx512", 64), ("avx2", 32)):
        monkeypatch.setattr(native, "cpu_instruction_set", lambda found=instructions: found)
        for tokens in (most, most + 1):
            own = way == "own" and (tokens == most or processor == "AVX512_BF16")
            assert gemm.choose(view, torch.float32, tokens) is (gemm.native if own else gemm.same_dtype)
    assert gemm.choose(view, torch.float16, 4096) is (None if processor == "AMX" else gemm.mkl)
    assert gemm.choose(view, torch.float16, 8) is gemm.mkl
    assert gemm.choose(view.t()[:4], torch.float32, 8) is None
    assert gemm.choose(view, torch.float64, 8) is None
    assert gemm.choose(torch.zeros(0, 8), torch.float32, 8) is None
