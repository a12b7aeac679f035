"""Chooses the ranks that an accumulator reduces over, from the user's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..arguments import Options
from ..buffers.parameters import NamedParameter, devices_of
from ..errors import wrong_type
from .base import Ranks, SingleProcess, backward_may_cross_ranks
from .data_parallel import DataParallel
from .ddp import Silence, check_ddp, module_buffers, refuse_wrapped, unwrapped
from .fsdp2 import Sharded, mesh_of
from .group import Group
from .pipeline import Pipeline, group_of_stages, ranks_of, stages_of


@dataclass(frozen=True)
class Choice:
    """The ranks that the user's `params` and `process_group` imply.

    Attributes:
        params: The parameters to accumulate; for a DistributedDataParallel module, the module inside.
        process_group: FusedAccumulator's argument.
        group: The ProcessGroup to reduce flat buffers over, or None.
        ddp: The DistributedDataParallel module, or None.
        shared: Lists the tensors that ranks take from rank 0 after each window; None: the buffers of `params`.
    """

    params: Any
    process_group: Any
    group: Any
    ddp: DistributedDataParallel | None
    shared: Callable[[], list[Tensor]] | None

    def join(self, named: Sequence[NamedParameter], options: Options) -> Ranks:
        """Join the other ranks. With a group this is collective, and parameters take the values of its rank 0.

        Args:
            named: The parameters.
            options: FusedAccumulator's.

        Raises:
            ValueError, RuntimeError: ranks differ, nothing says how to combine ranks, or an argument does not suit the
                way in which parameters are sharded.
        """
        given = self.process_group if self.group is None else self.group
        stages, no_replicas, release = stages_of(named), False, options.resolved_release
        if stages:
            group = group_of_stages(stages, release, given)
            # Then only the parameters tell of other ranks.
            no_replicas = bool(given) and ranks_of(group) == ranks_of(given)
            release = "microbatch"  # a schedule's backwards are over before anything could be sent
        replicas: Ranks | None = mesh_of(self.params, named, None if no_replicas else given, options.noise_scale)
        if replicas is not None:
            replicas.check_trainable(named)
        elif self.group is not None and not no_replicas:
            replicas = self._data_parallel(named, options, release)
        else:
            if not no_replicas:
                _check_said(self.process_group)
            replicas = SingleProcess()
        same = {"overflow": options.overflow, "scaler": options.scaler is not None, "noise_scale": options.noise_scale}
        if isinstance(replicas, Sharded):
            replicas.check_alike(**same, master_weights=options.master_weights)
        if not stages:
            return replicas
        params = [entry.param for entry in named]
        rounds = not options.master_weights and any(p.is_floating_point() and p.dtype.itemsize < 4 for p in params)
        joined = Pipeline(replicas, group, rounds)
        joined.check_alike(**same, ranks=replicas.size)
        return joined

    def _data_parallel(self, named: Sequence[NamedParameter], options: Options, release: str) -> DataParallel:
        """Join the ranks that have the same parameters."""
        if self.ddp is None:
            refuse_wrapped([(entry.name, entry.param) for entry in named])
        shared = self.shared or functools.partial(module_buffers, self.params, self.ddp)
        group = Group(self.group, options.comm_dtype, shared)
        group.check_alike(named, overflow=options.overflow, release=release, master_weights=options.master_weights)
        if self.ddp is None:  # otherwise DistributedDataParallel's constructor has done it
            group.broadcast_parameters(named)
            if self.shared is None:
                group.share()
        early = release != "microbatch"
        if early:
            group.separate(devices_of(named)[0])
        return DataParallel(group, len(named), early)

    def silence(self) -> Silence | None:
        """Keep the DistributedDataParallel module, if there is one, from communicating."""
        return None if self.ddp is None else Silence(self.ddp)


def choose_ranks(params: Any, process_group: Any, shared: Callable[[], list[Tensor]] | None = None) -> Choice:
    """Find the ranks that a FusedAccumulator reduces over, without communicating yet.

    Args:
        params: FusedAccumulator's argument; a DistributedDataParallel module may be compiled.
        process_group: FusedAccumulator's argument.
        shared: See `Choice`.

    Raises:
        TypeError, ValueError: `process_group` is of another kind, or contradicts `params`; or a wrapper around `params`
            reduces gradients itself.
    """
    _refuse_engines(params)
    ddp = _unwrapped(params)
    if process_group is not None and process_group is not False:
        check_kind(process_group)
    if ddp is None:
        return Choice(params, process_group, process_group or None, None, shared)
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
    return Choice(ddp.module, process_group, ddp.process_group, ddp, shared)


def _check_said(process_group: Any) -> None:
    """Refuse several ranks if nothing says what to do about them."""
    if process_group is None and backward_may_cross_ranks():
        ranks = torch.distributed.get_world_size()
        raise RuntimeError(
            f"torch.distributed runs {ranks} ranks, and nothing says how their gradients are combined: "
            "pass the DistributedDataParallel module as params, or process_group=torch.distributed.group.WORLD for a "
            "module or parameters that nothing wraps, or shard it with fully_shard (FSDP2); for the stages of a "
            "pipeline, the group that they were built with; process_group=False if this rank is alone on purpose (AK03)"
        )


def check_kind(process_group: Any) -> None:
    """Refuse anything but None, False, and a group that includes this rank.

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    distributed = torch.distributed
    if distributed.is_available() and process_group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: this rank is not a member of the group")
    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        hint = " (of a DeviceMesh: mesh.get_group(dimension))" if type(process_group).__name__ == "DeviceMesh" else ""
        raise wrong_type("process_group", f"a torch.distributed.ProcessGroup{hint}, False or None", process_group)


def _unwrapped(params: Any) -> DistributedDataParallel | None:
    """Return `params` as a DistributedDataParallel module, compiled or not; None if it is none."""
    if isinstance(params, nn.Module):
        params = unwrapped(params)
        if isinstance(params, DistributedDataParallel):
            return params
        for name, module in params.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise ValueError(
                    f"params: {name!r} is a DistributedDataParallel module inside a module; pass it itself"
                )
    return None


def _refuse_engines(params: Any) -> None:
    """Refuse modules that shard or reduce gradients in their own way."""
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
