"""Pipeline parallel stages (`torch.distributed.pipelining`): each rank has other parameters of one model.

A schedule runs all of a stage's backwards before `accumulate` sees any gradient, and divides `.grad` itself, so
gradients are left alone until then. Stages share the verdict, the loss scale that follows from it, and the norm. A
stage may have replicas (data parallel), or be sharded (FSDP2): ranks of the same stage first end the window among
themselves, as without a pipeline, and then each of them with the ranks of the other stages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter
from ..ops.schema import State
from .agreement import ANY, SAME_CLIPPING_OF_STAGES, SAME_WINDOW, SUM, Agreement, Alike, Never, Table
from .base import GlobalStats, LocalStats, PartialRanks, Ranks
from .ddp import instances
from .group import Group


class Pipeline(PartialRanks):
    """The ranks of one pipeline, which step or skip together and are clipped by one norm.

    Args:
        replicas: The ranks that have this rank's stages: itself alone, data parallel, or a mesh.
        group: The ranks of all stages.
        rounds: Whether this rank may round gradients to 16 bit.
    """

    has_stages = True
    ends_together = True
    _alike = "pipeline", "stages"

    def __init__(self, replicas: Ranks, group: Any, rounds: bool) -> None:
        self._replicas = replicas
        self._group = Group(group)
        self.stage = self._group.rank
        self.rounds = any(self._group.gather(rounds))
        for name in _AMONG_REPLICAS:
            setattr(self, name, getattr(replicas, name))

    def __str__(self) -> str:
        return ", ".join(filter(None, [f"pipeline {self._group}", str(self._replicas)]))

    # ---- the end of a window

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports over replicas, then over stages; collective. See `_host_reads`."""
        own = self._replicas.all_reduce_stats(report)
        host_reads, weight = self._host_reads(report), own.state[State.WEIGHT]
        values = {**report._asdict(), **own._asdict(), "empty": weight == 0, "error": bool(own.error), "weight": weight}
        values |= {"dropped": report.dropped or own.dropped, "loss": report.loss_sums if own.loss is None else own.loss}
        found = Agreement(_TABLE, values, self._group, weight.device, host_reads)

        # Without the host, the device concludes: differing stages overflow, and a window empty for one is empty.
        empty = found["empty"]
        state = found.flagged(torch.where(empty, 0.0, own.state), found.is_wrong(empty))
        squares = None if own.squares is None else found["squares"][0]
        loss = torch.where(empty, 0.0, found["loss"])
        stats = own._replace(state=state, squares=squares, loss=loss, dropped=None, weight=None)

        # The host concludes the rest, where it may look.
        if not host_reads:
            return stats
        dropped = found.sums["dropped"][0] > 0
        error = found.error(dropped)
        weight_of_all = 0.0 if found.sums["empty"][0] else float(weight)
        return stats._replace(dropped=dropped, weight=weight_of_all, error=own.error or error)

    def norm_to_clip(self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device) -> Tensor:
        """See `Ranks`; raises if other stages are at `end_without_clipping`."""
        norm = self._replicas.norm_to_clip(buffers, _positive(norm_type), device)
        power = None if math.isinf(norm_type) else norm.pow(norm_type)
        found = self._combine_orders(norm_type, device, power)
        norm = self._group.sum(norm, largest=True) if power is None else found["power"][0].pow(1 / norm_type)
        return torch.where(found.is_wrong(), torch.nan, norm)

    def end_without_clipping(self, device: torch.device) -> None:
        """See `Ranks`: the next schedule would wait for stages that wait here for the others' norms."""
        self._replicas.end_without_clipping(device)
        self._combine_orders(0.0, device)

    def _combine_orders(self, order: float, device: torch.device, power: Tensor | None = None) -> Agreement:
        """Add up powers of norms, if all stages want a norm of the same order; 0: none. Collective."""
        found = Agreement(_NORM, {"power": power, "order": order}, self._group, device, device.type == "cpu")
        if device.type == "cpu" and (error := found.error()) is not None:
            raise RuntimeError(error)
        return found

    def maximum(self, tensor: Tensor) -> Tensor:
        """See `Ranks`; collective."""
        return self._group.sum(self._replicas.maximum(tensor), largest=True)

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """See `Ranks`; collective."""
        return self._group.sum(self._replicas.sum_over_shards(tensor))

    def total_norm(self, buffers: Sequence[FlatBuffer], norm_type: float, *args: Any, **kwargs: Any) -> Tensor:
        """See `Ranks`; refuses orders of 0 and less, which torch defines by whole tensors."""
        norm = self._replicas.total_norm(buffers, _positive(norm_type), *args, **kwargs)
        power = 1.0 if math.isinf(norm_type) else norm_type
        return self._group.sum(norm**power, largest=math.isinf(norm_type)) ** (1 / power)


