"""DTensors as what they are on this rank: local tensors, and back."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether this is a `torch.distributed.tensor.DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # takes a second to import, and without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the very tensor that it holds; any other tensor as it is."""
    # Not to_local(), which makes another tensor of a parameter's part.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of `param.grad`, laid out over the mesh as the parameter is.

    FSDP2's gradients are; those of other DTensors may still have to be reduced, or cut, which is collective.
    """
    grad: Any = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    like: Any = param
    if grad.placements != like.placements:
        grad = grad.redistribute(like.device_mesh, like.placements)
    return local(grad)


def shaped_like(part: Tensor, param: Any) -> Tensor:
    """`part`, the local part for `param`, as a DTensor over the same mesh; as it is where `param` is no DTensor."""
    if not is_dtensor(param):
        return part
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
