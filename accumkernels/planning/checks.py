"""Checks the arguments of planning functions."""

from __future__ import annotations

import gc
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..buffers.store import has_accumulator
from ..errors import expect, wrong_type


def positive_int(value: Any, name: str) -> int:
    """Return `value` as an int of at least 1. It may be anything with `__index__` except a bool.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise wrong_type(name, "an int", value)
    number = int(number)  # not a BatchSize
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def positive_float(value: Any, name: str) -> float:
    """Return `value` as a positive finite float.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)


def seconds(value: Any, name: str) -> float:
    """Return `value`, a time, as a finite float of at least 0.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number of seconds", value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
    return float(value)


def fraction(value: Any, name: str, *, zero: bool = True) -> float:
    """Return `value` as a float below 1 and at least 0 (without `zero`: above 0).

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    if not (0 <= value < 1 and (zero or value > 0)):
        raise ValueError(f"{name} must be {'at least' if zero else 'more than'} 0 and less than 1, got {value!r}")
    return float(value)


def is_callable(value: Any, name: str) -> Any:
    """Check that `value` can be called, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    return expect(value, Callable, name, "callable")


def is_module(value: Any, name: str = "model") -> nn.Module:
    """Check that `value` is a module, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    return expect(value, nn.Module, name, "a torch.nn.Module")


def as_device(value: Any) -> torch.device:
    """Return `value` as a device, whether this machine has it or not.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise wrong_type("device", "a torch.device or its name", value)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"device must name a device, got {value!r} ({error})") from None


def amp_dtype_or_none(value: Any) -> torch.dtype | None:
    """Check that `value` is a dtype or None, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    return expect(value, torch.dtype | None, "amp_dtype", "a torch.dtype or None")


def one_of(value: Any, name: str, accepted: tuple[str, ...]) -> None:
    """Check that `value` is one of `accepted`.

    Raises:
        ValueError: names the argument, its value and the accepted ones.
    """
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")


def check_unsharded(model: nn.Module) -> None:
    """A trial copies and restores the model, and what other ranks hold of it is not there.

    Raises:
        ValueError: a parameter is a DTensor.
    """
    for name, param in model.named_parameters():
        if type(param).__name__ == "DTensor" or type(param.data).__name__ == "DTensor":
            raise ValueError(f"model: parameter {name!r} is sharded (DTensor): the trials cannot run without its ranks")


def no_accumulator(model: nn.Module, caller: str) -> None:
    """Check that a model to be trained on trial has no FusedAccumulator.

    Its hooks would take the trial's gradients into its window, and its buffers would be measured too.

    Raises:
        RuntimeError: names the first parameter that has one.
    """
    for collected in (False, True):
        name = next((name for name, param in model.named_parameters() if has_accumulator(param)), None)
        if name is None:
            return
        if not collected:
            gc.collect()  # the accumulator may be dead already, in a cycle of a trainer or a notebook
    raise RuntimeError(
        f"{caller}: {name!r} has a FusedAccumulator, which would accumulate gradients of the trial: call this before "
        "the accumulator is built, or after its remove()"
    )
