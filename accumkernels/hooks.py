"""Hooks on other people's objects, and decorators for the methods that a user's loop calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# ---- Decorators for the methods that a user's loop calls: keep Dynamo out, and show our work in a profile

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch.profiler.record_function's context manager without its arguments and its own op: 0.2 microseconds instead of 5
# if nothing is profiled. Inductor writes it into the code that it generates.
profiling_range = torch._C._profiler._RecordFunctionFast

_WHY_OPAQUE = (
    "calls of a FusedAccumulator break the graph, since they depend on counts and on .grad: compile the model with "
    "fullgraph=True instead of the whole step, or leave fullgraph out (AK11)"
)

# How Dynamo handles the frames of this thread; None if it leaves them alone.
_frame_callback: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


def profiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a method without a graph, and show its calls as `accumkernels::<its name>` in profiles.

    Nsight Systems shows them too, with `emit_nvtx`. One frame does both, because a small micro-batch pays for each.
    """
    name = f"accumkernels::{method.__name__.lstrip('_')}"

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with profiling_range(name):
                return method(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


def eagerly() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly: so that modes see their ops, or nothing is compiled for sizes seen only once."""
    compiles = "torch._dynamo" in sys.modules  # importing it takes a second
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make torch.compile call a function without looking inside.

    The accumulator's work depends on counts, names and `.grad`s, which Dynamo would guard on and recompile for in every
    micro-batch, and nothing in it can be fused. `torch.compiler.disable` imports Dynamo, which takes a second, so wait
    for the first call, when the optimizer's constructor has already imported it. Its wrapper takes five microseconds,
    so use it only if Dynamo traces, or would compile the frames of this call.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if not is_dynamo_compiling() and _frame_callback() is None:
            return function(*args, **kwargs)
        if disabled is None:
            if is_dynamo_compiling():  # what follows breaks the graph, but could not say why
                torch._dynamo.graph_break(msg=_WHY_OPAQUE)
            disabled = torch.compiler.disable(function, reason=_WHY_OPAQUE)
        return disabled(*args, **kwargs)

    return call


def graph_nodes(roots: Iterable[Any]) -> set[Any]:
    """Collect nodes of autograd's graph, and all below them; a root may be None."""
    stack = [root for root in roots if root is not None]
    seen = set(stack)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen


# ---- Hooks on other people's objects: they keep nothing alive, can be removed, and are not copied or pickled along

_Owner = TypeVar("_Owner")


class Hook(Generic[_Owner]):
    """Calls `method(owner, *args)` while the owner lives.

    Copies and pickles of the object that carries the hook get a function that does nothing instead, so that they
    neither drag the accumulator along nor need this package to load.

    Args:
        owner: Held weakly.
        method: A function of the owner and of the hook's arguments.
        in_graphs: Whether the hook also runs when Dynamo traces its call: in backward under compiled autograd, but not
            in a compiled forward.
    """

    def __init__(self, owner: _Owner, method: Callable[..., Any], in_graphs: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self.method = method
        self._in_graphs = in_graphs

    def __call__(self, *args: Any) -> Any:
        """Call the method if the owner is alive."""
        if not self._in_graphs and torch.compiler.is_compiling():
            return None
        owner = self._owner()
        return None if owner is None else self.method(owner, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # sys.audit takes any arguments and does nothing that a program without audit hooks could see.
        return functools.partial, (sys.audit, "accumkernels")


class Handles:
    """The hooks of one owner, removed by `remove` or when the owner is freed.

    Args:
        owner: Held weakly.
    """

    def __init__(self, owner: object) -> None:
        self._handles: list[Any] = []
        self._finalizer = weakref.finalize(owner, _remove_all, self._handles)
        self._finalizer.atexit = False

    def add(self, handle: Any) -> None:
        """Keep a handle that `register_*_hook` returned."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove every hook; none may be added afterwards."""
        self._finalizer.detach()  # an owner may have many, one after another
        _remove_all(self._handles)


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


# ---- calls of the rest of a loop: steps of any optimizer, and torch's own clipping


class Follower:
    """Sees every optimizer's step, and gradients that torch clips, from `follow` on while it lives.

    Torch has one hook of each kind for all followers, for the life of the process: removing one while another optimizer
    steps would break that step, and the garbage collector frees owners at any time.
    """

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See an optimizer that is about to step; not called if Dynamo traces the step."""

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """See an optimizer that has stepped."""

    def before_clip(self, params: list[Tensor]) -> None:
        """See the tensors whose `.grad`s torch's clipping is about to change."""

    def before_norm(self, grads: list[Tensor]) -> None:
        """See the tensors whose norm torch's `get_total_norm` is about to take for somebody else."""


_followers: list[weakref.ref[Follower]] = []  # no WeakSet: its guard of each walk takes as long as a small step
_installed = False


def follow(follower: Follower) -> None:
    """From now on, call `follower`, which is held weakly."""
    global _installed
    _followers.append(weakref.ref(follower, _followers.remove))
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        for name in ("_clip_grads_with_norm_", "clip_grad_value_"):  # clip_grad_norm_ ends with the first of these
            _watch(name, lambda follower, params: follower.before_clip(params))
        inner = _watch("_get_total_norm", lambda follower, grads: follower.before_norm(grads))
        if inner is not None:  # clip_grad_norm_ takes a norm before it tells whose gradients these are
            clip_grad._get_total_norm = clip_grad._no_grad(inner)


def unfollow(follower: Follower) -> None:
    """Stop calling `follower`."""
    for ref in tuple(_followers):  # a copy: the garbage collector may remove others meanwhile
        if ref() is follower:
            _followers.remove(ref)


def has_global_step_pre_hooks() -> bool:
    """Whether all optimizers have a hook other than ours."""
    for hook in _global_optimizer_pre_hooks.values():  # not any(): each step asks, and a generator is slow
        if hook is not _before_step:
            return True
    return False


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        has_closure = (len(args) > 1 or bool(kwargs)) and _has_closure(args, kwargs)
        for ref in tuple(_followers):  # a copy: followers may come and go during the calls
            follower = ref()
            if follower is not None:
                follower.before_step(optimizer, has_closure)


@opaque  # Dynamo would guard on whether followers live, but not on their places in the list
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = (len(args) > 1 or bool(kwargs)) and _has_closure(args, kwargs)
    for ref in tuple(_followers):
        follower = ref()
        if follower is not None:
            follower.after_step(optimizer, has_closure)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step was called with a closure; the first argument is the optimizer."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def _watch(name: str, notify: Callable[[Follower, list[Tensor]], None]) -> Any:
    """Tell followers of the calls of one of torch's clipping functions, whenever and however users imported it.

    What users import is a wrapper around the function that does the work, which is replaced inside the wrapper.

    Returns:
        The function that does the work; None if this torch has no such wrapper.
    """
    wrapper = getattr(clip_grad, name, None)
    inner: Any = getattr(wrapper, "__wrapped__", None)
    cells = [cell for cell in getattr(wrapper, "__closure__", None) or () if cell.cell_contents is inner]
    if not cells:
        return None

    @functools.wraps(inner)
    def watched(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _followers:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for ref in tuple(_followers):
                follower = ref()
                if follower is not None:
                    notify(follower, tensors)
        return inner(tensors, *args, **kwargs)

    cells[0].cell_contents = watched
    return inner
