"""Hooks on other people's objects: they keep nothing alive, come off again, and are not copied or pickled along."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

_Owner = TypeVar("_Owner")


class Hook(Generic[_Owner]):
    """Calls `method(owner, *args)` while the owner lives.

    Copies and pickles of the object that carries the hook get a function which does nothing in its place, so that
    they neither drag the accumulator along nor need this package where they are loaded.

    Args:
        owner: Held weakly.
        method: A function of the owner and of what the hook is called with.
        in_graphs: Whether the hook is also to run where Dynamo traces its call: in backward under compiled autograd,
            but not in a compiled forward.
    """

    def __init__(self, owner: _Owner, method: Callable[..., Any], in_graphs: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self.method = method
        self._in_graphs = in_graphs

    def __call__(self, *args: Any) -> Any:
        """Call the method, if the owner is alive."""
        if not self._in_graphs and torch.compiler.is_compiling():
            return None
        owner = self._owner()
        return None if owner is None else self.method(owner, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # sys.audit takes any arguments and does nothing that a program without audit hooks could see.
        return functools.partial, (sys.audit, "accumkernels")


class Handles:
    """The hooks of one owner. They come off by `remove`, or when the owner is freed.

    Args:
        owner: Held weakly.
    """

    def __init__(self, owner: object) -> None:
        self._handles: list[Any] = []
        weakref.finalize(owner, _remove_all, self._handles).atexit = False

    def add(self, handle: Any) -> None:
        """Keep what `register_*_hook` returned."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Take off every hook."""
        _remove_all(self._handles)


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
