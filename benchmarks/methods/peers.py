"""Every way to add a list of 16-bit gradients into fp32 accumulators, each in the strongest form that it honestly has.

All add into accumulators that hold a sum already (a later micro-batch). Ours also multiplies by weight / loss_scale and
checks for inf and nan, which the others leave to passes of their own: the table of windows counts those.

Nobody pays for what need not be: casts of an autocast forward pass are made beforehand, gradients are handed to
autograd as they are, hooks are called without autograd's overhead, and the compiled loop has tensors of its own instead
of views, whose overlap torch would check at each call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accumkernels import ops
from accumkernels.ops import triton

from ..harness.case import Case
from . import megatron
from .prepared import Prepared

MOST_TENSORS_TO_COMPILE = 300  # inductor takes minutes over thousands

OURS = "accumkernels"
OURS_TRITON = "accumkernels, Triton kernels"
MIXED, CAST = "mixed add_", "cast and add_"
FOREACH, FOREACH_CAST = "torch._foreach_add_, mixed", "torch._foreach_add_, cast"
KEPT, COMPILED = "torch._foreach_copy_ + add_, kept temporaries", "torch.compile'd foreach"
STOCK = "stock .grad under autocast"
FLAT_GRAD, GRAD_DTYPE = "grad_dtype=None, flat .grad", "grad_dtype=float32"
MEGATRON, DEEPSPEED = "Megatron-Core main_grad", "DeepSpeed BF16_Optimizer"


def _one_by_one(case: Case, add: Callable[[Tensor, Tensor], object]) -> Prepared:
    """A method that takes parameter by parameter."""

    def whole() -> None:
        for view, grad in zip(case.views, case.grads, strict=True):
            add(view, grad)

    return Prepared(whole, case.views, lambda i: add(case.views[i], case.grads[i]))


def _ours(backend: str) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        """The op with everything that a window needs: loss scale, flags, counters."""
        state = torch.zeros(4, dtype=torch.float64, device=case.device)
        flags = torch.zeros(len(case.grads), dtype=torch.int32, device=case.device)
        scale = torch.tensor(1.0, device=case.device)
        segments, overwrite = list(range(len(case.grads))), [False] * len(case.grads)
        where = (segments, overwrite, case.layout, case.layout_host)
        accumulate = ops.select(backend, case.device).accumulate_

        def whole() -> None:
            accumulate(case.flat, state, case.grads, *where, flags=flags, loss_scale=scale)

        return Prepared(whole, case.views, launches=1)

    return prepare


def _mixed(case: Case) -> Prepared:
    """The loop that anybody writes first."""
    return _one_by_one(case, lambda view, grad: view.add_(grad))


def _cast(case: Case) -> Prepared:
    """The same with the cast spelled out."""
    return _one_by_one(case, lambda view, grad: view.add_(grad.float()))


def _foreach(case: Case) -> Prepared:
    return Prepared(lambda: torch._foreach_add_(case.views, case.grads), case.views)


def _foreach_cast(case: Case) -> Prepared:
    return Prepared(lambda: torch._foreach_add_(case.views, [g.float() for g in case.grads]), case.views)


def _kept(case: Case) -> Prepared:
    """Eager torch without allocations, for 4 more bytes of memory per element."""
    temporaries = [torch.empty_like(view) for view in case.views]

    def whole() -> None:
        torch._foreach_copy_(temporaries, case.grads)
        torch._foreach_add_(case.views, temporaries)

    return Prepared(whole, case.views)


def _compiled(case: Case) -> Prepared:
    """One fused kernel, or few; accumulators of their own."""
    accumulators = [torch.zeros_like(view) for view in case.views]

    def add(accumulators: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_add_(accumulators, grads)

    torch.compiler.reset()  # only so many versions of a function are kept, and every case is one
    function = torch.compile(add, fullgraph=True, dynamic=False)
    return Prepared(lambda: function(accumulators, case.grads), accumulators, launches=1)


def _stock(case: Case) -> Prepared:
    """fp32 parameters under autocast: backward of the cast, then AccumulateGrad, per parameter."""
    params = case.parameters(torch.float32)
    for param, view in zip(params, case.views, strict=True):
        param.grad = view
    if case.dtype == torch.float32:
        return Prepared(lambda: torch.autograd.backward(params, case.grads), case.views)
    casts = [param.to(case.dtype) for param in params]
    return Prepared(lambda: torch.autograd.backward(casts, case.grads, retain_graph=True), case.views)


def _preset(grad_dtype: torch.dtype | None) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        """16-bit parameters with a preset fp32 `.grad` to add to; with `grad_dtype` fp32, autograd widens first."""
        params = case.parameters(case.dtype)
        for param, view in zip(params, case.views, strict=True):
            param.grad_dtype = grad_dtype
            param.grad = view
        return Prepared(lambda: torch.autograd.backward(params, case.grads), case.views)

    return prepare


def _deepspeed(case: Case) -> Prepared:
    """What its hook does with immediate_grad_update, 16-bit gradients then dropped rather than zeroed."""
    return _one_by_one(case, lambda view, grad: view.data.add_(grad.data.to(view.dtype).view(view.shape)))


def _megatron(case: Case) -> Prepared:
    """The package where it is installed and works, else what its backward hook does."""
    prepared = megatron.prepare(case)
    if prepared is not None:
        return prepared
    params = case.parameters(case.dtype)

    def one(i: int) -> None:
        param = params[i]
        param.grad = case.grads[i]  # as AccumulateGrad takes it over
        case.views[i].add_(param.grad.data)
        param.grad = None

    def whole() -> None:
        for i in range(len(params)):
            one(i)

    return Prepared(whole, case.views, one)


PEERS: dict[str, Callable[[Case], Prepared]] = {
    OURS: _ours("native"),
    OURS_TRITON: _ours("triton"),
    MIXED: _mixed,
    CAST: _cast,
    FOREACH: _foreach,
    FOREACH_CAST: _foreach_cast,
    KEPT: _kept,
    COMPILED: _compiled,
    STOCK: _stock,
    FLAT_GRAD: _preset(None),
    GRAD_DTYPE: _preset(torch.float32),
    MEGATRON: _megatron,
    DEEPSPEED: _deepspeed,
}
NOT_EAGER = (OURS, OURS_TRITON, KEPT, COMPILED)  # the others are what users of eager torch run


def available(device: torch.device, tensors: int) -> list[str]:
    """The methods that make sense for so many tensors on this device."""
    left_out = [] if tensors <= MOST_TENSORS_TO_COMPILE else [COMPILED]
    if device.type != "cuda" or triton.unavailable(device) is not None:
        left_out.append(OURS_TRITON)
    return [name for name in PEERS if name not in left_out]
