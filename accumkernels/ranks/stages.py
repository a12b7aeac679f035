"""Pipeline stages: which of them parameters belong to, the group of their ranks, and what does not work with them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..buffers.parameters import NamedParameter


def stages_of(named: Iterable[NamedParameter]) -> list[Any]:
    """List the existing pipeline stages that any of these parameters belongs to."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not dist.is_initialized():  # stages need both, and torch keeps no list of them
        return []
    ours = {id(entry.param) for entry in named}
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), module._PipelineStageBase)
        and any(id(p) in ours for p in candidate.submod.parameters())
    ]


def group_of_stages(stages: Sequence[Any], release: str, process_group: Any) -> Any:
    """Return the group of the ranks that have the stages of this pipeline.

    Args:
        stages: See `stages_of`; at least one.
        release: FusedAccumulator's argument.
        process_group: FusedAccumulator's argument, or DistributedDataParallel's group.

    Raises:
        ValueError: names the argument that does not work with pipeline stages, and what to use instead.
    """
    group = _group(stages[0])
    if release == "backward":
        raise ValueError(
            "release='backward' with a PipelineStage: its schedule divides .grad after all backwards, when they are "
            "gone; use release='auto' or 'microbatch', and call acc.accumulate() after each schedule.step()"
        )
    if any(isinstance(stage.submod, DistributedDataParallel) for stage in stages):
        raise ValueError(
            "a PipelineStage of a DistributedDataParallel module, which its schedule makes reduce in every step: build "
            "the stage from the module inside, and pass that with process_group= the group of the stage's replicas"
        )
    ours = set(dist.get_process_group_ranks(group))
    if any(set(dist.get_process_group_ranks(_group(stage))) != ours for stage in stages):
        raise ValueError("params: they belong to stages of different pipelines; build an accumulator for each")
    if process_group is False and len(ours) > 1:
        raise ValueError(
            "process_group=False with a PipelineStage: all stages must skip a step together, follow one loss scale and "
            "be clipped by one norm; use process_group= the group that the stages were built with"
        )
    if process_group and not is_group_of(group, process_group):
        shared = ours & set(dist.get_process_group_ranks(process_group))
        if len(shared) > 1:
            raise ValueError(
                f"process_group has ranks {sorted(shared)}, which have different stages of a pipeline: use "
                "process_group= the group that the stages were built with, or that of the ranks that have replicas of "
                "this rank's stages"
            )
    return group


def _group(stage: Any) -> Any:
    return dist.group.WORLD if stage.group is None else stage.group


def is_group_of(group: Any, other: Any) -> bool:
    """Whether two groups have the same ranks."""
    return set(dist.get_process_group_ranks(group)) == set(dist.get_process_group_ranks(other))
