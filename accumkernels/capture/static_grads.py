"""Gives gradients memory of their own whose memory the next backward writes again.

The backward of a callable that `make_graphed_callables` made returns its gradients in the same memory each time, and
autograd makes that memory the `.grad` without a copy. A second backward before `accumulate` would overwrite the first
one's gradient, and then add the result to itself: a stock loop has that fault (pytorch issues 181723, 96693).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from ..buffers.flat import FlatBuffer, use_count
from ..hooks import Handles

_OF_GRAD = 2  # uses of the storage of a `.grad` that nobody else has: its own, and the object that asks for the count


class Watches:
    """Looks for such memory in the first backward of parameters, and gives their gradients memory of their own.

    Where gradients are taken while backward runs, each parameter has a hook for that, and gets another. Elsewhere hooks
    would cost: torch calls into Python for a parameter that ever had one, 0.3 microseconds in each backward. There only
    the first and the last parameter of a buffer have a hook, which looks at all gradients when that backward ends.
    These hooks remove themselves, except from parameters whose gradients came in memory that somebody else holds, too.

    Args:
        owner: Hooks are removed when it is freed.
    """

    def __init__(self, owner: object) -> None:
        self._handles = Handles(owner)
        self._seen: set[int] = set()  # ids of parameters that are, or were, watched

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Watch the trainable parameters of new buffers, except DTensors, once their gradients have other hooks."""
        for buffer in buffers:
            params = [p for p in buffer.params if p.requires_grad and id(p) not in self._seen]
            self._seen.update(map(id, params))
            if not buffer.sharded:
                for param in params:
                    if param._post_accumulate_grad_hooks:
                        self._handles.add(_watch(param))
                quiet = [p for p in params if not p._post_accumulate_grad_hooks]
                if quiet:
                    _inspect_once(quiet, self._handles)

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()


def _shared(grad: Tensor | None) -> torch.UntypedStorage | None:
    """Return the memory of a gradient if somebody else holds it, too."""
    if type(grad) is not Tensor or grad.layout is not torch.strided:
        return None
    storage = grad.untyped_storage()
    return storage if use_count(storage._cdata) > _OF_GRAD else None


def _take_own_memory(param: Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.grad = param.grad.clone()


def _watch(param: Tensor, found: StorageWeakRef | None = None) -> RemovableHandle:
    """Put a hook on a parameter that gives its `.grad` memory of its own, before any other hook sees it.

    Memory that several gradients share looks like memory that somebody keeps: cuDNN's RNNs return views of one tensor.
    It shows in the next backward which it was, since memory that nobody kept is gone then.

    Args:
        param: The parameter.
        found: Memory that a gradient came in, and that somebody else held; None before its first backward.
    """

    def inspect(param: Tensor) -> None:
        nonlocal found
        if is_dynamo_compiling():  # under compiled autograd, which copies what it does not own
            return
        storage = _shared(param.grad)  # there is no `.grad` where the op that computes it has added it
        if found is None and storage is not None:
            found = StorageWeakRef(storage)
        elif found is None or found.expired():
            handle.remove()
            return
        if storage is not None:
            _take_own_memory(param)

    inspect.of_accumulator = True  # type: ignore[attr-defined]  # see `inbox.has_only_our_hooks`
    handle = param.register_post_accumulate_grad_hook(inspect)
    hooks: Any = param._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)  # torch calls them in the order of insertion, which move_to_end leaves as it was
    return handle


def _inspect_once(params: Sequence[Tensor], handles: Handles) -> None:
    """Look at the gradients of parameters when a backward ends that reached the first or the last of them."""
    own: list[RemovableHandle] = []

    def inspect() -> None:
        while own:  # only now: a backward that raises does not come here
            own.pop().remove()
        for param in params:
            storage = _shared(param.grad)
            if storage is not None:
                handles.add(_watch(param, StorageWeakRef(storage)))
                _take_own_memory(param)

    def ask(_: Tensor) -> None:
        if not is_dynamo_compiling():
            torch.autograd.Variable._execution_engine.queue_callback(inspect)

    ask.of_accumulator = True  # type: ignore[attr-defined]
    for param in dict.fromkeys((params[0], params[-1])):
        own.append(param.register_post_accumulate_grad_hook(ask))
        handles.add(own[-1])
