"""Checks of numbers that planning functions are given."""

from __future__ import annotations

import gc
import math
import operator
from typing import Any

from torch import nn

from ..buffers.store import has_accumulator


def positive_int(value: Any, name: str) -> int:
    """`value` as an int of at least 1; anything with `__index__` but bool.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    number = int(number)  # not a BatchSize
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def positive_float(value: Any, name: str) -> float:
    """`value` as a positive finite float.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)


def one_of(value: Any, name: str, accepted: tuple[str, ...]) -> None:
    """Check that `value` is one of `accepted`.

    Raises:
        ValueError: names the argument, its value and what is accepted.
    """
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")


def no_accumulator(model: nn.Module, caller: str) -> None:
    """Check that no FusedAccumulator is at work on a model that is about to train on trial.

    Its hooks would take the trial's gradients into its window, and its buffers would be in the measure.

    Raises:
        RuntimeError: names the first parameter that has one.
    """
    for collected in (False, True):
        name = next((name for name, param in model.named_parameters() if has_accumulator(param)), None)
        if name is None:
            return
        if not collected:
            gc.collect()  # it may be dead already, in a cycle of a trainer or a notebook
    raise RuntimeError(
        f"{caller}: {name!r} has a FusedAccumulator, which would accumulate gradients of the trial: call this before "
        "the accumulator is built, or after its remove()"
    )
