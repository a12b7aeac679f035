"""The ops as Triton kernels, the GPU backend without the native library. `schema.py` says what they mean.

GPUs are NVIDIA's, or AMD's where torch is built for ROCm, whose devices, streams and graphs torch calls CUDA's, too.

Each op makes one launch over the whole list per kind of tensor (dtype and alignment). Accumulate and norm add a launch
of a single program, which sums the partial results. `triton_kernels.py` has the kernels; the section on tables below
explains how they find their tensors, and why CUDA graphs cannot capture these ops.

On CPU tensors the same kernels run in Triton's interpreter, which is slow and meant for tests, if TRITON_INTERPRET=1 is
set before Triton is first imported.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import devices
from .schema import State, VerdictField

TOTAL_BLOCK = 1024  # partial results that the last launch sums at a time


@functools.cache
def _kernels() -> ModuleType:
    """The module of kernels; loaded late, since importing Triton takes a while."""
    from . import triton_kernels

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
    with _launching(op, device) as tables:
        plan = _plan(tables, device, grads, kinds, offsets, segments)
        table = upload(device, addresses, overwrite=overwrite, weight=weight)
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
    with _launching(op, device) as tables:
        plan = _plan(tables, device, grads, kinds, None, segments)
        table = upload(device, addresses)
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
    with _launching(op, device) as tables:
        plan = _plan(tables, device, tensors, kinds)
        table = upload(device, addresses)
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
    with _launching(op, device) as tables:
        plan = _plan(tables, device, inputs, kinds)
        table = upload(device, source, to)
        for group in plan.groups:
            args = (table, group.blocks, plan.rows, len(inputs), divisor, found_inf)
            _launch(_kernels().scaled_copy_kernel, group, *args, **_dtypes(group, "OUTPUT", "INPUT"))


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
    op, device = "decide_", verdict.device
    check_array(f"{op}: verdict", verdict, torch.float64, device, len(VerdictField))
    check_array(f"{op}: single", single, torch.float32, device, len(VerdictField))
    check_array(f"{op}: state", state, torch.float64, device, len(State))
    scalars = {"divisor": divisor, "norm": norm, "max_norm": max_norm, "overflow": overflow}
    for name, scalar in scalars.items():
        check_scalar(f"{op}: {name}", scalar, torch.float64, device)
    with _launching(op, device):
        _kernels().decide_kernel[(1,)](
            verdict, single, state, divisor, norm, max_norm, overflow, enable_fp_fusion=False
        )


@contextmanager
def _launching(op: str, device: torch.device) -> Iterator[list[Tensor]]:
    """Enter `device`; keep what is put into the list, which may belong to another stream, until kernels have read it.

    Kernels are queued inside, and tensors kept after them: an event that was recorded before says nothing of them.
    """
    tables: list[Tensor] = []
    if device.type != "cuda":
        yield tables
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            capturable = "native" if torch.version.hip is None else "reference"  # AMD GPUs have no native kernels
            raise RuntimeError(
                f"{op}: the Triton backend copies a table from the host, which a CUDA graph cannot replay; the backend "
                f"to capture is {capturable!r}"
            )
        try:
            yield tables
        finally:
            devices.keep_until_done(tables)


def _plan(
    tables: list[Tensor],
    device: torch.device,
    tensors: Sequence[Tensor],
    kinds: tuple[Kind, ...],
    offsets: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
) -> Plan:
    zeros = (0,) * len(tensors)
    numels = tuple(tensor.numel() for tensor in tensors)
    found = plan(device, numels, tuple(offsets or zeros), tuple(segments or zeros), kinds)
    if found.ready is not None:
        torch.cuda.current_stream().wait_event(found.ready)
        tables += (found.rows, *(group.blocks for group in found.groups))
    return found


def _launch(kernel: Any, group: LaunchGroup, *args: object, **constants: object) -> None:
    # Without fusion a product is rounded before it is added, as in the other backends.
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    kernel[(len(group.blocks),)](*args, ALIGNED=group.aligned, BLOCK=BLOCK, **constants, **options)


def _dtypes(group: LaunchGroup, *names: str) -> dict[str, object]:
    language = _kernels().tl
    dtypes = (getattr(language, str(dtype).removeprefix("torch.")) for dtype in group.dtypes)
    return dict(zip(names, dtypes, strict=True))


# ---- Checks of a Triton op's arguments that memory safety needs, with the texts of the native library's errors

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless the tensor has this dtype and is on this device."""
    if tensor.device != device:
        raise RuntimeError(f"{name} is on {tensor.device}, expected {device} as the other tensors")
    if tensor.dtype != dtype:
        raise RuntimeError(f"{name} is {tensor.dtype}, expected {dtype}")


