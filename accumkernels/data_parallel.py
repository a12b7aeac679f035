"""Who takes part in data parallel training, and a DistributedDataParallel module that is kept silent."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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
    _check_ddp(ddp)
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


def refuse_sharded(name: str, param: Tensor) -> None:
    """Refuse a parameter that FSDP1 or DeepSpeed ZeRO-3 has cut up.

    Raises:
        ValueError: names it.
    """
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise ValueError(f"params: {name!r} is sharded by FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2)")
    if hasattr(param, "ds_id"):
        raise ValueError(f"params: {name!r} is sharded by DeepSpeed ZeRO-3, which reduces gradients itself")


def refuse_wrapped(named: list[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose gradients a DistributedDataParallel module averages in every backward.

    Nothing at a parameter tells of the reducer, so all objects are looked through: a fraction of a second, once.

    Raises:
        ValueError: names the first such parameter.
    """
    ours = {id(param): name for name, param in named}
    name = _first_wrapped(ours)
    if name is not None:
        gc.collect()  # the wrapper may be dead already: it is part of cycles
        name = _first_wrapped(ours)
    if name is not None:
        raise ValueError(
            f"params: {name!r} belongs to a DistributedDataParallel module, which would average its gradient in every "
            "backward: pass that module itself as params"
        )


def _first_wrapped(names: dict[int, str]) -> str | None:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            for param in candidate.parameters():
                if id(param) in names:
                    return names[id(param)]
    return None


def _check_ddp(ddp: DistributedDataParallel) -> None:
    """Refuse what a silent DistributedDataParallel module cannot do.

    Raises:
        ValueError: names the argument, and what to use instead.
    """
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) casts gradients in its reduction; use torch.autocast"
        )
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", ()):
        raise ValueError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces what the accumulator is to reduce; "
            "leave it out"
        )
    if getattr(ddp, "_comm_hooks", ()):
        raise ValueError(
            "the DistributedDataParallel module has a communication hook, which would never be called; use comm_dtype="
        )
    for name, param in ddp.module.named_parameters():
        if name in ddp.parameters_to_ignore and param.requires_grad:
            raise ValueError(
                f"params: {name!r} is one that DistributedDataParallel was told to ignore; pass an accumulator of its "
                "own with process_group=False those parameters, and another the rest with process_group="
            )


class Silence:
    """Keeps a DistributedDataParallel module from communicating, in forward and backward, until `remove`.

    Its reducer stays silent while `require_backward_grad_sync` is False, and its broadcast of buffers while
    `require_forward_param_sync` is. `no_sync()` and trainers set them back to what they found or to True; a hook before
    each forward, where the module reads them, has the last word.
    """

    _FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._before = {name: getattr(ddp, name) for name in self._FLAGS}
        # With static_graph=True the first backward would reduce after its end, whatever the flags say.
        self._before["_static_graph_delay_allreduce_enqueued"] = getattr(
            ddp, "_static_graph_delay_allreduce_enqueued", False
        )
        ddp._static_graph_delay_allreduce_enqueued = True
        self._handle = ddp.register_forward_pre_hook(_BeSilent())
        for name in self._FLAGS:
            setattr(ddp, name, False)
        weakref.finalize(self, self._handle.remove).atexit = False

    def remove(self) -> None:
        """Let the module communicate as it did before."""
        self._handle.remove()
        ddp = self._ddp()
        for name, value in self._before.items() if ddp is not None else ():
            setattr(ddp, name, value)
        self._before = {}


class _BeSilent:
    """A forward pre-hook that copies and pickles of the module do not take along."""

    def __call__(self, ddp: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments, does nothing, and needs no accumkernels where a pickle is loaded.
        return functools.partial, (sys.audit, "accumkernels")


def module_buffers(params: Any, ddp: DistributedDataParallel | None) -> list[Tensor]:
    """The module's buffers that all ranks are to share with rank 0: those that DistributedDataParallel would broadcast.

    Args:
        params: A module, else there are none.
        ddp: Its wrapper, with `broadcast_buffers` and a list of names to ignore.
    """
    if not isinstance(params, nn.Module) or (ddp is not None and not ddp.broadcast_buffers):
        return []
    source: Any = (
        ddp.parameters_to_ignore if ddp is not None else getattr(params, "_ddp_params_and_buffers_to_ignore", ())
    )
    return [buffer for name, buffer in params.named_buffers() if name not in source]
