"""Pipeline parallel stages (`torch.distributed.pipelining`): each rank has other parameters of one model.

A schedule runs all of a stage's backwards before `accumulate` sees any gradient, and divides `.grad` itself, so
gradients are left alone until then. What stages have in common is the verdict, the loss scale that follows from it, and
the norm.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..buffers.norms import total_norm
from ..buffers.parameters import NamedParameter
from .fsdp2 import Mesh


class Stages(Mesh):
    """The stages of one pipeline, which step or skip together and are clipped by one norm.

    Args:
        named: The parameters of this rank's stages.
        group: The ranks of all stages.
    """

    distinct = True

    def __init__(self, named: Sequence[NamedParameter], group: Any) -> None:
        self.size, self.rank = group.size(), group.rank()
        self._group = group
        self._rows = (group,)
        self._cuts = {}
        self._replicas = {id(entry.param): 1 for entry in named}
        self._sharded_by_fsdp = False
        self._compared = False

    def __str__(self) -> str:
        return f"stage rank {self.rank} of {self.size}"

    def check_noise_scale(self) -> None:
        """See `Alone`: squares of stages add up."""

    def total_norm(
        self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
    ) -> Tensor:
        """See `Alone`; not of orders 0 and less, which torch defines by whole tensors."""
        norm = total_norm(buffers, norm_type, device, only)
        if math.isinf(norm_type) and norm_type > 0:
            return self.maximum(norm)
        if norm_type <= 0:
            raise ValueError(f"norm_type must be positive over the stages of a pipeline, got {norm_type}")
        power = norm.pow(norm_type)
        dist.all_reduce(power, group=self._group)
        return power.pow(1 / norm_type)


def stages_of(named: Iterable[NamedParameter]) -> list[Any]:
    """The pipeline stages that any of these parameters belongs to, and that exist by now."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return []
    ours = {id(entry.param) for entry in named}
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), module._PipelineStageBase)
        and any(id(p) in ours for p in candidate.submod.parameters())
    ]


def is_group_of(stages: Sequence[Any], group: Any) -> bool:
    """Whether a group is that of the ranks of such stages, rather than of replicas of one stage."""
    return any(
        dist.get_process_group_ranks(stage.group) == dist.get_process_group_ranks(group)
        for stage in stages
        if stage.group_size > 1
    )


def refuse_in_stages(stages: Sequence[Any], release: str, scaled: bool, together: bool) -> None:
    """Refuse what cannot be right for the parameters of pipeline stages.

    Args:
        stages: See `stages_of`.
        release: As FusedAccumulator's.
        scaled: Whether there is a GradScaler.
        together: Whether the accumulator knows the group of stages.

    Raises:
        ValueError: names the argument, and what to use instead.
    """
    if stages and release == "backward":
        raise ValueError(
            "release='backward' with a PipelineStage: its schedule divides .grad after all backwards, when they are "
            "gone; use release='microbatch', and call acc.accumulate() after each schedule.step()"
        )
    if stages and scaled and not together:
        raise ValueError(
            "scaler with a PipelineStage: all stages must skip a step together and have one scale; build the stage "
            "first, then the accumulator with process_group=stage.group"
        )
