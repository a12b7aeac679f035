"""Which ranks an accumulator reduces over, found from what the user passed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .ddp import check_ddp


def choose_group(params: Any, process_group: Any) -> tuple[Any, Any, DistributedDataParallel | None]:
    """Find out over which ranks a FusedAccumulator reduces.

    Args:
        params: As FusedAccumulator's; a DistributedDataParallel module may be compiled.
        process_group: As FusedAccumulator's.

    Returns:
        The parameters to accumulate (of a DistributedDataParallel module the module inside), the ProcessGroup or None
        for a process alone, and the DistributedDataParallel module or None.

    Raises:
        TypeError, ValueError: `process_group` is of another kind, or contradicts `params`; `params` is wrapped by
            something that reduces gradients itself.
    """
    _refuse_engines(params)
    ddp = _unwrapped(params)
    if process_group is not None and process_group is not False:
        _check_kind(process_group)
    if ddp is None:
        return params, process_group or None, None
    if process_group is False:
        raise ValueError(
            "process_group=False with a DistributedDataParallel module as params: pass its .module for a rank that is "
            "alone, or leave process_group out"
        )
    if process_group is not None and process_group is not ddp.process_group:
        raise ValueError(
            "process_group is not the group that the DistributedDataParallel module was built with; leave it out"
        )
    check_ddp(ddp)
    return ddp.module, ddp.process_group, ddp


def check_group_given(process_group: Any, group: Any) -> None:
    """Check that it is said what to do about several ranks.

    Args:
        process_group: As FusedAccumulator's.
        group: What `choose_group` found.

    Raises:
        RuntimeError: several ranks, and nothing says what to do about them.
    """
    if process_group is None and group is None and _world_size() > 1:
        raise RuntimeError(
            f"torch.distributed runs {_world_size()} ranks, and nothing says how their gradients are combined: "
            "pass the DistributedDataParallel module as params, or process_group=torch.distributed.group.WORLD for a "
            "module or parameters that nothing wraps, or shard it with fully_shard (FSDP2); process_group=False if "
            "this rank is alone on purpose"
        )


def _world_size() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _check_kind(process_group: Any) -> None:
    distributed = torch.distributed
    if distributed.is_available() and process_group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this rank is not a member of the group")
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        hint = "; pass mesh.get_group(dimension)" if type(process_group).__name__ == "DeviceMesh" else ""
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, False or None, got "
            f"{type(process_group).__name__}{hint}"
        )


def _unwrapped(params: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel module that `params` is, compiled or not."""
    while isinstance(params, nn.Module) and "_orig_mod" in params._modules:
        params = params._modules["_orig_mod"]
    if isinstance(params, DistributedDataParallel):
        return params
    if isinstance(params, nn.Module):
        for name, module in params.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise ValueError(
                    f"params: {name!r} is a DistributedDataParallel module inside a module; pass it itself"
                )
    return None


def _refuse_engines(params: Any) -> None:
    """Refuse modules that shard or reduce gradients on terms of their own.

    Raises:
        ValueError: says which, and what to use.
    """
    if not isinstance(params, nn.Module):
        return
    for name, module in params.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.distributed.fsdp"):
                raise ValueError(
                    f"params: {name or 'the module'!r} is FullyShardedDataParallel (FSDP1), which keeps gradients in "
                    "flat shards of its own; use DistributedDataParallel, or shard with fully_shard (FSDP2)"
                )
            if kind.__module__.partition(".")[0] == "deepspeed":
                raise ValueError(
                    f"params: {name or 'the module'!r} is {kind.__qualname__} of DeepSpeed, which accumulates and "
                    "reduces gradients itself; pass the model before deepspeed.initialize, with process_group="
                )
