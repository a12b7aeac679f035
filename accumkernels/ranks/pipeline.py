"""Pipeline parallel stages (`torch.distributed.pipelining`): each rank has other parameters of one model.

A schedule runs all of a stage's backwards before `accumulate` sees any gradient, and divides `.grad` itself, so
gradients are left alone until then. Stages share the verdict, the loss scale that follows from it, and the norm. A
stage may have replicas (data parallel), or be sharded (FSDP2): ranks of the same stage first end the window among
themselves, as without a pipeline, and then each of them with the ranks of the other stages.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter
from ..ops.schema import State
from .base import GlobalStats, LocalStats, Ranks
from .packing import Packer, different_limits, different_windows
from .sender import Sender


class _AfterSchedules(Sender):
    """Sends nothing before the window ends, since a schedule's backwards are over by then.

    Args:
        replicas: The sender of the ranks that have the same stages.
    """

    def __init__(self, replicas: Sender) -> None:
        self._replicas = replicas

    def open_window(self) -> None:
        """See `Sender`."""
        self._replicas.open_window()

    def end_last(self) -> None:
        """See `Sender`."""
        self._replicas.end_last()


class Pipeline(Ranks):
    """The ranks of one pipeline, which step or skip together and are clipped by one norm.

    Args:
        replicas: The ranks that have this rank's stages: itself alone, data parallel, or a mesh.
        group: The ranks of all stages.
    """

    ends_together = True
    judged_together = True

    def __init__(self, replicas: Ranks, group: Any) -> None:
        self._replicas = replicas
        self._group = group
        self._compared: int | None = None  # the number of norms for which the host has compared all stages' reports
        self.size, self.rank = replicas.size, replicas.rank
        self.shards, self.shard = replicas.shards, replicas.shard
        self.reduces_sums, self.sharded = replicas.reduces_sums, replicas.sharded
        self.stage = group.rank()
        self.sender = _AfterSchedules(replicas.sender)

    def __str__(self) -> str:
        replicas = str(self._replicas)
        return f"pipeline rank {self.stage} of {self._group.size()}" + (f", {replicas}" if replicas else "")

    def check_alike(self, **options: object) -> None:
        """Check that accumulators of all stages judge windows alike; collective.

        Raises:
            RuntimeError: on all ranks, with the first difference.
        """
        everyones: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyones, options, group=self._group)
        for stage, theirs in enumerate(everyones):
            for key, value in everyones[0].items():
                if theirs[key] != value:
                    raise RuntimeError(
                        f"pipeline: rank 0 has {key}={value!r}, rank {stage} has {theirs[key]!r}; "
                        "all stages must be alike"
                    )

    # ---- the end of a window

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports over replicas, then over stages; collective.

        The host reads the result on the CPU; elsewhere only in the first window, in those with a divisor, and if the
        clipping changes.
        """
        agreement = self._replicas.all_reduce_stats(report)
        device = report.state.device

        # One row for each stage.
        packer = Packer(self.stage, self._group.size(), device)
        packer.add_by_rank(
            state=agreement.state,
            loss=report.loss_sums if agreement.loss is None else agreement.loss,
            squares=agreement.squares,
            divisor=agreement.divisor,
            limit=report.limit,
            window=report.window,
            norms=report.norms,
            micro_batches=report.micro_batches,
            dropped=report.dropped or bool(agreement.dropped),
            error=agreement.error is not None,
        )
        packed = packer.reduce(functools.partial(dist.all_reduce, group=self._group))

        # Without the host, the device concludes: differing stages overflow, and a window empty for one is empty.
        states = packed["state"]
        weights = states[:, State.WEIGHT]
        empty = (weights == 0).any()
        differs = ~_alike(weights) | packed.differ("divisor", "micro_batches")
        differs = differs & ~empty | packed.differ("limit", "window", "norms") | (packed["error"] > 0).any()
        state = torch.where(empty, 0.0, agreement.state)
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag] = ((states[:, flag] > 0).any() | differs).double()
        agreement = agreement._replace(
            state=state,
            squares=None if agreement.squares is None else packed["squares"].sum(),
            loss=torch.where(empty, 0.0, packed["loss"].sum(0)),
        )

        # The host concludes the rest, where it may look.
        if device.type != "cpu" and self._compared == report.norms and report.divisor is None:
            return agreement._replace(dropped=None, weight=None)
        self._compared = report.norms
        found = packed.on_host()
        weight_by_stage = found["state"]  # its first column: State.WEIGHT
        return agreement._replace(
            dropped=any(found["dropped"]),
            weight=0.0 if 0 in weight_by_stage else weight_by_stage[self.stage],
            error=agreement.error or _disagreement(found),
        )

    def maximum(self, tensor: Tensor) -> Tensor:
        """See `Ranks`; collective."""
        tensor = self._replicas.maximum(tensor)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """See `Ranks`; collective."""
        tensor = self._replicas.sum_over_shards(tensor)
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def total_norm(
        self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
    ) -> Tensor:
        """See `Ranks`; refuses orders of 0 and less, which torch defines by whole tensors."""
        if norm_type <= 0:
            raise ValueError(f"norm_type must be positive over the stages of a pipeline, got {norm_type}")
        norm = self._replicas.total_norm(buffers, norm_type, device, only)
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
            return norm
        power = norm.pow(norm_type)
        dist.all_reduce(power, group=self._group)
        return power.pow(1 / norm_type)

    # ---- work among ranks of the same stage

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """See `Ranks`."""
        self._replicas.check_trainable(named)

    def check_noise_scale(self) -> None:
        """See `Ranks`."""
        self._replicas.check_noise_scale()

    def follow(self, buffers: Sequence[FlatBuffer]) -> None:
        """See `Ranks`."""
        self._replicas.follow(buffers)

    def share_from(self, shared: Callable[[], list[Tensor]]) -> None:
        """See `Ranks`."""
        self._replicas.share_from(shared)

    def reduce(self, look: Callable[[FlatBuffer, list[Tensor]], None]) -> None:
        """See `Ranks`; over replicas."""
        self._replicas.reduce(look)

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """See `Ranks`; over replicas."""
        return self._replicas.joined(tensor, largest=largest)

    def gather_rows(self, row: Tensor) -> Tensor:
        """See `Ranks`; over replicas."""
        return self._replicas.gather_rows(row)


