"""A whole window on the gradient's side: K times accumulate, then unscale, check, norm, clip and zero.

Every method divides by the loss scale, finds out whether anything overflowed (and reads the answer where stock
GradScaler does), clips to `MAX_NORM` and is ready for the next window. The optimizer's own pass is left out of all:
where FusedAccumulator folds unscale and clip into it, the optimizer reads two scalars more.

The methods without an end of their own get the shortest that torch has: the norm of the flat buffer, which also shows
overflow, one multiplication that unscales and clips, and one fill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import accumkernels as ak

from ..harness.case import LOSS_SCALE, Case
from ..harness.measure import Call
from . import peers

MAX_NORM = 1e-3  # smaller than any norm here, so that all clip


@dataclasses.dataclass(frozen=True)
class Window:
    """A method set up on a case.

    Attributes:
        accumulate: Takes in the gradients of one micro-batch, `case.grads`.
        finish: Unscales, checks and clips.
        result: The clipped gradient, after `finish`.
        zero: Opens the next window.
    """

    accumulate: Call
    finish: Call
    result: Callable[[], Sequence[Tensor]]
    zero: Call


def _no_step(params: list[torch.nn.Parameter], fused: bool = False) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """One of torch's optimizers that steps nothing.

    Returns:
        The optimizer, and where its step leaves the divisor that it would have folded in, as "grad_scale".
    """
    optimizer = torch.optim.SGD(params, lr=0.0, fused=fused)
    seen: dict[str, Tensor] = {}

    def step() -> None:
        if fused:
            seen["grad_scale"] = optimizer.grad_scale  # type: ignore[attr-defined]

    # Marked as the wrapper of a scheduler, which looks at no `.grad`: other steps in the place of torch's get averages.
    vars(step).update(_wrapped_by_lr_sched=True, __wrapped__=type(optimizer).step)
    optimizer.step = step  # type: ignore[method-assign, assignment]
    return optimizer, seen


def _scaler(case: Case) -> torch.amp.GradScaler:
    # Growing would change the scale in the middle of a measurement.
    return torch.amp.GradScaler(case.device.type, init_scale=LOSS_SCALE, growth_interval=10**9)


def _ours(case: Case) -> Window:
    """FusedAccumulator over fp32 parameters, whose 16-bit `.grad`s are taken before they are widened."""
    params = case.parameters(torch.float32)
    for param in params:
        param.grad_dtype = None  # lets `.grad` be 16 bit
    scaler = _scaler(case)
    scaler.scale(torch.zeros((), device=case.device))  # its state is made lazily
    accumulator = ak.FusedAccumulator(params, scaler=scaler)
    optimizer, seen = _no_step(params, fused=True)

    def accumulate() -> None:
        for param, grad in zip(params, case.grads, strict=True):
            param.grad = grad
        accumulator.accumulate()

    def result() -> list[Tensor]:
        return [accumulator.main_grad(param) / seen["grad_scale"] for param in params]

    return Window(accumulate, lambda: accumulator.step(optimizer, max_norm=MAX_NORM), result, lambda: None)


def _with_grad_scaler(case: Case, params: list[torch.nn.Parameter], accumulate: Call) -> Window:
    """What the manual says: unscale_, clip_grad_norm_, step, update, zero_grad."""
    scaler, (optimizer, _) = _scaler(case), _no_step(params)
    scaler.scale(torch.zeros((), device=case.device))

    def finish() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    def result() -> list[Tensor]:
        return [param.grad for param in params if param.grad is not None]

    return Window(accumulate, finish, result, lambda: optimizer.zero_grad(set_to_none=True))


def _stock(case: Case) -> Window:
    """fp32 parameters under autocast."""
    params = case.parameters(torch.float32)
    casts = params if case.dtype == torch.float32 else [param.to(case.dtype) for param in params]
    return _with_grad_scaler(case, params, lambda: torch.autograd.backward(casts, case.grads, retain_graph=True))


def _grad_dtype(case: Case) -> Window:
    """16-bit parameters with `grad_dtype=float32`."""
    params = case.parameters(case.dtype)
    for param in params:
        param.grad_dtype = torch.float32
    return _with_grad_scaler(case, params, lambda: torch.autograd.backward(params, case.grads))


def _coefficient(norms: Sequence[Tensor]) -> Tensor:
    """What to multiply the sums with, from their norms; not finite after an overflow."""
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)))
    # nan where the norm is infinite, which alone would make 0 of the coefficient
    return torch.clamp(MAX_NORM / (norm / LOSS_SCALE + 1e-6), max=1.0) / LOSS_SCALE + (norm - norm)


def _flat(name: str) -> Callable[[Case], Window]:
    """Any method of the first table, with the shortest end that torch has."""

    def prepare(case: Case) -> Window:
        prepared = peers.PEERS[name](case)
        flats = _storages(prepared.accumulators)

        def finish() -> None:
            coefficient = _coefficient([torch.linalg.vector_norm(flat) for flat in flats])
            if torch.isfinite(coefficient).item():  # GradScaler's own synchronisation
                torch._foreach_mul_(flats, coefficient)

        return Window(prepared.whole, finish, lambda: prepared.accumulators, lambda: torch._foreach_zero_(flats))

    return prepare


def _storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The flat buffers that `tensors` are parts of, each once; padding in them is zero."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    first = tensors[0]
    return [torch.empty(0, dtype=first.dtype, device=first.device).set_(storage) for storage in storages.values()]


def _compiled(case: Case) -> Window:
    """The compiled accumulation, and an end compiled into one pass that reads and one that writes."""
    prepared = peers.PEERS[peers.COMPILED](case)
    accumulators = list(prepared.accumulators)

    def norms(tensors: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

    def multiply(tensors: list[Tensor], coefficient: Tensor) -> None:
        torch._foreach_mul_(tensors, coefficient)

    compiled_norms = torch.compile(norms, fullgraph=True, dynamic=False)
    compiled_multiply = torch.compile(multiply, fullgraph=True, dynamic=False)

    def finish() -> None:
        coefficient = _coefficient([compiled_norms(accumulators)])
        if torch.isfinite(coefficient).item():
            compiled_multiply(accumulators, coefficient)

    return Window(prepared.whole, finish, lambda: accumulators, lambda: torch._foreach_zero_(accumulators))


WINDOWS: dict[str, Callable[[Case], Window]] = {
    peers.OURS: _ours,
    peers.MIXED: _flat(peers.MIXED),
    peers.CAST: _flat(peers.CAST),
    peers.FOREACH: _flat(peers.FOREACH),
    peers.FOREACH_CAST: _flat(peers.FOREACH_CAST),
    peers.KEPT: _flat(peers.KEPT),
    peers.COMPILED: _compiled,
    peers.STOCK: _stock,
    peers.FLAT_GRAD: _flat(peers.FLAT_GRAD),
    peers.GRAD_DTYPE: _grad_dtype,
    peers.MEGATRON: _flat(peers.MEGATRON),
    peers.DEEPSPEED: _flat(peers.DEEPSPEED),
}
