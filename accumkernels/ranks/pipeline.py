"""Pipeline parallel stages (`torch.distributed.pipelining`): each rank has other parameters of one model.

A schedule runs all of a stage's backwards before `accumulate` sees any gradient, and divides `.grad` itself, so
gradients are left alone until then. Stages share the verdict, the loss scale that follows from it, and the norm. A
stage may have replicas (data parallel), or be sharded (FSDP2): ranks of the same stage first end the window among
themselves, as without a pipeline, and then each of them with the ranks of the other stages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter
from ..ops.schema import State
from .base import GlobalStats, LocalStats, Ranks
from .packing import Packed, Packer, different_limits, different_windows, listed
from .sender import Sender
from .stages import stages_of


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
        looks = device.type == "cpu" or self._compared != report.norms or report.divisor is not None
        weight = agreement.state[State.WEIGHT]
        cell, shifted_cell = _cells(weight)
        packer = Packer(self.stage, self._group.size(), device, looks)
        packer.add(
            state=agreement.state,
            empty=(weight == 0).double(),
            loss=report.loss_sums if agreement.loss is None else agreement.loss,
            squares=agreement.squares,
            dropped=report.dropped or bool(agreement.dropped),
            error=agreement.error is not None,
        )
        packer.add_alike(
            window=report.window,
            resumed=report.resumed,
            norms=report.norms,
            limit=report.limit,
            micro_batches=report.micro_batches,
            divisor=agreement.divisor,
            cell=cell,
            shifted_cell=shifted_cell,
        )
        packed = packer.reduce(functools.partial(dist.all_reduce, group=self._group))

        # Without the host, the device concludes: differing stages overflow, and a window empty for one is empty.
        empty = packed["empty"][0] > 0
        differs = packed.differ("divisor", "micro_batches") | (packed.differ("cell") & packed.differ("shifted_cell"))
        always = packed.differ(*_ALWAYS_ALIKE) | (packed["error"][0] > 0)
        differs = differs & ~empty | always
        state = torch.where(empty, 0.0, agreement.state)
        for flag in (State.FOUND_INF, State.POISONED):
            state[flag] = ((packed["state"][flag] > 0) | differs).double()
        agreement = agreement._replace(
            state=state,
            squares=None if agreement.squares is None else packed["squares"][0],
            loss=torch.where(empty, 0.0, packed["loss"]),
        )

        # The host concludes the rest, where it may look.
        if not looks:
            return agreement._replace(dropped=None, weight=None)
        self._compared = report.norms
        sums, differ = packed.on_host()
        error = _disagreement(packed, sums, differ, weight)
        return agreement._replace(
            dropped=sums["dropped"][0] > 0,
            weight=0.0 if sums["empty"][0] else float(weight),
            error=agreement.error or error,
        )

    def norm_to_clip(self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device) -> Tensor:
        """See `Ranks`; raises if other stages are at `end_without_clipping`."""
        _check_order(norm_type)
        norm = self._replicas.norm_to_clip(buffers, norm_type, device)
        largest = math.isinf(norm_type)
        packed = self._sum_of_order(norm_type, None if largest else norm.pow(norm_type), device)
        if largest:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = packed["power"][0].pow(1 / norm_type)
        return torch.where(packed.differ(), torch.nan, norm)

    def end_without_clipping(self, device: torch.device) -> None:
        """See `Ranks`: the next schedule would wait for stages that wait here for the others' norms."""
        self._replicas.end_without_clipping(device)
        self._sum_of_order(0.0, None, device)

    def _sum_of_order(self, order: float, power: Tensor | None, device: torch.device) -> Packed:
        """Add up powers of norms, if all stages want a norm of the same order; 0: none. Collective."""
        looks = device.type == "cpu"
        packer = Packer(self.stage, self._group.size(), device, looks)
        packer.add(power=power)
        packer.add_alike(order=order)
        packed = packer.reduce(functools.partial(dist.all_reduce, group=self._group))
        if looks and (error := packed.explain(packed.on_host().differs, _different_orders)) is not None:
            raise RuntimeError(error)
        return packed

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
        _check_order(norm_type)
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


_ALWAYS_ALIKE = ("window", "resumed", "norms", "limit")


def _different_orders(found: dict[str, list[float]]) -> str:
    return (
        f"clip_grad_norm_() on some stages of this pipeline only; by stage rank the order is {listed(found['order'])} "
        "(0.0: not called). The norm is that of all stages: call it on every rank with the same norm_type, or pass "
        "max_norm to acc.step()"
    )


def _check_order(norm_type: float) -> None:
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive over the stages of a pipeline, got {norm_type}")


def _cells(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a weight lies in two grids of 2**40 cells per power of two, shifted by half a cell.

    Weights that differ by the order in which replicas added them share a cell of at least one grid.
    """
    bits = weight.view(torch.int64)
    return (bits >> 12).double(), ((bits + 2**11) >> 12).double()


def _disagreement(packed: Packed, sums: dict[str, list[float]], differs: list[str], weight: Tensor) -> str | None:
    """Describe what stages disagree about, by what the host has read; collective if there is anything."""
    if "cell" not in differs or "shifted_cell" not in differs:  # equal up to the order in which replicas added them
        differs = [name for name in differs if name not in ("cell", "shifted_cell")]
    if sums["dropped"][0]:
        differs = [name for name in differs if name in _ALWAYS_ALIKE]
    if sums["error"][0] and not {"window", "resumed"}.intersection(differs):
        return "ranks that share another stage of this pipeline disagree about this window: their error says in what"
    return packed.explain(differs, _describe, weight=weight)


def _describe(found: dict[str, list[float]]) -> str:
    """Describe what stages disagree about; weights, if it is nothing else."""
    # Norms even if nothing is clipped, since some ranks would wait for the others'.
    if differ := different_windows(found) or different_limits(found["norms"], found["limit"], "stage rank"):
        return differ
    done, divisors = found["micro_batches"], found["divisor"]
    if len(set(done)) > 1:
        return (
            f"the stages of this pipeline counted different numbers of micro-batches, by stage rank "
            f"{listed([int(n) for n in done])}: call acc.accumulate() on every rank after each schedule.step()"
        )
    if len(set(divisors)) > 1:
        return f"divisor must be the same on all stages; by stage rank it is {listed(divisors)} (0.0: none)"
    return (
        f"the weights of this window sum, by stage rank, to {listed(found['weight'])}: give accumulate() the same "
        "weight on every stage"
    )


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
