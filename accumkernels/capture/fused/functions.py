"""`F.linear` and `F.embedding` of a weight whose gradient may be added to the flat buffer instead of returned.

Values and the gradients of input and bias match torch's, by the same ops. The weight stays in the graph: if its
gradient is wanted as a tensor (`torch.autograd.grad`, `create_graph`, a loop's own `loss.backward()`), backward returns
it as torch would.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Target(Protocol):
    """Adds a weight's gradient, if it is wanted in the flat buffer."""

    def add_linear(self, grad: Tensor, input: Tensor) -> bool:
        """Add `grad.T @ input`, of `[tokens, out]` and `[tokens, in]`; False: the gradient is wanted as a tensor."""

    def add_embedding(self, grad: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool) -> bool:
        """Add row t of `grad` to row `indices[t]`; False: the gradient is wanted as a tensor."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.target = target
        ctx.set_materialize_grads(False)
        return _not_a_view(F.linear(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grads, inputs = grad.reshape(-1, weight.shape[0]), input.reshape(-1, weight.shape[1])
        of_input = grads.mm(weight).view(input.shape) if wants_input else None
        of_bias = grads.sum(0) if wants_bias else None
        if wants_weight and (torch.is_grad_enabled() or not ctx.target.add_linear(grads, inputs)):
            return of_input, grads.t().mm(inputs), of_bias, None
        return of_input, None, of_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, weight: Tensor, padding_idx: int, by_frequency: bool, target: Target
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding_idx, ctx.by_frequency = weight.shape[0], padding_idx, by_frequency
        ctx.target = target
        ctx.set_materialize_grads(False)
        return _not_a_view(torch.embedding(weight, indices, padding_idx, by_frequency))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None or not ctx.needs_input_grad[1]:
            return None, None, None, None, None
        (indices,) = ctx.saved_tensors
        options = ctx.padding_idx, ctx.by_frequency
        if not torch.is_grad_enabled() and ctx.target.add_embedding(grad, indices, *options):
            return None, None, None, None, None
        of_weight = torch.ops.aten.embedding_dense_backward(grad, indices, ctx.rows, *options)
        return None, of_weight, None, None, None


def _not_a_view(output: Tensor) -> Tensor:
    """Make the output a tensor of its own for autograd: a view from a custom function cannot be changed in place."""
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


class SlotWeight(Tensor):
    """The tensor that a module finds in its weight's slot while it runs.

    Attributes that a forward of the user's reads or sets are those of the usual tensor.

    Attributes:
        plain: The slot's usual tensor; every op but the two below gets it.
        target: Adds the weight's gradient.
    """

    plain: Tensor
    target: Target

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # of a copy that is only half made
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.plain, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.plain, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(SlotWeight, plain_of, (args, kwargs))
        return func(*args, **kwargs)


def in_slot(plain: Tensor, target: Target) -> SlotWeight:
    """Make the tensor for a slot; it has the graph of `plain`, also for code that never asks `__torch_function__`."""
    with without_modes():
        weight = plain.as_subclass(SlotWeight)
    # isinstance(weight, nn.Parameter) reads the last one.
    weight.__dict__.update(plain=plain, target=target, _is_param=isinstance(plain, torch.nn.Parameter))
    return weight


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide our ops from dispatch modes, which should see the model's alone."""
    if torch._C._len_torch_dispatch_stack():
        return torch.utils._python_dispatch._disable_current_modes()
    return contextlib.nullcontext()


def plain_of(tensor: Tensor) -> Tensor:
    """Return what a slot holds when nothing is fused."""
    return tensor.plain if isinstance(tensor, SlotWeight) else tensor


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    plain, device_type = plain_of(weight), plain_of(weight).device.type
    if isinstance(weight, SlotWeight) and _is_ordinary(input) and (bias is None or _is_ordinary(bias)):
        operands = input, bias
        if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == plain.dtype:
            operands = _cast(input, plain.dtype), None if bias is None else _cast(bias, plain.dtype)
        elif torch.is_autocast_enabled(device_type):
            return F.linear(input, plain, bias)
        if operands[0].dtype == plain.dtype:
            return _Linear.apply(operands[0], plain, operands[1], weight.target)
    return F.linear(plain_of(input), plain, None if bias is None else plain_of(bias))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if isinstance(weight, SlotWeight) and _is_ordinary(input) and max_norm is None and not sparse:
        rows = weight.plain.shape[0]
        padding = -1 if padding_idx is None else padding_idx
        if -rows <= padding < rows:
            padding = padding + rows if padding_idx is not None and padding < 0 else padding
            return _Embedding.apply(input, weight.plain, padding, scale_grad_by_freq, weight.target)
    return F.embedding(plain_of(input), plain_of(weight), padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has no class with behaviour of its own, as DTensors have."""
    return type(tensor) is Tensor or type(tensor) is torch.nn.Parameter


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast does."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