def check_array(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device, numel: int = 0) -> None:
    """Raise RuntimeError unless the tensor is contiguous and has at least `numel` elements."""
    check_tensor(name, tensor, dtype, device)
    if tensor.numel() < numel:
        raise RuntimeError(f"{name} has {tensor.numel()} elements, expected at least {numel}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} is not contiguous")


def check_scalar(name: str, tensor: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError unless the tensor is absent or has one element."""
    if tensor is not None:
        check_tensor(name, tensor, dtype, device)
        if tensor.numel() != 1:
            raise RuntimeError(f"{name} has {tensor.numel()} elements, expected 1")


def check_length(op: str, name: str, values: Sequence[object], other: str, length: int) -> None:
    """Raise RuntimeError unless a list is as long as another."""
    if len(values) != length:
        raise RuntimeError(f"{op}: {name} has {len(values)} elements, expected {length} as {other}")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without overlap, in any order of dimensions, which `empty_like` keeps."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def check_list(
    op: str, argument: str, tensors: Sequence[Tensor], device: torch.device, contiguous: bool = False
) -> None:
    """Raise RuntimeError unless all tensors are dense, or contiguous, floating-point tensors on the device."""
    for i, tensor in enumerate(tensors):
        if tensor.device != device:
            raise RuntimeError(f"{op}: {argument}[{i}] is on {tensor.device}, expected {device} as the other tensors")
        if contiguous and not tensor.is_contiguous():
            raise RuntimeError(f"{op}: {argument}[{i}] is not contiguous")
        if not is_dense(tensor):
            raise RuntimeError(f"{op}: {argument}[{i}] is not dense: its strides overlap or leave gaps")
        if tensor.dtype not in _FLOATS:
            expected = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
            raise RuntimeError(f"{op}: {argument}[{i}] is {tensor.dtype}, expected {expected}")


def check_segments(op: str, segments: Sequence[int], grads: Sequence[Tensor], count: int) -> None:
    """Raise RuntimeError unless there is one segment of `count` per gradient."""
    check_length(op, "segments", segments, "grads", len(grads))
    for i, segment in enumerate(segments):
        if not 0 <= segment < count:
            raise RuntimeError(f"{op}: segments[{i}] is {segment}, expected 0 to {count - 1}")


def check_layout(
    op: str, buffer: Tensor, grads: Sequence[Tensor], segments: Sequence[int], layout_host: Tensor
) -> list[int]:
    """Check the sizes and bounds of the gradients' segments, and that none repeats; returns their offsets."""
    if layout_host.dim() != 2 or layout_host.shape[1] != 2:
        raise RuntimeError(f"{op}: layout_host has another shape than [segments, 2]")
    check_array(f"{op}: layout_host", layout_host, torch.int64, torch.device("cpu"))
    check_segments(op, segments, grads, len(layout_host))
    rows = layout_host.tolist()
    offsets = []
    for i, (grad, segment) in enumerate(zip(grads, segments, strict=True)):
        offset, numel = rows[segment]
        if grad.numel() != numel:
            raise RuntimeError(f"{op}: grads[{i}] has {grad.numel()} elements, expected {numel} of segment {segment}")
        if offset < 0 or offset + numel > buffer.numel():
            outside = f"outside the buffer's {buffer.numel()} elements"
            raise RuntimeError(f"{op}: layout_host[{segment}] is ({offset}, {numel}), {outside}")
        offsets.append(offset)
    # Two programs would add two gradients of one segment at the same time.
    if len(set(segments)) != len(segments):
        i = next(i for i, segment in enumerate(segments) if segment in segments[:i])
        raise RuntimeError(f"{op}: segments[{i}] repeats segment {segments[i]}")
    return offsets


# ---- The tables that Triton kernels read on the device: each block's tensor, and sizes, offsets and addresses.
#
# Sizes, offsets and the block map do not change between calls: they are uploaded once and kept. Addresses, first-touch
# flags and the weight travel in one small asynchronous copy per call.
#
# That copy reads a pinned buffer, which is reused afterwards. A CUDA graph would read it again at every replay, when it
# holds other values. Even a buffer kept for the graph would be right only if the gradients' addresses never change,
# with the weight and the first-touch flags of the capture. So inside a capture the ops raise. Capture the native
# backend instead, whose tables travel in the launch itself.

# 16 elements per thread of 8 warps of 32: four loads of each operand in flight, of 16 bytes of fp32 and 8 of 16 bit.
BLOCK = 4096
NUM_WARPS = 8

# The dtypes that one launch works on: (gradient,) or (output, input), and whether all its pointers are 16-byte aligned.
Kind = tuple[tuple[torch.dtype, ...], bool]


class LaunchGroup(NamedTuple):
    """The tensors of a list that one launch works on."""

    dtypes: tuple[torch.dtype, ...]
    aligned: bool
    blocks: Tensor  # int32: the list index of each program's tensor
    first_program: int  # the number of programs in earlier groups


class Plan(NamedTuple):
    """The tables that calls with the same sizes, offsets, segments and kinds share."""

    rows: Tensor  # int64 [n, 4]: numel, offset, segment, first program; on the device, as all tables
    groups: list[LaunchGroup]
    num_programs: int
    ready: torch.cuda.Event | None  # the tables have arrived; None on the CPU


@functools.lru_cache(maxsize=256)
def plan(
    device: torch.device,
    numels: tuple[int, ...],
    offsets: tuple[int, ...],
    segments: tuple[int, ...],
    kinds: tuple[Kind, ...],
) -> Plan:
    """Group tensors by kind and map programs to them; kept on `device`, for any stream."""
    numel = torch.tensor(numels, dtype=torch.int64, device="cpu")
    num_blocks = (numel + BLOCK - 1) // BLOCK
    first = torch.zeros_like(numel)
    groups = []
    num_programs = 0
    for kind in dict.fromkeys(kinds):
        members = torch.tensor([i for i, other in enumerate(kinds) if other == kind], device="cpu")
        counts = num_blocks[members]
        first[members] = counts.cumsum(0) - counts
        blocks = members.repeat_interleave(counts).int()
        if len(blocks):
            groups.append(LaunchGroup(*kind, _send(blocks, device), num_programs))
        num_programs += len(blocks)
    rows = torch.stack(
        [numel, torch.tensor(offsets, device="cpu").long(), torch.tensor(segments, device="cpu").long(), first], dim=1
    )
    rows = _send(rows, device)
    ready = torch.cuda.current_stream().record_event() if device.type == "cuda" else None
    return Plan(rows, groups, num_programs, ready)


def _send(table: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting: torch reuses a pinned buffer only when the copies from it are done."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def upload(
    device: torch.device,
    addresses: Sequence[int],
    second: Sequence[int] | None = None,
    overwrite: Sequence[bool] | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Send the table of one call: addresses, second addresses, first-touch flags, the bits of the weight."""
    zeros = [0] * len(addresses)
    (bits,) = struct.unpack("<q", struct.pack("<d", weight))
    words = [*addresses, *(second or zeros), *(map(int, overwrite) if overwrite else zeros), bits]
    return _send(torch.tensor(words, dtype=torch.int64, device="cpu"), device)
