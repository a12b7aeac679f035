"""Measures what training itself does not show: gradient errors, time in gradient handling, peak memory."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

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


@contextmanager
def _clock_running(method: Method) -> Iterator[None]:
    """Let `method.clock` run, except in the optimizer."""
    clock = method.clock
    optimizer = method.optimizer
    step = optimizer.step

    @functools.wraps(step)
    def step_outside(*args: Any, **kwargs: Any) -> Any:
        clock.__exit__()
        try:
            return step(*args, **kwargs)
        finally:
            clock.__enter__()

    # Hooks of the optimizer would not do: FusedAccumulator averages before them, as they may look at gradients.
    optimizer.step = step_outside  # type: ignore[method-assign]
    clock.running = True
    try:
        yield
    finally:
        clock.running = False
        del optimizer.step


def gradient_seconds(methods: Sequence[Method], windows: Sequence[BatchWindow]) -> list[float]:
    """Median seconds per window that each method spends on gradients; the methods take turns.

    This counts everything that happens to gradients once the layers' backward has computed them: autocast's casts to
    fp32 or the route around them, autograd's AccumulateGrad nodes, the work of backward after autograd, and everything
    after a window's last backward (average, unscale, check, clip, zero) except `optimizer.step` itself.
    """
    seconds: list[list[float]] = [[] for _ in methods]
    with ExitStack() as stack:
        for method in methods:
            stack.enter_context(_clock_running(method))
        for window in windows:
            for method, found in zip(methods, seconds, strict=True):
                method.clock.seconds = 0.0
                method.train(window, learning_rate=0.0)
                found.append(method.clock.seconds)
    return [statistics.median(found) for found in seconds]


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
