"""Remembers models, optimizers, random generators and containers, and puts them back bit for bit."""

from __future__ import annotations

import copy
import functools
import math
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .devices import is_accelerator, random_state, set_random_state, with_random_state
from .hooks import graph_nodes

_COUNTER = 4096  # elements of a counter at the most

# ---- Remembers random generators, and puts them back


class RandomState:
    """The random generators of Python, numpy (if imported) and torch.

    Args:
        devices: Those whose generators count, beside the host's; None for all that torch can use.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = None if self._numpy is None else self._numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        devices = with_random_state() if devices is None else devices
        self._devices = {device: random_state(device) for device in devices if is_accelerator(device)}

    def restore(self) -> None:
        """Restore them all."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            set_random_state(device, state)


def _put_back(value: Any) -> Callable[[], object] | None:
    """What puts back the state of a random generator, or the elements of a small array of NumPy; None for all else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return functools.partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if isinstance(value, numpy.ndarray) and value.size <= _COUNTER and value.flags.writeable:
        return functools.partial(numpy.copyto, value, value.copy())
    return None


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (key for key in value if isinstance(key, Tensor))  # an optimizer's state
        yield from value.values()
    else:
        yield from value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)


@contextmanager
def _interrupts_later() -> Iterator[None]:
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


# ---- Restores a model, its optimizer's state and every random generator, bit for bit

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Snapshot:
    """Remembers what a training step may change, and restores it as often as wanted.

    The contents of all tensors are copied to the host, storage by storage, so that ties, views and strides stay, and a
    nearly full device gets no fuller. A snapshot remembers parameters, buffers and every other tensor reachable from
    the modules' attributes; the attributes themselves, with the contents of lists, dicts, sets and deques (hooks,
    counters, caches, train or eval mode); `.grad`s and hooks of parameters; random generators and small
    arrays of NumPy. It does not look into objects of other classes, but for modules and optimizers inside of others.

    Args:
        model: The model.
        parameters: Whether to remember parameters, tensors that are no buffers and too large for counters, and modules
            and optimizers inside of others. A forward without gradients does not change them.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = True) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._put_back: list[Callable[[], object]] = []
        self._params: list[tuple[Tensor, Tensor, Tensor | None, bool, list[Any]]] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._seen: dict[int, Any] = {}  # by id; kept alive, so that no id is used again
        self._largest = math.inf  # elements of tensors that are remembered
        self._opened: tuple[type, ...] = (nn.Module, Optimizer) if parameters else ()
        self._random_state = RandomState()
        if not parameters:
            for module in model.modules():  # FSDP2 replaces what these hold while it runs
                self._leave_out((module._parameters, module._buffers, module._modules))
            self._leave_out(model.parameters())
            for buffer in model.buffers():
                self._tensor(buffer)
            self._largest = _COUNTER
        for module in model.modules():
            self._remember(module.__dict__)

    def include(self, owner: object, *, without: Iterable[object] = ()) -> None:
        """Remember the attributes of an object too, such as an optimizer's state, groups and hooks.

        Args:
            owner: The object.
            without: Containers that are left out, such as datasets.
        """
        self._leave_out(without)
        self._remember(vars(owner))

    def include_leaves(self, loss: Tensor) -> None:
        """Remember parameters, in the model or not, that the backward of a loss will give gradients."""
        with torch._C._DisableTorchDispatch():  # modes count, or have no values
            for node in graph_nodes([loss.grad_fn]):
                leaf = getattr(node, "variable", None)
                if isinstance(leaf, nn.Parameter):
                    self._tensor(leaf)

    def _leave_out(self, values: Iterable[object]) -> None:
        self._seen.update((id(value), value) for value in values)

    def _remember(self, root: Any) -> None:
        """Remember a value and, without recursion, everything that containers lead to, but for those left out."""
        queue = [root]
        while queue:
            value = queue.pop()
            if isinstance(value, self._opened):
                value = vars(value)
            if isinstance(value, Tensor):
                self._tensor(value)
            elif (put_back := _put_back(value)) is not None:
                self._put_back.append(put_back)
            elif isinstance(value, dict | list | set | deque | tuple) and id(value) not in self._seen:
                self._seen[id(value)] = value
                if not isinstance(value, tuple):
                    self._containers.append((value, dict(value) if isinstance(value, dict) else list(value)))
                queue.extend(_items(value))

    def _tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._seen or tensor.numel() > self._largest:
            return
        self._seen[id(tensor)] = tensor
        if tensor.is_leaf:
            hooks = [(name, dict(getattr(tensor, name, None) or {})) for name in _HOOKS]
            data = tensor.detach()  # shares the storage, but not a later `tensor.data = other`
            self._params.append((tensor, data, tensor.grad, tensor.requires_grad, hooks))
            if tensor.grad is not None:
                self._content(tensor.grad)
        self._content(tensor)

    def _content(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages and storage.device.type != "meta":  # a fake tensor's is meta, too
            self._storages[storage._cdata] = storage, storage.cpu() if storage.device.type != "cpu" else storage.clone()

    @_interrupts_later()
    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; a Ctrl-C meanwhile waits until it is done."""
        for container, content in self._containers:  # in place, because others hold them too
            _refill(container, content)
        for put_back in self._put_back:
            put_back()
        self._random_state.restore()
        for tensor, data, grad, requires_grad, hooks in self._params:
            tensor.data = data
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad
            for name, content in hooks:
                current = getattr(tensor, name, None)
                if current is not None:
                    _refill(current, content)
        for storage, content in self._storages.values():
            storage.copy_(content)
