"""Where a user's loop calls us: Dynamo is to stay out, and a profile is to show what is ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# The context manager of torch.profiler.record_function without its arguments and its own op: 0.2 microseconds where
# nothing is profiled, against 5. Inductor writes it into the code that it generates.
_range = torch._C._profiler._RecordFunctionFast


def profiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show the calls of a method in profiles (and with `emit_nvtx` in Nsight Systems) as `accumkernels::<its name>`."""
    name = f"accumkernels::{method.__name__.lstrip('_')}"

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _range(name):
            return method(*args, **kwargs)

    return call


def opaque(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have torch.compile call a function as it is, and not look inside.

    What the accumulator does depends on counts, names and `.grad`s, which Dynamo would guard on and compile anew in
    every micro-batch; there is nothing in it to fuse. `torch.compiler.disable` itself imports Dynamo, which takes a
    second: therefore at the first call, when the constructor of the optimizer has done so already.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
