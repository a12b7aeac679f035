"""Decorators for the methods that a user's loop calls: keep Dynamo out, and show our work in a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

_P = ParamSpec("_P")
_R = TypeVar("_R")

# torch.profiler.record_function's context manager without its arguments and its own op: 0.2 microseconds instead of 5
# if nothing is profiled. Inductor writes it into the code that it generates.
profiling_range = torch._C._profiler._RecordFunctionFast

_WHY_OPAQUE = (
    "calls of a FusedAccumulator break the graph, since they depend on counts and on .grad: compile the model with "
    "fullgraph=True instead of the whole step, or leave fullgraph out"
)

# How Dynamo handles the frames of this thread; None if it leaves them alone.
_frame_callback: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


def with_graph(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap calls of a method in `torch.enable_grad()`, in a tenth of its time."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        try:
            return method(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


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
