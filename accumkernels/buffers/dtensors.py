"""DTensors and their local shards."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether this is a `torch.distributed.tensor.DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # the import takes a second, and before it no DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, the tensor that it holds itself; any other tensor unchanged."""
    # to_local() would return a new tensor.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_offloaded(tensor: Any) -> bool:
    """Whether this is a DTensor whose shard is on the host while its mesh is not, as by FSDP2's CPUOffloadPolicy."""
    return is_dtensor(tensor) and tensor._local_tensor.device.type != tensor.device_mesh.device_type


def local_grad(param: Tensor) -> Tensor | None:
    """The local shard of `param.grad`, placed on the mesh as the parameter is.

    FSDP2's gradients already are. Gradients of other DTensors may have to be reduced or sharded first, a collective
    call.
    """
    grad: Any = param.grad
    if grad is None or not is_dtensor(param):
        return grad
    like: Any = param
    if grad.placements != like.placements:
        grad = grad.redistribute(like.device_mesh, like.placements)
    return local(grad)


def shaped_like(part: Tensor, param: Any) -> Tensor:
    """`part`, a local shard, as a DTensor on the mesh of `param`; `part` itself if `param` is not a DTensor."""
    if not is_dtensor(param):
        return part
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
