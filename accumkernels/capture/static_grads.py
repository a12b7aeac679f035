"""Gives gradients memory of their own whose memory the next backward writes again.

The backward of a callable that `torch.cuda.make_graphed_callables` made returns its gradients in the same memory each
time, and autograd makes that memory the `.grad` without a copy. A second backward before `accumulate` would overwrite
the first one's gradient, and then add the result to itself: a stock loop has that fault (pytorch issues 181723, 96693).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from ..buffers.flat import FlatBuffer
from ..buffers.handed_out import use_count
from ..hooks import Handles

_OF_GRAD = 2  # uses of the storage of a `.grad` that nobody else has: its own, and the object that asks for the count


class Watches:
    """Hooks that look for such memory in the first backward of each parameter.

    A hook removes itself then, unless it finds a gradient in memory that somebody else holds, too: in an ordinary model
    no later backward runs it.

    Args:
        owner: Hooks are removed when it is freed.
    """

    def __init__(self, owner: object) -> None:
        self._handles = Handles(owner)
        self._seen: set[int] = set()  # ids of parameters that have, or had, a hook

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Put a hook on each trainable parameter that is no DTensor, to be called before all hooks registered later."""
        for buffer in buffers:
            for param in () if buffer.sharded else buffer.params:
                if param.requires_grad and id(param) not in self._seen:
                    self._seen.add(id(param))
                    self._handles.add(_watch(param))

    def remove(self) -> None:
        """Take off every hook."""
        self._handles.remove()


def _watch(param: Tensor) -> torch.utils.hooks.RemovableHandle:
    """Put the hook on one parameter.

    Memory that several gradients share looks like memory that somebody keeps: cuDNN's RNNs return views of one tensor.
    It shows in the next backward which it was, since memory that nobody kept is gone then.
    """
    found: StorageWeakRef | None = None  # memory that a gradient came in, and that somebody else held

    def take_own_memory(param: Tensor) -> None:
        nonlocal found
        if is_dynamo_compiling():  # under compiled autograd, which copies what it does not own
            return
        grad = param.grad  # None where the op that computes it has added it
        storage = grad.untyped_storage() if type(grad) is Tensor and grad.layout is torch.strided else None
        shared = storage is not None and use_count(storage._cdata) > _OF_GRAD
        if found is None and shared:
            found = StorageWeakRef(storage)
        elif found is None or found.expired():
            handle.remove()
            return
        if grad is not None and shared:
            with torch.no_grad():
                param.grad = grad.clone()

    take_own_memory.of_accumulator = True  # type: ignore[attr-defined]  # see `gradients.is_ours_alone`
    handle = param.register_post_accumulate_grad_hook(take_own_memory)
    return handle
