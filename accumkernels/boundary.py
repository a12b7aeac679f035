"""Where a user's loop calls us: Dynamo is to stay out, and a profile is to show what is ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The context manager of torch.profiler.record_function without its arguments and its own op: 0.2 microseconds where
# nothing is profiled, against 5. Inductor writes it into the code that it generates.
_range = torch._C._profiler._RecordFunctionFast


# What Dynamo does with the frames of this thread; None where it leaves them alone.
_frame_callback: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


def with_graph(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.enable_grad()` around the calls of a method, in a tenth of its time."""

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

    And with `emit_nvtx` in Nsight Systems. Both in one frame: a small micro-batch pays for each.
    """
    name = f"accumkernels::{method.__name__.lstrip('_')}"

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            with _range(name):
                return method(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have torch.compile call a function as it is, and not look inside.

    What the accumulator does depends on counts, names and `.grad`s, which Dynamo would guard on and compile anew in
    every micro-batch; there is nothing in it to fuse. `torch.compiler.disable` itself imports Dynamo, which takes a
    second: therefore at the first call, when the constructor of the optimizer has done so already. Its wrapper takes
    five microseconds, and is called only where Dynamo traces, or would compile the frames of this call.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if not is_dynamo_compiling() and _frame_callback() is None:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
