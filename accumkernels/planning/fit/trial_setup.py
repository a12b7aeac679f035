"""Turns the arguments of `find_batch_size` into a trial that can run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..batches import Source, dummy_batches, loaded_batches, made_batches
from ..checks import amp_dtype_or_none, as_device, check_unsharded, fraction, is_callable, is_module, positive_int
from .meters import meter_for
from .trial import GcGuard, Training


def check_trainable(model: Any) -> None:
    """Check that this process alone can train a model on trial.

    Raises:
        TypeError: `model` is no module.
        ValueError: a parameter is lazy or sharded, or trainable and on the meta device, or none is trainable.
    """
    params = list(is_module(model).named_parameters())
    for name, param in params:
        if nn.parameter.is_lazy(param):
            raise ValueError(f"model: parameter {name!r} is lazy: run the model once first")
        if param.is_meta and param.requires_grad:
            raise ValueError(f"model: parameter {name!r} is on the meta device")
    check_unsharded(model)
    if not any(param.requires_grad for _, param in params):
        raise ValueError("model has no trainable parameter")


def training_for(
    model: nn.Module,
    device: Any,
    input_shape: Any,
    output_shape: Any,
    *,
    make_batch: Any,
    make_loader: Any,
    loss_fn: Any,
    optimizer_fn: Any,
    amp_dtype: Any,
    num_iterations: Any,
    accumulate: Any,
    memory_limit: Any,
    margin: Any,
) -> Training:
    """Check `find_batch_size`'s arguments, and build the trial.

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
    """
    usable = _usable(as_device(device))
    limit = None if memory_limit is None else positive_int(memory_limit, "memory_limit")
    return Training(
        model=model,
        device=usable,
        source=_source(input_shape, output_shape, make_batch, make_loader),
        loss_fn=None if loss_fn is None else is_callable(loss_fn, "loss_fn"),
        optimizer_fn=torch.optim.Adam if optimizer_fn is None else is_callable(optimizer_fn, "optimizer_fn"),
        amp_dtype=amp_dtype_or_none(amp_dtype),
        iterations=max(2, positive_int(num_iterations, "num_iterations")),
        accumulate=None if accumulate is None else positive_int(accumulate, "accumulate"),
        meter=meter_for(usable, limit, fraction(margin, "margin")),
        garbage=GcGuard(),
    )


def _source(input_shape: Any, output_shape: Any, make_batch: Any, make_loader: Any) -> Source:
    if make_batch is not None and make_loader is not None:
        raise ValueError("give make_batch or make_loader, not both")
    if make_batch is not None:
        return made_batches(is_callable(make_batch, "make_batch"))
    if make_loader is not None:
        return loaded_batches(is_callable(make_loader, "make_loader"))
    return dummy_batches(input_shape, output_shape)


def _usable(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device: {str(device)!r}, but torch finds no usable GPU")
    torch.cuda.init()  # creates the random generators, which must be remembered
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
