"""What training itself does not show: gradient errors, time in gradient handling, peak memory."""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.live_bytes import LiveBytes
from .data import BatchWindow
from .methods import Method


def _gradient(model: nn.Module) -> Tensor:
    """All gradients as one fp64 vector."""
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def gradient_errors(
    methods: Sequence[type[Method]], model: nn.Module, window: BatchWindow, amp_dtypes: Sequence[torch.dtype | None]
) -> list[list[float]]:
    """Distance of each method's gradient of `window` to the exact one, relative to the exact one's length (L2).

    The exact one is the gradient of the big batch's mean loss in float64 without autocast, at the weights of `model`. A
    method works as in training: its gradient is the window's fp32 `.grad` after unscaling, before clipping.

    Returns:
        Per method one number for each of `amp_dtypes`.
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
    """Let `method.clock` run, and stand still in the optimizer."""
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

    # Not by hooks of the optimizer: FusedAccumulator averages before them, as they may look at gradients.
    optimizer.step = step_outside  # type: ignore[method-assign]
    clock.running = True
    try:
        yield
    finally:
        clock.running = False
        del optimizer.step


def gradient_seconds(methods: Sequence[Method], windows: Sequence[BatchWindow]) -> list[float]:
    """Median seconds per window that each method spends on gradients; the methods take turns.

    Counted is all that happens to gradients once the layers' backward has made them: autocast's casts to fp32 or the
    route around them, autograd's AccumulateGrad nodes, what backward does after autograd, and all that follows a
    window's last backward pass (average, unscale, check, clip, zero) but `optimizer.step` itself.
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
    """Peak bytes of tensors while `cls` trains a copy of `model` for two windows; the batches themselves do not count.

    Weights, gradients, accumulators, optimizer state and activations are included. On CUDA the allocator keeps
    count; on the CPU, where it does not, the storages alive after each op are added up.
    """
    device = next(model.parameters()).device
    batches = (window.big_batch, *window.micro_batches)  # cached by the window: made here, before counting starts

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
