"""Weight gradients of products and embeddings, added to their segments by the op that computes them.

Of a product it is one GEMM: `view = beta * view + alpha * grad.T @ input`. The choice of the way, or of none, depends
only on the processor, shapes and dtypes, so that a run repeats bit for bit. Its rule comes from
`python -m benchmarks.weight_gradients`, which times each way against a GEMM whose result is then added.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..devices import adds_products
from ..hooks import profiling_range
from . import native as library
from .schema import LIBRARY

# Up to this many tokens, products in fp32 cost less than writing a 16-bit gradient and adding it, however it is made.
# Their cost is reading and writing the segment, so our own kernel serves any processor.
_FEW_TOKENS = 32
_FEW_TOKENS_AVX512 = 64  # for our kernel on fp32: addmm takes 1.2 to 1.6 times as long (an Intel Xeon, 64 tokens)
_PART_OF_CACHE = 4  # sums in up to 1/4 of the last level are still there in the next micro-batch
_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112  # cblas constants

Gemm = Callable[[Tensor, Tensor, Tensor, float, float], None]
native: Gemm = library.add_product_  # fp32 or bf16 operands, by our own kernel


_SEEN_BY_MODES = "add_product_(Tensor(a!) view, Tensor grad, Tensor input, float alpha, float beta) -> ()"
_RANGE = "accumkernels::add_product_"


def add_product(way: Gemm, view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """Compute `view = beta * view + alpha * grad.T @ input` by a way that `choose` has returned.

    Profiles and dispatch modes see it as `accumkernels::add_product_`, and FlopCounterMode counts it.
    """
    with profiling_range(_RANGE):
        if torch._C._len_torch_dispatch_stack():
            _teach_flop_counters()
            torch.ops.accumkernels.add_product_(view, grad, input, alpha, beta)
        else:
            way(view, grad, input, alpha, beta)


def _add_product(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """The op behind dispatch modes, which takes the same way; any way for fake and meta tensors, which hold nothing."""
    way = choose(view, grad.dtype, grad.shape[0]) if type(view) is Tensor and not view.is_meta else None
    (way or widened)(view, grad, input, alpha, beta)


LIBRARY.define(_SEEN_BY_MODES, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("add_product_", _add_product, "CompositeExplicitAutograd")


def _teach_flop_counters() -> None:
    """Let the FlopCounterModes that run know our op; importing torch's table of them takes a tenth of a second."""
    module = sys.modules.get("torch.utils.flop_counter")
    op = torch.ops.accumkernels.add_product_
    counters = (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack() if module is not None)
    for registry in (getattr(counter, "flop_registry", {}) for counter in counters):
        registry.setdefault(op, _flops)


def _flops(view: Tensor, grad: Tensor, input: Tensor, *_: Any, **__: Any) -> int:
    return 2 * view.numel() * grad.shape[0]


def choose(view: Tensor, dtype: torch.dtype, tokens: int) -> Gemm | None:
    """Choose the way to add a weight's gradient; None if making the gradient first is faster.

    Args:
        view: The weight's segment, `[out, in]`.
        dtype: Of both operands, the output's gradient `[tokens, out]` and the input `[tokens, in]`.
        tokens: Rows of the operands.

    Returns:
        A function of the segment, both operands, alpha and beta (0 or 1).
    """
    if not view.is_contiguous() or view.numel() == 0:
        return None
    if dtype == view.dtype:
        own = dtype == torch.float32 and view.device.type == "cpu" and library.multiplies(dtype)
        few = _FEW_TOKENS_AVX512 if library.cpu_instruction_set() == "avx512" else _FEW_TOKENS
        faster = tokens <= few or (_mkl_widens() and library.multiplies(torch.bfloat16))  # on Zen 4 up to 1.8 times
        return native if own and faster else same_dtype
    if dtype not in (torch.bfloat16, torch.float16) or view.dtype != torch.float32:
        return None
    if view.device.type != "cpu":
        return widening if adds_products(view.device, dtype) else None
    if dtype == torch.bfloat16 and _mkl_widens():
        return native if library.multiplies(dtype) else None
    # MKL widens fp16. torch's products need not on processors with AMX, which also have AVX512_FP16; on others they
    # take up to 25 times as long.
    fast = not torch.cpu._is_amx_tile_supported() if dtype == torch.float16 else mkl_gemm(dtype) is not None
    return mkl if fast or tokens <= _FEW_TOKENS else None