# What ranks of the same stage are, and do among themselves.
_AMONG_REPLICAS = ["size", "rank", "averaged_over", "shards", "shard", "reduces_sums", "sender", "check_trainable"]
_AMONG_REPLICAS += ["check_noise_scale", "follow", "reduce", "joined", "portion", "gather_rows"]

_TABLE: Table = {
    "state": SUM,
    "empty": ANY,
    "loss": SUM,
    "squares": SUM,
    "dropped": ANY,
    **SAME_WINDOW,
    "error": Never(
        "ranks that share another stage of this pipeline disagree about this window: their error says in what"
    ),
    **SAME_CLIPPING_OF_STAGES,  # also where nothing is clipped: some ranks would wait for the others' norms
    "micro_batches": Alike(
        "the stages of this pipeline counted different numbers of micro-batches, by stage rank {}: call "
        "acc.accumulate() on every rank after each schedule.step()",
        int,
        if_counted=True,
    ),
    "divisor": Alike("divisor must be the same on all stages; by stage rank it is {} (0.0: none)", if_counted=True),
    "weight": Alike(
        "the weights of this window sum, by stage rank, to {}: give accumulate() the same weight on every stage",
        if_counted=True,
        nearly=True,  # replicas may have added them in another order
    ),
}
_NORM: Table = {
    "power": SUM,
    "order": Alike(
        "clip_grad_norm_() on some stages of this pipeline only; by stage rank the order is {} (0.0: not called). The "
        "norm is that of all stages: call it on every rank with the same norm_type, or pass max_norm to acc.step()"
    ),
}


def _positive(norm_type: float) -> float:
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive over the stages of a pipeline, got {norm_type}")
    return norm_type


def refuse_late_stages(named: Iterable[NamedParameter], ranks: Ranks) -> None:
    """Refuse stages built after their accumulator, which does not know of them.

    Raises:
        RuntimeError: says in which order to build them.
    """
    if not isinstance(ranks, Pipeline) and stages_of(named):
        raise RuntimeError(
            "the accumulator was built before the PipelineStage of its parameters: build the stage first, then the "
            "accumulator with process_group= the group that the stages were built with"
        )


# ---- Pipeline stages: which of them parameters belong to, the group of their ranks, and what does not work with them


def stages_of(named: Iterable[NamedParameter]) -> list[Any]:
    """List the existing pipeline stages that any of these parameters belongs to."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None or not dist.is_initialized():  # stages need both, and torch keeps no list of them
        return []
    ours = {id(entry.param) for entry in named}
    stages = instances(module._PipelineStageBase)
    return [stage for stage in stages if any(id(p) in ours for p in stage.submod.parameters())]


def group_of_stages(stages: Sequence[Any], release: str, process_group: Any) -> Any:
    """Return the group of the ranks that have the stages of this pipeline.

    Args:
        stages: See `stages_of`; at least one.
        release: FusedAccumulator's argument.
        process_group: FusedAccumulator's argument, or DistributedDataParallel's group.

    Raises:
        ValueError: names the argument that does not work with pipeline stages, and what to use instead.
    """
    group, *groups = (dist.group.WORLD if stage.group is None else stage.group for stage in stages)
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
    ours = ranks_of(group)
    if any(ranks_of(other) != ours for other in groups):
        raise ValueError("params: they belong to stages of different pipelines; build an accumulator for each")
    if process_group is False and len(ours) > 1:
        raise ValueError(
            "process_group=False with a PipelineStage: all stages must skip a step together, follow one loss scale and "
            "be clipped by one norm; use process_group= the group that the stages were built with"
        )
    if process_group and ranks_of(process_group) != ours and len(shared := ours & ranks_of(process_group)) > 1:
        raise ValueError(
            f"process_group has ranks {sorted(shared)}, which have different stages of a pipeline: use "
            "process_group= the group that the stages were built with, or that of the ranks that have replicas of "
            "this rank's stages"
        )
    return group


def ranks_of(group: Any) -> set[int]:
    """Return the global ranks of a group."""
    return set(dist.get_process_group_ranks(group))
