"""Weights, divisors and limits as users give them: numbers, or scalars on the device that must not be read."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from .devices import move


def as_scalar(
    value: object, name: str, device: torch.device, *, allow_zero: bool = True, allow_inf: bool = False
) -> float | Tensor:
    """Check a number given by the user.

    Args:
        value: int, float or 0-d tensor. A tensor on the CPU is read; one on another device never is.
        name: What to call it in an error.
        device: Where a device scalar is needed.
        allow_zero: Whether 0 is in order.
        allow_inf: Whether positive infinity is.

    Returns:
        A Python float that passed the check, or an fp64 0-d tensor on `device` that has yet to be checked there.

    Raises:
        TypeError: not a real number.
        ValueError: a vector, or a host value that is negative, not finite, or zero where that is not allowed.
    """
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        if value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"{name} must be a real number, got a {value.dtype} tensor")
        if value.device.type != "cpu":
            return move(value.detach(), device, torch.float64)
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a 0-d tensor, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {len(str(value))} digits") from None
    in_range = number >= 0 if allow_zero else number > 0  # false for nan
    if not in_range or (math.isinf(number) and not allow_inf):
        kind = "non-negative" if allow_zero else "positive"
        raise ValueError(f"{name} must be {kind}{'' if allow_inf else ' and finite'}, got {number}")
    return number
