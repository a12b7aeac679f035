"""The ops in plain torch. This is their specification, written for readers.

They are registered as CompositeExplicitAutograd, so they also run for meta and fake tensors (where they do nothing),
and for CPU and CUDA tensors if no native library is loaded. `schema.py` says what each op means. They are not
differentiable: gradients of a backward with `create_graph=True` leave no graph in the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .schema import LIBRARY, SCHEMAS, State, VerdictField


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a 1-d view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _raise_flag(flag: Tensor, condition: Tensor) -> None:
    """Set the one-element `flag` to 1 if the 0-d bool `condition` holds."""
    flag.masked_fill_(condition, 1)


def _all_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(tensor).all()


def _is_bad_weight(weight: Tensor) -> Tensor:
    return ~((weight >= 0) & torch.isfinite(weight))


@torch.no_grad()
def accumulate_(
    buffer: Tensor,
    state: Tensor,
    grads: Sequence[Tensor],
    segments: Sequence[int],
    overwrite: Sequence[bool],
    layout: Tensor,
    layout_host: Tensor,
    flags: Tensor | None = None,
    tag: int = 1,
    weight: float = 1.0,
    weight_tensor: Tensor | None = None,
    loss_scale: Tensor | None = None,
    drop: Tensor | None = None,
    sq_norm: Tensor | None = None,
    count: bool = True,
    contiguous: bool = False,
) -> None:
    if buffer.is_meta:
        return
    if contiguous and not all(grad.is_contiguous() for grad in grads):
        raise RuntimeError("accumulate_: a gradient is not contiguous")
    segments = segments or range(len(grads))
    overwrite = list(overwrite) * len(grads) if len(overwrite) == 1 else overwrite
    one = torch.ones((), dtype=torch.float64, device=buffer.device)
    w = one * weight if weight_tensor is None else weight_tensor.reshape(())
    scale = one if loss_scale is None else loss_scale.reshape(()).double()
    dropped = one < 0 if drop is None else drop.reshape(()) != 0
    multiplier = (w / scale).to(buffer.dtype)

    if count:
        bad = _is_bad_weight(w)
        used = ~(dropped | bad)
        state[State.WEIGHT] += torch.where(used, w, 0)
        state[State.USED] += (used & (w > 0)).double()
        _raise_flag(state[State.FOUND_INF], dropped | bad)
        _raise_flag(state[State.POISONED], bad & ~dropped)

    squares, growth = torch.zeros_like(one), torch.zeros_like(one)
    for grad, segment, first in zip(grads, segments, overwrite, strict=True):
        offset, numel = layout_host[segment].tolist()
        main_grad = buffer[offset : offset + numel]
        value = flat(grad).to(buffer.dtype)
        product = value * multiplier
        kept = torch.zeros_like(main_grad) if first else main_grad
        total = product if first else main_grad + product
        if flags is not None:
            flags[segment] = torch.where(~dropped & ~_all_finite(product), tag, flags[segment])
            overflow = ~dropped & ~_all_finite(total)
            _raise_flag(state[State.FOUND_INF], overflow)
            _raise_flag(state[State.POISONED], overflow)
        if sq_norm is not None:
            squares += flat(grad).double().square().sum()
            growth += (total.double().square() - (0 if first else main_grad.double().square())).sum()
        main_grad.copy_(torch.where(dropped, kept, total))
    if sq_norm is not None:
        sq_norm += torch.where(dropped, 0, torch.stack([w / scale.square() * squares, growth]))


@torch.no_grad()
def check_finite_(
    grads: Sequence[Tensor],
    segments: Sequence[int],
    found_inf: Tensor,
    flags: Tensor,
    *,
    tag: int = 1,
    weight_tensor: Tensor | None = None,
) -> None:
    if found_inf.is_meta:
        return
    for grad, segment in zip(grads, segments or range(len(grads)), strict=True):
        overflow = ~_all_finite(grad)
        flags[segment] = torch.where(overflow, tag, flags[segment])
        _raise_flag(found_inf, overflow)
    if weight_tensor is not None:
        _raise_flag(found_inf, _is_bad_weight(weight_tensor.reshape(())))


@torch.no_grad()
def norm_(out: Tensor, tensors: Sequence[Tensor], *, ord: float = 2.0) -> None:
    if out.is_meta:
        return
    for tensor in tensors:
        if ord == 2:
            out += tensor.double().square().sum()
        elif tensor.numel():
            torch.maximum(out, tensor.double().abs().max(), out=out)  # maximum propagates NaN


@torch.no_grad()
def scaled_copy_(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    for output, input in zip(outputs, inputs, strict=True):
        if output.is_meta:
            continue
        wide = torch.float64 if torch.float64 in (output.dtype, input.dtype) else torch.float32
        value = flat(input).to(wide)
        if divisor is not None:
            value = value / divisor.reshape(()).to(wide)
        flat(output).copy_(value)
        if found_inf is not None:
            _raise_flag(found_inf, ~_all_finite(output))


@torch.no_grad()
def decide_(
    verdict: Tensor,
    single: Tensor,
    state: Tensor,
    *,
    divisor: Tensor | None = None,
    norm: Tensor | None = None,
    max_norm: Tensor | None = None,
    overflow: Tensor | None = None,
) -> None:
    if verdict.is_meta:
        return
    weight = state[State.WEIGHT]
    no_weight = weight == 0
    divide_by = weight if divisor is None else divisor.reshape(())
    in_fp32 = divide_by.float()  # gradients are divided in fp32, where 1e-50 would be 0
    bad = ~((in_fp32 > 0) & torch.isfinite(in_fp32))
    if divisor is None:
        bad &= ~no_weight
    skip = (state[State.POISONED] > 0) | bad | no_weight
    found_inf = (state[State.FOUND_INF] > 0) | bad
    empty = no_weight & ~found_inf
    divide_by = torch.where(skip, 1.0, divide_by)
    if overflow is not None:
        late = (overflow.reshape(()) != 0) & ~empty
        skip, found_inf = skip | late, found_inf | late

    norm = torch.zeros_like(weight) if norm is None else norm.reshape(()) / divide_by
    limit = torch.full_like(weight, torch.inf) if max_norm is None else max_norm.reshape(())
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    found = {
        VerdictField.ENDED: torch.ones_like(weight),
        VerdictField.SKIP: skip.double(),
        VerdictField.FOUND_INF: found_inf.double(),
        VerdictField.EMPTY: empty.double(),
        VerdictField.DIVISOR: divide_by,
        VerdictField.NORM: norm,
        VerdictField.COEFFICIENT: coefficient,
        VerdictField.DIVIDE_BY: divide_by / coefficient,
        VerdictField.WEIGHT: weight,
        VerdictField.USED: state[State.USED],
    }
    verdict.copy_(torch.stack([found[index] for index in VerdictField]))
    single.copy_(verdict)


for _name in SCHEMAS:
    LIBRARY.impl(_name, globals()[_name], "CompositeExplicitAutograd")
