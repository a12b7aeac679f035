"""Reads and clears `.grad`, and keeps what no other capture could add before `accumulate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..buffers.dtensors import local_grad
from ..buffers.flat import FlatBuffer
from ..buffers.store import Store
from ..ops.schema import State
from .captures import Bucket, Capture, Captured, Place
from .streams import Streams


class Gradients(Capture):
    """Takes what backward has left in `.grad`, and 16-bit gradients that never were there.

    `.grad`s stay where they are until the ops have added them.

    Args:
        store: Holds the parameters.

    Attributes:
        drained: What `drain` has found, until it is forgotten.
        stashed: By flat buffer and segment, 16-bit gradients that never were in `.grad`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.drained: Bucket = ()
        self.stashed: dict[FlatBuffer, dict[int, list[Tensor]]] = {}
        self._streams = Streams()  # streams that computed the stashed gradients

    def stash(self, place: Place, grad: Tensor) -> None:
        """Keep a 16-bit gradient of an fp32 parameter, to be added without widening it first."""
        if grad.is_cuda:
            self._streams.see(grad.device)
        self.stashed.setdefault(place[0], {}).setdefault(place[1], []).append(grad)

    def drain(self) -> list[Bucket]:
        """Return what is left to add; keep it until `forget`.

        Raises:
            RuntimeError: a stashed gradient is sparse.
        """
        if self.stashed:
            self._streams.join()
        found = []
        for buffer in self._store.buffers:
            captured = _take(buffer, self.stashed.get(buffer))
            if captured.grads:
                found.append((buffer, captured))
        self.drained = found
        return [found] if found else []

    def forget(self) -> None:
        """See `Capture`; the `.grad`s that were drained are dropped."""
        for buffer, captured in self.drained:
            params = buffer.params
            if captured.segments is buffer.all_indices:
                for param in params:
                    param.grad = None
            else:
                for index in captured.segments:
                    params[index].grad = None
        self.drained = ()
        if self.stashed:
            self.stashed.clear()
            self._streams.forget()

    def discard(self) -> bool:
        """See `Capture`; every `.grad` is dropped."""
        self.forget()
        self._store.drop_grads()
        return False


def _take(buffer: FlatBuffer, stashed: Mapping[int, list[Tensor]] | None) -> Captured:
    """Collect the `.grad`s of a buffer's parameters, and the gradients stashed for its segments."""
    params = buffer.params
    if not stashed and not buffer.sharded:  # nearly always all are there, so one pass is enough
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


def _joined(buffer: FlatBuffer, index: int, grad: Tensor | None, parts: list[Tensor]) -> Tensor:
    """Sum the parts as autograd would: widen 16-bit parts, then add in fp32."""
    if grad is None and len(parts) == 1:
        return parts[0]
    segment = buffer.segments[index]
    total = segment.in_memory_order(parts[0].float() if grad is None else grad.detach())
    # Use our op, since torch's add_ would first widen the part in extra memory.
    layout, layout_host = buffer.layout_alone(index)
    flat = total.as_strided((segment.numel,), (1,))
    for part in parts[1:] if grad is None else parts:
        scratch = torch.zeros(len(State), dtype=torch.float64, device=buffer.device)
        added = [segment.in_memory_order(part)]
        buffer.ops.accumulate_(flat, scratch, added, [0], [False], layout, layout_host, count=False)
    return total


def is_ours_alone(param: Tensor) -> bool:
    """Whether nobody else waits for a parameter's gradient; hooks would not see what never gets there."""
    return param.requires_grad and not param._backward_hooks and not others_find_grad(param)


def others_find_grad(param: Tensor) -> bool:
    """Whether others have hooks that are to find a parameter's `.grad`."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if not hasattr(hook, "of_accumulator"):
            return True
    return False


def have_hooks(nodes: Iterable[Any]) -> bool:
    """Whether somebody has put Python hooks on nodes, which torch shows only to whoever registers another."""
    for node in nodes:
        for register in (node.register_prehook, node.register_hook):
            handle = register(_nothing)
            hooks = handle.hooks_dict_ref()
            del hooks[handle.id]
            if hooks:
                return True
    return False


def _nothing(*_: Any) -> None:
    """Be a hook."""
