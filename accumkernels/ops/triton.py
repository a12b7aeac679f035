"""The ops as Triton kernels, the GPU backend without the native library. `schema.py` says what they mean.

GPUs are NVIDIA's, or AMD's where torch is built for ROCm, whose devices, streams and graphs torch calls CUDA's, too.

Each op makes one launch over the whole list per kind of tensor (dtype and alignment). Accumulate and norm add a launch
of a single program, which sums the partial results. `triton_kernels.py` has the kernels; `triton_table.py` explains how
they find their tensors, and why CUDA graphs cannot capture these ops.

On CPU tensors the same kernels run in Triton's interpreter, which is slow and meant for tests, if TRITON_INTERPRET=1 is
set before Triton is first imported.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..ops import triton_table
from .keep_alive import keep_until_done
from .schema import Judged, State
from .triton_checks import check_array, check_layout, check_length, check_list, check_scalar, check_segments
from .triton_table import BLOCK, NUM_WARPS, Kind, LaunchGroup, Plan

TOTAL_BLOCK = 1024  # partial results that the last launch sums at a time


@functools.cache
def _kernels() -> ModuleType:
    """The module of kernels; loaded late, since importing Triton takes a while."""
    from ..ops import triton_kernels

    return triton_kernels


@functools.cache
def _interpreted() -> tuple[bool, bool]:
    """Whether the interpreter runs our kernels, and whether it runs Triton's own functions."""
    import triton.language
    from triton.runtime.jit import JITFunction  # the interpreter's own module needs numpy, which torch does not bring

    ours, theirs = _kernels().accumulate_kernel, triton.language.sum
    return not isinstance(ours, JITFunction), not isinstance(theirs, JITFunction)


def unavailable(device: torch.device) -> str | None:
    """Say in one sentence why this backend does not work on `device`; None if it does."""
    if device.type not in ("cuda", "cpu"):
        return f"Triton kernels run on CUDA devices, not on {device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        ours, theirs = _interpreted()
    except Exception as error:  # a broken installation must not break the import of accumkernels
        return f"the package triton does not load: {error}"
    if ours != theirs:
        return "TRITON_INTERPRET was changed after triton was imported"
    if device.type == "cpu":
        return None if ours else "Triton runs on the CPU only with TRITON_INTERPRET=1 set before it is imported"
    if ours:
        return "TRITON_INTERPRET=1 is set, and Triton's interpreter cannot read GPU memory"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def accumulate_(
    buffer: Tensor,
    state: Tensor,
    grads: Sequence[Tensor],
    segments: Sequence[int],
    overwrite: Sequence[bool],
    layout: Tensor,
    layout_host: Tensor,
    flags: Tensor | None = None,
    tag: int = 1,
    weight: float = 1.0,
    weight_tensor: Tensor | None = None,
    loss_scale: Tensor | None = None,
    drop: Tensor | None = None,
    sq_norm: Tensor | None = None,
    count: bool = True,
    contiguous: bool = False,
) -> None:
    op, device = "accumulate_", buffer.device
    segments = segments or range(len(grads))
    overwrite = list(overwrite) * len(grads) if len(overwrite) == 1 else overwrite
    if buffer.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"{op}: buffer is {buffer.dtype}, expected torch.float32 or torch.float64")
    check_array(f"{op}: buffer", buffer, buffer.dtype, device)
    check_array(f"{op}: state", state, torch.float64, device, 4)
    check_scalar(f"{op}: weight_tensor", weight_tensor, torch.float64, device)
    check_scalar(f"{op}: loss_scale", loss_scale, torch.float32, device)
    check_scalar(f"{op}: drop", drop, torch.float64, device)
    check_length(op, "overwrite", overwrite, "grads", len(grads))
    check_list(op, "grads", grads, device, contiguous)
    offsets = check_layout(op, buffer, grads, segments, layout_host)
    if flags is not None:
        check_array(f"{op}: flags", flags, torch.int32, device, len(layout_host))
    if sq_norm is not None:
        check_array(f"{op}: sq_norm", sq_norm, torch.float64, device, 2)

    addresses = [grad.data_ptr() for grad in grads]
    base, itemsize = buffer.data_ptr(), buffer.element_size()
    kinds = tuple(
        ((grad.dtype,), (address | (base + offset * itemsize)) % 16 == 0)
        for grad, address, offset in zip(grads, addresses, offsets, strict=True)
    )
    with _launching(op, device, grads):
        plan = _plan(device, grads, kinds, offsets, segments)
        table = triton_table.upload(device, addresses, overwrite=overwrite, weight=weight)
        partials = None if sq_norm is None else torch.empty(2 * plan.num_programs, dtype=torch.float64, device=device)
        scalars = (weight_tensor, loss_scale, drop)
        kernels = _kernels()
        for group in plan.groups:
            args = (buffer, state, table, group.blocks, plan.rows, len(grads), flags, tag, *scalars, partials)
            span = (group.first_program, plan.num_programs)
            _launch(kernels.accumulate_kernel, group, *args, *span, **_dtypes(group, "DTYPE"))
        if count or sq_norm is not None:
            totals = (sq_norm, partials, plan.num_programs)
            kernels.account_kernel[(1,)](
                state, table, len(grads), *scalars, *totals, COUNT=count, BLOCK=TOTAL_BLOCK, enable_fp_fusion=False
            )


