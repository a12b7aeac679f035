"""Where gradients are taken: the one place that reads and clears `.grad`.

A capture hands over, for each flat buffer, the gradients that are ready and the segments they belong to. It knows
nothing of windows, weights or ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers.dtensors import local_grad
from ..buffers.flat import FlatBuffer
from ..buffers.layout import Segment
from ..ops.schema import State


class Captured(NamedTuple):
    """Gradients of one flat buffer, as backward left them, and the indices of their segments."""

    segments: list[int]
    grads: list[Tensor]


Bucket = Sequence[tuple[FlatBuffer, Captured]]


def fills_grad(leaf: Any) -> bool:
    """Whether the backward that runs would add to the `.grad` behind an AccumulateGrad node.

    `torch.autograd.grad` does not, wherever it is called, nor a backward whose `inputs` leave the parameter out.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # it runs for torch.autograd.grad, which asked for this very leaf
        return False


def checked(segment: Segment, grad: Tensor) -> Tensor:
    """The gradient in its segment's memory order.

    Raises:
        RuntimeError: it is sparse or has another number of elements than its segment.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(f"the gradient of {segment.name!r} is sparse; only dense gradients can be accumulated")
    segment.check_numel(grad)
    return segment.in_memory_order(grad)


def take(buffer: FlatBuffer, stashed: Mapping[int, list[Tensor]] | None = None) -> Captured:
    """Collect the `.grad`s of a buffer's parameters; they stay there until `drop`, so that a failed op loses nothing.

    Args:
        buffer: Whose parameters.
        stashed: By segment, gradients that never were in `.grad`.

    Raises:
        RuntimeError: a stashed gradient is sparse.
    """
    params = buffer.params
    if not stashed and not buffer.sharded:  # nearly always all are there, and one pass is enough
        grads = [grad for param in params if (grad := param.grad) is not None]
        if len(grads) == len(params):
            return Captured(buffer.all_indices, grads)
        if not grads:  # hooks took them
            return Captured([], [])
    found = [local_grad(param) if buffer.sharded else param.grad for param in params]
    for index, parts in (stashed or {}).items():
        found[index] = _joined(buffer, index, found[index], parts)
    grads = [grad for grad in found if grad is not None]
    if len(grads) == len(found):
        return Captured(buffer.all_indices, grads)
    return Captured([index for index, grad in enumerate(found) if grad is not None], grads)


def in_memory_order(buffer: FlatBuffer, captured: Captured) -> list[Tensor]:
    """The gradients, each in its segment's memory order.

    Raises:
        RuntimeError: names the parameter whose gradient is sparse or has another number of elements.
    """
    segments = buffer.segments
    return [checked(segments[index], grad) for index, grad in zip(*captured, strict=True)]


def _joined(buffer: FlatBuffer, index: int, grad: Tensor | None, parts: list[Tensor]) -> Tensor:
    """The sum as autograd would have made it: 16-bit parts widened, then added in fp32."""
    if grad is None and len(parts) == 1:
        return parts[0]
    segment = buffer.segments[index]
    total = checked(segment, parts[0].float() if grad is None else grad.detach())
    # By the op, since torch's add_ would first widen the part to memory of its own.
    layout, layout_host = buffer.layout_alone(index)
    flat = total.as_strided((segment.numel,), (1,))
    for part in parts[1:] if grad is None else parts:
        scratch = torch.zeros(len(State), dtype=torch.float64, device=buffer.device)
        added = [checked(segment, part)]
        buffer.ops.accumulate_(flat, scratch, added, [0], [False], layout, layout_host, count=False)
    return total


def drop(buffer: FlatBuffer, captured: Captured) -> None:
    """Drop the `.grad`s that `take` collected."""
    params = buffer.params
    if captured.segments is buffer.all_indices:
        for param in params:
            param.grad = None
    else:
        for index in captured.segments:
            params[index].grad = None
