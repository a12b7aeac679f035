"""Restores a model, its optimizer's state and every random generator, bit for bit."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..snapshots import RandomState, copied, refill

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Snapshot:
    """Remembers what a training step may change, and restores it as often as wanted.

    The contents of all tensors are copied to the host, storage by storage, so that ties, views and strides stay, and a
    nearly full device gets no fuller. A snapshot remembers parameters, buffers and every other tensor reachable from
    the modules' attributes; the attributes themselves, with the contents of lists, dicts, sets and deques (hooks,
    counters, caches, train or eval mode); `.grad`s and hooks of parameters; torch.Generators; random generators. It
    does not look into objects of other classes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._params: dict[int, tuple[Tensor, Tensor, Tensor | None, bool, list[Any]]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._seen: dict[int, Any] = {}  # by id; kept alive, so that no id is used again
        for module in model.modules():
            self._remember(module.__dict__)
        self._random_state = RandomState()

    def include(self, optimizer: Optimizer) -> None:
        """Remember an optimizer's current state, groups and hooks too."""
        self._remember(optimizer.__dict__)

    def _remember(self, root: Any) -> None:
        """Remember a value and, without recursion, everything that containers lead to."""
        queue = [root]
        while queue:
            value = queue.pop()
            if isinstance(value, Tensor):
                self._tensor(value)
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif isinstance(value, dict | list | set | deque | tuple) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if not isinstance(value, tuple):
                    self._containers.append((value, copied(value)))
                queue.extend(_items(value))

    def _tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._seen:
            return
        self._seen[id(tensor)] = tensor
        if tensor.is_leaf:
            hooks = [(name, _contents(getattr(tensor, name, None))) for name in _HOOKS]
            data = tensor.detach()  # shares the storage, but not a later `tensor.data = other`
            self._params[id(tensor)] = (tensor, data, tensor.grad, tensor.requires_grad, hooks)
            if tensor.grad is not None:
                self._content(tensor.grad)
        self._content(tensor)

    def _content(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage, storage.cpu() if storage.device.type != "cpu" else storage.clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; a Ctrl-C meanwhile waits until it is done."""
        with interrupts_later():
            self._restore()

    def _restore(self) -> None:
        for container, content in self._containers:
            refill(container, content)
        for tensor, data, grad, requires_grad, hooks in self._params.values():
            if _moved(tensor, data):
                tensor.data = data
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad
            for name, content in hooks:
                current = getattr(tensor, name, None)
                if current is not None:
                    refill(current, content)
        for storage, content in self._storages.values():
            storage.copy_(content)
        for generator, state in self._generators:
            generator.set_state(state)
        self._random_state.restore()


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (key for key in value if isinstance(key, Tensor))  # an optimizer's state
        yield from value.values()
    else:
        yield from value


def _contents(hooks: Any) -> Any:
    return {} if hooks is None else dict(hooks)


def _moved(tensor: Tensor, data: Tensor) -> bool:
    """Whether the tensor was given other memory, or views it differently."""
    if any(getattr(tensor, fact) != getattr(data, fact) for fact in ("device", "dtype", "layout", "shape")):
        return True
    if data.layout is not torch.strided:  # it has no storage of its own
        return False
    return (
        tensor.stride() != data.stride()
        or (not tensor.is_meta and tensor.untyped_storage()._cdata != data.untyped_storage()._cdata)
        or tensor.storage_offset() != data.storage_offset()
    )


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold SIGINT back and handle it at the end. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *received: pending.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)
        if pending:
            signal.raise_signal(signal.SIGINT)