def _alike(weights: Tensor) -> Tensor:
    """Whether weights are equal up to the order in which replicas added them; 0-d bool."""
    return ((weights - weights[0]).abs() <= 1e-12 * weights[0].abs()).all()


def _disagreement(found: dict[str, list[float]]) -> str | None:
    """Describe what stages disagree about."""
    if differ := different_windows(found["window"]):
        return differ
    if any(found["error"]):
        return "ranks that share another stage of this pipeline disagree about this window: their error says in what"
    if differ := different_limits(
        found["norms"], found["limit"], "stage rank"
    ):  # even if nothing is clipped, since some ranks would wait for the others' norms
        return differ
    if any(found["dropped"]):
        return None
    done, divisors, weights = found["micro_batches"], found["divisor"], found["state"]
    if len(set(done)) > 1:
        return (
            f"the stages of this pipeline counted different numbers of micro-batches, by stage rank "
            f"{[int(n) for n in done]}: call acc.accumulate() on every rank after each schedule.step()"
        )
    if len(set(divisors)) > 1:
        return f"divisor must be the same on all stages; by stage rank it is {divisors} (0.0: none)"
    if not _alike(torch.tensor(weights, dtype=torch.float64, device="cpu")):
        return (
            f"the weights of this window sum, by stage rank, to {weights}: give accumulate() the same weight "
            "on every stage"
        )
    return None


# ---- which parameters belong to stages


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


def group_of_stages(stages: Sequence[Any], release: str, autocast_route: Any, process_group: Any) -> Any:
    """Return the group of the ranks that have the stages of this pipeline.

    Args:
        stages: See `stages_of`; at least one.
        release: FusedAccumulator's argument.
        autocast_route: FusedAccumulator's argument.
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
    if autocast_route is True:
        raise ValueError(
            "autocast_route=True is not for a PipelineStage, whose schedule divides .grad after all backwards; use "
            "'auto' or False"
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
