"""Checks of what users pass: options, and weights, divisors and limits that may be scalars on a device."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .buffers.devices import move
from .errors import wrong_type

OVERFLOW = (None, "window", "microbatch", "raise")
RELEASE = ("auto", "microbatch", "backward")
COMM_DTYPES = (torch.float32, torch.bfloat16, "auto")


def check_options(
    params: Any,
    scaler: Any,
    overflow: Any,
    release: Any,
    bucket_bytes: Any,
    master_weights: Any,
    noise_scale: Any,
    cache_casts: Any,
    fuse_weight_gradients: Any,
    comm_dtype: Any,
    memory_limit: Any,
    autocast_route: Any,
) -> None:
    """Check the options that do not depend on the parameters themselves.

    Raises:
        TypeError, ValueError: Names the argument, its value and what is accepted.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise wrong_type("scaler", "a torch.amp.GradScaler or None", scaler)
    if overflow not in OVERFLOW:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOW))}, got {overflow!r}")
    if release not in RELEASE:
        raise ValueError(f"release must be one of {', '.join(map(repr, RELEASE))}, got {release!r}")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int | None):
        raise wrong_type("bucket_bytes", "an int", bucket_bytes)
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | None):
        raise wrong_type("memory_limit", "an int", memory_limit)
    if memory_limit is not None and memory_limit <= 0:
        raise ValueError(f"memory_limit must be positive, got {memory_limit}")
    if autocast_route is not None:
        raise TypeError(
            f"autocast_route={autocast_route!r}: there is no such option any more, leave it out. acc.backward takes "
            "16-bit gradients from the graph of each backward, and never changes the model"
        )

    if isinstance(noise_scale, bool | int | float):
        if not (isinstance(noise_scale, bool) or 0 < noise_scale < math.inf):
            raise ValueError(f"noise_scale must be True, False or a positive half-life in windows, got {noise_scale!r}")
    else:
        raise wrong_type("noise_scale", "a bool or a number of windows", noise_scale)

    if release == "backward" and overflow in ("microbatch", "raise"):
        raise ValueError(
            f"overflow={overflow!r} needs release='microbatch' or 'auto': whether a micro-batch is used is known only "
            "when all of its gradients are there"
        )
    for name, value in (("master_weights", master_weights), ("cache_casts", cache_casts)):
        if not isinstance(value, bool):
            raise wrong_type(name, "a bool", value)
    if fuse_weight_gradients not in ("auto", "deferred") and not isinstance(fuse_weight_gradients, bool):
        raise ValueError(
            f"fuse_weight_gradients must be 'auto', 'deferred', True or False, got {fuse_weight_gradients!r}"
        )
    if comm_dtype not in COMM_DTYPES:
        raise ValueError(f"comm_dtype must be one of {', '.join(map(str, COMM_DTYPES))}, got {comm_dtype!r}")


def check_split(micro_batch: Any, budget: Any, multiple_of: Any) -> None:
    """Check how a batch is to be split.

    Raises:
        TypeError, ValueError: Names the argument, its value and what is accepted.
    """
    if micro_batch != "auto" and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int)):
        raise wrong_type("micro_batch", "'auto' or a number of samples", micro_batch)
    if micro_batch != "auto" and micro_batch < 1:
        raise ValueError(f"micro_batch must be positive, got {micro_batch}")
    if isinstance(budget, bool) or not isinstance(budget, int | float | None):
        raise wrong_type("budget", "a number or None", budget)
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"budget must be positive and finite, got {budget}")
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int):
        raise wrong_type("multiple_of", "an int", multiple_of)
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be positive, got {multiple_of}")


def as_scalar(
    value: object, name: str, device: torch.device, *, allow_zero: bool = True, allow_inf: bool = False
) -> float | Tensor:
    """Check a number given by the user.

    Args:
        value: int, float or 0-d tensor. A tensor on the CPU is read; one on another device never is.
        name: The argument's name in an error.
        device: The device of the result, if it is a tensor.
        allow_zero: Whether 0 is allowed.
        allow_inf: Whether positive infinity is allowed.

    Returns:
        A Python float that passed the check, or an fp64 0-d tensor on `device` that has yet to be checked there.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is a vector, or on the host and negative, not finite, or zero without `allow_zero`.
    """
    if type(value) is float and 0 < value < math.inf:  # nearly always
        return value
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        if value.is_complex() or value.dtype is torch.bool:
            raise wrong_type(name, "a real number", value)
        if value.requires_grad:
            raise ValueError(f"{name} must not require a gradient, got a tensor that does; is it the loss?")
        if value.device.type != "cpu":
            return move(value.detach(), device, torch.float64)
        value = value.item()
    if not isinstance(value, Real):
        raise wrong_type(name, "a number or a 0-d tensor", value)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {len(str(value))} digits") from None
    in_range = number >= 0 if allow_zero else number > 0  # false for nan
    if not in_range or (math.isinf(number) and not allow_inf):
        kind = "non-negative" if allow_zero else "positive"
        raise ValueError(f"{name} must be {kind}{'' if allow_inf else ' and finite'}, got {number}")
    return number
