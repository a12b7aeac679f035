"""Checks of FusedAccumulator's keyword arguments, before anything is built."""

from __future__ import annotations

import math
from typing import Any

import torch

OVERFLOW = (None, "window", "microbatch", "raise")
RELEASE = ("microbatch", "backward")
COMM_DTYPES = (torch.float32, torch.bfloat16)


def check_options(
    params: Any,
    scaler: Any,
    overflow: Any,
    release: Any,
    bucket_bytes: Any,
    master_weights: Any,
    noise_scale: Any,
    autocast_route: Any,
    comm_dtype: Any,
) -> None:
    """Check what does not depend on the parameters themselves.

    Raises:
        TypeError, ValueError: names the argument, its value and what is accepted.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {type(scaler).__name__}")
    if overflow not in OVERFLOW:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOW))}, got {overflow!r}")
    if release not in RELEASE:
        raise ValueError(f"release must be one of {', '.join(map(repr, RELEASE))}, got {release!r}")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int):
        raise TypeError(f"bucket_bytes must be an int, got {type(bucket_bytes).__name__}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if autocast_route != "auto" and not isinstance(autocast_route, bool):
        raise ValueError(f"autocast_route must be 'auto', True or False, got {autocast_route!r}")

    if isinstance(noise_scale, bool | int | float):
        if not (isinstance(noise_scale, bool) or 0 < noise_scale < math.inf):
            raise ValueError(f"noise_scale must be True, False or a positive half-life in windows, got {noise_scale!r}")
    else:
        raise TypeError(f"noise_scale must be a bool or a number of windows, got {type(noise_scale).__name__}")

    if release == "backward" and overflow in ("microbatch", "raise"):
        raise ValueError(
            f"overflow={overflow!r} needs release='microbatch': whether a micro-batch is used is known only when all "
            "of its gradients are there"
        )
    if release == "backward" and noise_scale is not False:
        raise ValueError("noise_scale needs release='microbatch': in buckets a micro-batch has no norm")

    if not isinstance(master_weights, bool):
        raise TypeError(f"master_weights must be a bool, got {type(master_weights).__name__}")
    if autocast_route is True and not isinstance(params, torch.nn.Module):
        raise ValueError(
            "autocast_route=True needs params to be a module, whose forward it changes; use 'auto' or False"
        )
    if comm_dtype not in COMM_DTYPES:
        raise ValueError(f"comm_dtype must be one of {', '.join(map(str, COMM_DTYPES))}, got {comm_dtype!r}")