def check_finite_(
    grads: Sequence[Tensor],
    segments: Sequence[int],
    found_inf: Tensor,
    flags: Tensor,
    *,
    tag: int = 1,
    weight_tensor: Tensor | None = None,
) -> None:
    op, device = "check_finite_", found_inf.device
    segments = segments or range(len(grads))
    check_scalar(f"{op}: found_inf", found_inf, torch.float64, device)
    check_scalar(f"{op}: weight_tensor", weight_tensor, torch.float64, device)
    check_array(f"{op}: flags", flags, torch.int32, device)
    check_list(op, "grads", grads, device)
    check_segments(op, segments, grads, flags.numel())

    addresses = [grad.data_ptr() for grad in grads]
    kinds = tuple(((grad.dtype,), address % 16 == 0) for grad, address in zip(grads, addresses, strict=True))
    with _launching(op, device, grads):
        plan = _plan(device, grads, kinds, None, segments)
        table = triton_table.upload(device, addresses)
        for group in plan.groups:
            args = (table, group.blocks, plan.rows, found_inf, flags, tag)
            _launch(_kernels().check_finite_kernel, group, *args, **_dtypes(group, "DTYPE"))
        if weight_tensor is not None:
            _kernels().check_weight_kernel[(1,)](weight_tensor, found_inf)


def norm_(out: Tensor, tensors: Sequence[Tensor], *, ord: float = 2.0) -> None:
    op, device = "norm_", out.device
    if ord not in (2.0, float("inf")):
        raise RuntimeError(f"{op}: ord is {ord:g}, expected 2 or inf")
    check_scalar(f"{op}: out", out, torch.float64, device)
    check_list(op, "tensors", tensors, device)

    addresses = [tensor.data_ptr() for tensor in tensors]
    kinds = tuple(((tensor.dtype,), address % 16 == 0) for tensor, address in zip(tensors, addresses, strict=True))
    with _launching(op, device, tensors):
        plan = _plan(device, tensors, kinds)
        table = triton_table.upload(device, addresses)
        partials = torch.empty(plan.num_programs, dtype=torch.float64, device=device)
        inf = ord != 2
        for group in plan.groups:
            args = (table, group.blocks, plan.rows, partials, group.first_program)
            _launch(_kernels().norm_kernel, group, *args, INF=inf, **_dtypes(group, "DTYPE"))
        if plan.groups:
            total = _kernels().norm_total_kernel[(1,)]
            total(out, partials, plan.num_programs, INF=inf, BLOCK=TOTAL_BLOCK, enable_fp_fusion=False)


