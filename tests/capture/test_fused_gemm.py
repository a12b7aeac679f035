"""The GEMMs that add to a segment: each against fp64, and which one is chosen."""

from __future__ import annotations

import pytest
import torch

from accumkernels.capture.fused import gemm
from tests.support.models import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(1, 1, 1), (5, 7, 3), (33, 64, 17), (64, 33, 30), (16, 48, 0)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["with MKL", "without"])
def mkl(request, monkeypatch):
    """Torch's wheels for x86 have it, others have not."""
    if request.param == "without":
        monkeypatch.setattr(gemm, "mkl_gemm", lambda dtype: None)
    elif gemm.mkl_gemm(torch.bfloat16) is None:
        pytest.skip("this build of torch exports no MKL")
    return request.param == "with MKL"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_adds_the_product(shape, dtype, mkl):
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
        add = gemm.choose(view, dtype, tokens)
        assert add is not None
        add(view, grad, input, 0.375, beta)
        expected = 0.375 * grad.double().t() @ input.double() + (start if beta else 0)
        if expected.any():
            # Products and sums in fp32, whatever the operands: a 16-bit result would be off by 2**-9.
            assert relative_error([view], [expected]) < (1e-12 if dtype == torch.float64 else 1e-6)
        else:
            assert not view.any()


def test_the_choice_is_by_shape_and_dtype(mkl):
    """fp16 with many tokens, and bf16 where there is no MKL, are faster as an ordinary gradient."""
    view = torch.zeros(8, 8)
    assert gemm.choose(view, torch.float32, 4096) is not None
    assert (gemm.choose(view, torch.bfloat16, 4096) is not None) == mkl
    assert gemm.choose(view, torch.float16, 4096) is None
    assert gemm.choose(view, torch.float16, 8) is not None
    assert gemm.choose(view.t()[:4], torch.float32, 8) is None
    assert gemm.choose(view, torch.float64, 8) is None
    assert gemm.choose(torch.zeros(0, 8), torch.float32, 8) is None
