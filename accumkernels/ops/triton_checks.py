"""Checks of a Triton op's arguments that memory safety needs, with the texts of the native library's errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    """Whether the elements fill their memory without overlap, in any order of dimensions."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


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