def scaled_copy_(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    op = "scaled_copy_"
    check_length(op, "inputs", inputs, "outputs", len(outputs))
    if not outputs:
        return
    device = outputs[0].device
    check_scalar(f"{op}: divisor", divisor, torch.float64, device)
    check_scalar(f"{op}: found_inf", found_inf, torch.float64, device)
    check_list(op, "outputs", outputs, device)
    check_list(op, "inputs", inputs, device)
    for i, (output, input) in enumerate(zip(outputs, inputs, strict=True)):
        if output.numel() != input.numel():
            expected = f"expected {output.numel()} as outputs[{i}]"
            raise RuntimeError(f"{op}: inputs[{i}] has {input.numel()} elements, {expected}")

    to, source = [tensor.data_ptr() for tensor in outputs], [tensor.data_ptr() for tensor in inputs]
    kinds = tuple(((outputs[i].dtype, inputs[i].dtype), (to[i] | source[i]) % 16 == 0) for i in range(len(outputs)))
    with _launching(op, device, [*outputs, *inputs]):
        plan = _plan(device, inputs, kinds)
        table = triton_table.upload(device, source, to)
        for group in plan.groups:
            args = (table, group.blocks, plan.rows, len(inputs), divisor, found_inf)
            _launch(_kernels().scaled_copy_kernel, group, *args, **_dtypes(group, "OUTPUT", "INPUT"))


def judge_(
    verdict: Tensor,
    single: Tensor,
    state: Tensor,
    *,
    divisor: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: Tensor | None = None,
    overflow: Tensor | None = None,
) -> None:
    op, device = "judge_", verdict.device
    check_array(f"{op}: verdict", verdict, torch.float64, device, len(Judged))
    check_array(f"{op}: single", single, torch.float32, device, len(Judged))
    check_array(f"{op}: state", state, torch.float64, device, len(State))
    scalars = {"divisor": divisor, "norm": norm, "max_norm": max_norm, "overflow": overflow}
    for name, scalar in scalars.items():
        check_scalar(f"{op}: {name}", scalar, torch.float64, device)
    with _launching(op, device, ()):
        _kernels().judge_kernel[(1,)](verdict, single, state, divisor, norm, max_norm, overflow, enable_fp_fusion=False)


@contextmanager
def _launching(op: str, device: torch.device, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Enter `device`; keep `tensors`, which may belong to another stream, until the current one has read them."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            capturable = "native" if torch.version.hip is None else "reference"  # AMD GPUs have no native kernels
            raise RuntimeError(
                f"{op}: the Triton backend copies a table from the host, which a CUDA graph cannot replay; the backend "
                f"to capture is {capturable!r}"
            )
        keep_until_done(tensors)
        yield


def _plan(
    device: torch.device,
    tensors: Sequence[Tensor],
    kinds: tuple[Kind, ...],
    offsets: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
) -> Plan:
    zeros = (0,) * len(tensors)
    numels = tuple(tensor.numel() for tensor in tensors)
    plan = triton_table.plan(device, numels, tuple(offsets or zeros), tuple(segments or zeros), kinds)
    plan.use()
    return plan


def _launch(kernel: Any, group: LaunchGroup, *args: object, **constants: object) -> None:
    # Without fusion a product is rounded before it is added, as in the other backends.
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    kernel[(len(group.blocks),)](*args, ALIGNED=group.aligned, BLOCK=BLOCK, **constants, **options)


def _dtypes(group: LaunchGroup, *names: str) -> dict[str, object]:
    language = _kernels().tl
    dtypes = (getattr(language, str(dtype).removeprefix("torch.")) for dtype in group.dtypes)
    return dict(zip(names, dtypes, strict=True))
