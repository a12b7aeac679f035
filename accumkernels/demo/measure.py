"""Measures what training itself does not show: gradient errors and peak memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..splitting.live_bytes import LiveBytes
from .data import BatchWindow
from .methods import Method


def _gradient(model: nn.Module) -> Tensor:
    """All gradients as one fp64 vector."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def gradient_errors(
    methods: Sequence[type[Method]], model: nn.Module, window: BatchWindow, amp_dtypes: Sequence[torch.dtype | None]
) -> list[list[float]]:
    """Distance of each method's gradient of `window` to the exact gradient, relative to the latter's length (L2).

    The exact gradient is that of the big batch's mean loss in float64 without autocast, at the weights of `model`. A
    method works as in training: its gradient is the window's fp32 `.grad` after unscaling, before clipping.

    Returns:
        For each method, one number per dtype in `amp_dtypes`.
    """
    exact_model = copy.deepcopy(model).double()
    exact_model(window.big_batch.inputs, window.big_batch.targets).backward()
    exact = _gradient(exact_model)

    def error(cls: type[Method], amp_dtype: torch.dtype | None) -> float:
        method = cls(model, amp_dtype)
        method.backward(window)
        method.unscale()
        return float((_gradient(method.model) - exact).norm() / exact.norm())

    return [[error(cls, amp_dtype) for amp_dtype in amp_dtypes] for cls in methods]


def peak_bytes(cls: type[Method], model: nn.Module, window: BatchWindow, amp_dtype: torch.dtype | None) -> int:
    """Peak bytes of tensors while `cls` trains a copy of `model` for two windows, without the batches themselves.

    Weights, gradients, accumulators, optimizer state and activations are included. On CUDA the allocator counts; on the
    CPU we add up the storages that are alive after each op.
    """
    device = next(model.parameters()).device
    batches = (window.big_batch, *window.micro_batches)  # cached by the window, so create them before counting starts

    def run() -> None:
        method = cls(model, amp_dtype)
        for _ in range(2):  # the optimizer's state exists from the second on
            method.train(window, learning_rate=0.0)

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    known = [*model.parameters(), *(tensor for batch in batches for tensor in (batch.inputs, batch.targets))]
    live = LiveBytes()
    before = live.add(known)
    with live:
        run()
    return live.peak - before
