"""Backward of a scaled loss, from the gradient that the scale is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary


def _of(module: str, function: Any) -> Any:
    """The function; where somebody has replaced it before this import, what equals none."""
    return function if getattr(function, "__globals__", {}).get("__name__") == module else object()


_TORCHS_SCALE = _of("torch.amp.grad_scaler", torch.amp.GradScaler.scale)
_TORCHS_BACKWARD = _of("torch._tensor", Tensor.backward), _of("torch.autograd", torch.autograd.backward)
_run_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def scaled_backward(loss: Tensor, scaler: torch.amp.GradScaler | None, kwargs: dict[str, Any]) -> Callable[[], None]:
    """What runs `scaler.scale(loss).backward(**kwargs)`, or makes the same gradients bit for bit.

    The gradient of a product is the other factor, so that backward of the plain loss may as well begin with the scale.
    With a loss of one element there is nothing else for torch's two functions to look at, and they take as long as a
    small layer. Whatever is not as usual, or was replaced by somebody, goes through them.

    Args:
        loss: The plain loss.
        scaler: An enabled one, or None.
        kwargs: Of `Tensor.backward`.
    """
    if not kwargs and _is_usual(loss):
        scale = None if scaler is None else scaler._scale
        if scaler is None:
            gradient = torch.ones_like(loss)
        elif scale is not None and scale.device == loss.device and _scales_as_torch(scaler):
            gradient = scale.clone()  # a function of the user's may write to the gradient that it gets
        else:
            return scaler.scale(loss).backward
        return partial(
            _run_engine, (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return partial((loss if scaler is None else scaler.scale(loss)).backward, **kwargs)


def _is_usual(loss: Tensor) -> bool:
    """Whether `loss.backward()` would hand one number to the engine by torch's own code, with nothing around it."""
    return (
        type(loss) is Tensor
        and loss.requires_grad
        and loss.dim() == 0
        and loss.is_floating_point()
        and _run_engine is not None
        and (Tensor.backward, torch.autograd.backward) == _TORCHS_BACKWARD
        and not has_torch_function_unary(loss)
        and not torch._C._are_functorch_transforms_active()
    )


def _scales_as_torch(scaler: torch.amp.GradScaler) -> bool:
    return type(scaler).scale is _TORCHS_SCALE and "scale" not in vars(scaler)