def sums_fit_in_cache(nbytes: int) -> bool:
    """Whether adding 16-bit gradients to so many bytes of sums is faster on the CPU than a GEMM that adds its product.

    With AMX, oneDNN makes a gradient in half the time of MKL's product, and if the sums stay in a cache, the adding
    pass takes less than the other half. On a Xeon with 480 MiB of cache, a window of 11 million parameters took 3 to
    15 % less time that way, and one of 124 million, whose sums exceed the cache, up to 35 % more.
    """
    return torch.cpu._is_amx_tile_supported() and nbytes <= last_level_cache() // _PART_OF_CACHE


@functools.cache
def last_level_cache() -> int:
    """Return the bytes of the processor's third level of cache; 0 if the system does not say."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(size.removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 0


def same_dtype(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """Multiply operands of the segment's dtype."""
    torch.addmm(view, grad.t(), input, alpha=alpha, beta=beta, out=view)


def widening(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """Multiply 16-bit operands on a device whose products take a wider output."""
    torch.addmm(view, grad.t(), input, torch.float32, alpha=alpha, beta=beta, out=view)


def widened(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """Multiply operands copied to the segment's dtype."""
    same_dtype(view, grad.to(view.dtype), input.to(view.dtype), alpha, beta)


def mkl(view: Tensor, grad: Tensor, input: Tensor, alpha: float, beta: float) -> None:
    """Multiply 16-bit operands with products and sums in fp32; widen them if this build of torch has no MKL."""
    gemm = mkl_gemm(grad.dtype)
    if gemm is None:
        widened(view, grad, input, alpha, beta)
        return
    grad, input = grad.contiguous(), input.contiguous()
    (m, n), k = view.shape, grad.shape[0]
    a, b, c = grad.data_ptr(), input.data_ptr(), view.data_ptr()
    gemm(_ROW_MAJOR, _TRANS, _NO_TRANS, m, n, k, alpha, a, m, b, n, beta, c, n)


@functools.cache
def _mkl_widens() -> bool:
    """Whether oneDNN, which computes torch's products, multiplies bf16 faster than fp32 here, and MKL does not.

    Both do with AMX, and neither with AVX-512 or AVX2 alone. Processors with AVX512_BF16 but no AMX are AMD's, where
    MKL widens: on Zen 4 it takes up to 2.5 times as long as the product and the pass that adds it.
    """
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


@functools.cache
def mkl_gemm(dtype: torch.dtype) -> Callable[..., None] | None:
    """Find the function of the MKL inside torch's own library, which torch's x86 wheels for Linux export."""
    name = "cblas_gemm_bf16bf16f32" if dtype == torch.bfloat16 else "cblas_gemm_f16f16f32"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function = getattr(library, name)
    except (OSError, AttributeError):
        return None
    integer, pointer, real = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    function.argtypes = [*[integer] * 6, real, pointer, integer, pointer, integer, real, pointer, integer]
    function.restype = None
    return function


def add_rows(
    view: Tensor, grad: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool, multiplier: float | Tensor
) -> None:
    """Add `multiplier * grad[t]` to row `indices[t]` for every t.

    Deterministic on a CPU, where rows are added in the order of `indices`, and on a GPU if
    `torch.use_deterministic_algorithms` asks for it.

    Args:
        view: The weight's segment, `[rows, width]`.
        grad: `[..., width]`, of any floating dtype.
        indices: Integers of the same leading dimensions.
        padding_idx: The row that gets nothing; negative for none.
        by_frequency: Divide each row by how often its token occurs.
        multiplier: A number, or 0-d on the device.
    """
    indices = indices.reshape(-1)
    rows = grad.reshape(-1, view.shape[1]).to(view.dtype)
    if by_frequency:
        counts = torch.zeros(view.shape[0], dtype=view.dtype, device=view.device)
        counts.index_add_(0, indices, torch.ones_like(indices, dtype=view.dtype))
        rows = rows / counts[indices].unsqueeze(1)
    if isinstance(multiplier, Tensor):
        rows = rows * multiplier.to(view.dtype)
    elif multiplier != 1:  # not as index_add_'s alpha, which rounds only once: ordinary gradients are rounded here
        rows = rows * multiplier
    if padding_idx >= 0:
        rows = rows.masked_fill((indices == padding_idx).unsqueeze(1), 0)
    view.index_add_(0, indices, rows)
