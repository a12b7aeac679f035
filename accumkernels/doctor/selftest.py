"""A quick check, for the doctor, that a backend's ops run here and agree with float64."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..ops.schema import State

SIZES = {torch.float16: (1000, 7), torch.bfloat16: (1, 513), torch.float32: (300,), torch.float64: (33,)}
LOSS_SCALE = 1024.0
WEIGHTS = (3.0, 5.0)
TOLERANCE = 1e-6  # of fp32 arithmetic: conversion, two products, a sum and a quotient round to 2**-24 = 6e-8 each


def self_test(backend: ModuleType, device: torch.device) -> str | None:
    """Say what `backend` does wrong on `device`, or return None if it works."""
    try:
        return _accumulates(backend, device) or _sees_overflow(backend, device) or _rounds(backend, device)
    except Exception as error:  # whatever the error is, the doctor reports it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(numel, generator=generator) * 100).to(dtype) for dtype, sizes in SIZES.items() for numel in sizes
    ]


def _layout(grads: list[Tensor]) -> Tensor:
    """Rows of (offset, numel), each aligned to 128 bytes in an fp32 buffer."""
    rows, offset = [], 0
    for grad in grads:
        rows.append((offset, grad.numel()))
        offset += -(-grad.numel() // 32) * 32
    return torch.tensor(rows)


def _accumulate(
    backend: ModuleType, device: torch.device, batches: list[list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate a window of `batches` with `WEIGHTS`; returns the layout, and the buffer and state it computed."""
    layout = _layout(batches[0])
    segments = list(range(len(layout)))
    buffer = torch.zeros(int(layout[-1].sum()), device=device)
    state = torch.zeros(len(State), dtype=torch.float64, device=device)
    flags = torch.zeros(len(layout), dtype=torch.int32, device=device)
    scale = torch.full((1,), LOSS_SCALE, device=device)
    for index, (grads, weight) in enumerate(zip(batches, WEIGHTS, strict=True)):
        backend.accumulate_(
            buffer,
            state,
            [grad.to(device) for grad in grads],
            segments,
            [index == 0] * len(segments),
            layout.to(device),
            layout,
            flags=flags,
            weight=weight,
            loss_scale=scale,
        )
    return layout, buffer, state


def _differs(what: str, found: Tensor, exact: Tensor) -> str | None:
    error = float((found.double().cpu() - exact).abs().max() / exact.abs().max())
    return None if error <= TOLERANCE else f"{what} is off by {error:.1e} of the largest value"


def _accumulates(backend: ModuleType, device: torch.device) -> str | None:
    batches = [_gradients(0), _gradients(1)]
    layout, buffer, state = _accumulate(backend, device, batches)
    for index, (offset, numel) in enumerate(layout.tolist()):
        exact = torch.zeros(numel, dtype=torch.float64)
        for grads, weight in zip(batches, WEIGHTS, strict=True):
            exact += weight / LOSS_SCALE * grads[index].double()
        wrong = _differs(f"the sum of {batches[0][index].dtype} gradients", buffer[offset : offset + numel], exact)
        if wrong:
            return wrong
    if state.tolist() != [sum(WEIGHTS), 0.0, len(WEIGHTS), 0.0]:
        return f"the state is {state.tolist()}"
    norm = torch.zeros(1, dtype=torch.float64, device=device)
    backend.norm_(norm, [buffer])
    return _differs("the norm", norm, buffer.double().cpu().square().sum().reshape(1))


def _sees_overflow(backend: ModuleType, device: torch.device) -> str | None:
    for value in (torch.inf, torch.nan):
        for place in (0, -1):
            batches = [_gradients(0), _gradients(1)]
            batches[1][0][place] = value
            _, _, state = _accumulate(backend, device, batches)
            if float(state[State.FOUND_INF]) != 1.0:
                return f"{value} in element {place} goes unnoticed"
    return None


def _rounds(backend: ModuleType, device: torch.device) -> str | None:
    value = torch.linspace(-3, 3, 1001, device=device)
    divisor = torch.full((1,), 8.0, dtype=torch.float64, device=device)
    outputs = [torch.empty_like(value, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    backend.scaled_copy_(outputs, [value, value], divisor=divisor)
    for output in outputs:
        if not torch.equal(output, (value / 8).to(output.dtype)):
            return f"rounding to {output.dtype} is wrong"
    return None
