"""The CUDA kernels, run on the host, as a module of ops: the same functions as a backend in `accumkernels.ops`.

Importing it builds and loads the extension; with `ACCUMKERNELS_SANITIZED` in the environment (`make test-kernels` sets
it) the one with AddressSanitizer and UBSan. `kernels` is the extension, for what the ops do not show.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from .build import SANITIZED, load

kernels = load(sanitize=SANITIZED in os.environ)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in the order of csrc/core/args.h


def code(dtype: torch.dtype) -> int:
    """The value of `dtype` in the C++ enum."""
    return DTYPES.index(dtype)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check(error: int) -> None:
    if error != 0:
        raise RuntimeError(f"cudaError {error}")


def accumulate_(
    buffer: Tensor,
    state: Tensor,
    grads: Sequence[Tensor],
    segments: Sequence[int],
    overwrite: Sequence[bool],
    layout: Tensor,
    layout_host: Tensor,
    *,
    flags: Tensor | None = None,
    tag: int = 1,
    weight: float = 1.0,
    weight_tensor: Tensor | None = None,
    loss_scale: Tensor | None = None,
    drop: Tensor | None = None,
    sq_norm: Tensor | None = None,
    count: bool = True,
) -> None:
    """`accumulate_` of schema.py."""
    gradients = [
        (grad.data_ptr(), grad.numel(), int(layout_host[segment, 0]), segment, code(grad.dtype), first)
        for grad, segment, first in zip(grads, segments, overwrite, strict=True)
    ]
    error = kernels.accumulate(
        buffer=buffer.data_ptr(),
        buffer_dtype=code(buffer.dtype),
        gradients=gradients,
        layout=layout.data_ptr(),
        state=state.data_ptr(),
        flags=_address(flags),
        tag=tag,
        weight=weight,
        weight_tensor=_address(weight_tensor),
        loss_scale=_address(loss_scale),
        drop=_address(drop),
        sq_norm=_address(sq_norm),
        count=count,
    )
    _check(error)


def check_finite_(
    grads: Sequence[Tensor],
    segments: Sequence[int],
    found_inf: Tensor,
    flags: Tensor,
    *,
    tag: int = 1,
    weight_tensor: Tensor | None = None,
) -> None:
    """`check_finite_` of schema.py."""
    gradients = [
        (grad.data_ptr(), grad.numel(), 0, segment, code(grad.dtype), False)
        for grad, segment in zip(grads, segments, strict=True)
    ]
    _check(kernels.check_finite(gradients, found_inf.data_ptr(), flags.data_ptr(), tag, _address(weight_tensor)))


def norm_(out: Tensor, tensors: Sequence[Tensor], *, ord: float = 2.0) -> None:
    """`norm_` of schema.py."""
    spans = [(tensor.data_ptr(), tensor.numel(), code(tensor.dtype)) for tensor in tensors]
    _check(kernels.norm(spans, out.data_ptr(), ord == float("inf")))


def scaled_copy_(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`scaled_copy_` of schema.py."""
    pairs = [
        (output.data_ptr(), input.data_ptr(), input.numel(), code(output.dtype), code(input.dtype))
        for output, input in zip(outputs, inputs, strict=True)
    ]
    _check(kernels.scaled_copy(pairs, _address(divisor), _address(found_inf)))


def decide_(
    verdict: Tensor,
    single: Tensor,
    state: Tensor,
    *,
    divisor: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: Tensor | None = None,
    overflow: Tensor | None = None,
) -> None:
    """`decide_` of schema.py."""
    _check(kernels.decide(*map(_address, (verdict, single, state, divisor, norm, max_norm, overflow))))
