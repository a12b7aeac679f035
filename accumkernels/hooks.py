"""Hooks on other people's objects: they keep nothing alive, come off again, and are not copied or pickled along."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .boundary import opaque

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


# ---- what the rest of a loop does: steps of any optimizer, and torch's own clipping


class Follower:
    """Is told of every optimizer's step, and of gradients that torch clips, from `follow` on while it lives.

    Torch has one hook of each kind for all followers, for the life of the process: taking one off while another
    optimizer steps would break that step, and the garbage collector frees owners at any time.
    """

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """An optimizer is about to step; not called where Dynamo traces the step."""

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """An optimizer has stepped."""

    def before_clip(self, params: list[Tensor]) -> None:
        """`torch.nn.utils.clip_grad_norm_` or `clip_grad_value_` is about to change the `.grad`s of these tensors."""


_followers: list[weakref.ref[Follower]] = []  # a WeakSet guards each walk over it, which takes as long as a small step
_installed = False


def follow(follower: Follower) -> None:
    """Tell `follower`, which is held weakly, from now on."""
    global _installed
    _followers.append(weakref.ref(follower, _followers.remove))
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        # clip_grad_norm_ finds this one in its module, however it was imported itself; the other has no inner part.
        for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
            _watch_clipping(name)


def unfollow(follower: Follower) -> None:
    """Tell it nothing any more."""
    for ref in tuple(_followers):  # the garbage collector may take others out meanwhile
        if ref() is follower:
            _followers.remove(ref)


def has_global_step_pre_hooks() -> bool:
    """Whether any but ours is registered for all optimizers."""
    for hook in _global_optimizer_pre_hooks.values():  # not any(): each step asks, and a generator takes its time
        if hook is not _before_step:
            return True
    return False


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        has_closure = (len(args) > 1 or bool(kwargs)) and _has_closure(args, kwargs)
        for ref in tuple(_followers):  # more may come while they are told, and others may go
            follower = ref()
            if follower is not None:
                follower.before_step(optimizer, has_closure)


@opaque  # Dynamo guards on whether followers live, not on which of them stands where in the list
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = (len(args) > 1 or bool(kwargs)) and _has_closure(args, kwargs)
    for ref in tuple(_followers):
        follower = ref()
        if follower is not None:
            follower.after_step(optimizer, has_closure)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step was called with one; the first argument is the optimizer."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def _watch_clipping(name: str) -> None:
    original = getattr(clip_grad, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _followers:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            for ref in tuple(_followers):
                follower = ref()
                if follower is not None:
                    follower.before_clip(parameters)
        return original(parameters, *args, **kwargs)

    for module in (clip_grad, torch.nn.utils):
        if getattr(module, name, None) is original:
            setattr(module, name, clip)
