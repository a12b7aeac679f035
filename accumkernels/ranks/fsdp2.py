"""Parameters that are DTensors (FSDP2's `fully_shard`): statistics that ranks combine, and sums over the mesh.

Each rank accumulates its local shards; backward has already reduced gradients over ranks. The rest is small: weights,
flags, squared norms. All of it goes over one group, the ranks of all meshes together, so that there is one order of
collectives. Sums over shards are divided by the number of ranks that hold the same shard: along mesh dimensions over
which a parameter is replicated (HSDP), and where a smaller mesh has copies on other ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter, devices_of, is_dtensor, local, move
from ..errors import logger
from ..ops.schema import State
from .agreement import ANY, DIFFERS, SAME_CLIPPING, SAME_WINDOW, SUM, Agreement, Alike, Table
from .base import GlobalStats, LocalStats, PartialRanks, next_key
from .ddp import instances
from .group import Group, own_group

_log = logger(__name__)


class Sharded(PartialRanks):
    """The meshes under the DTensors of one accumulator, whose gradients FSDP2 reduces inside backward.

    Args:
        named: All parameters.
        sharded_by_fsdp: Whether FSDP2 reduces gradients; it leaves out plain parameters.
    """

    def __init__(self, named: Sequence[NamedParameter], sharded_by_fsdp: bool) -> None:
        self._sharded_by_fsdp = sharded_by_fsdp
        self._factor = DivideFactor(named)
        self.averaged_over = self._factor.ranks  # those of tensor parallel have the same samples
        self._cuts: dict[int, tuple[dist.ProcessGroup, ...]] = {}  # by id: groups whose ranks each hold another part
        meshes = {id(entry.param): _mesh(entry) for entry in named}
        everyone = _everyone(named, meshes)
        self._meshes = {key: ranks for key, ranks in meshes.items() if set(everyone).issuperset(ranks)}
        self._outside = [entry for entry in named if id(entry.param) not in self._meshes]  # frozen ones
        named = self._named = [entry for entry in named if id(entry.param) in self._meshes]
        self.size, self.rank = len(everyone), everyone.index(dist.get_rank())
        self._group = Group(_group_of(everyone, [entry.param for entry in named]))
        for entry in named:
            param: Any = entry.param
            if is_dtensor(param):
                self._cuts[id(param)] = tuple(map(param.device_mesh.get_group, _cut_dims(param)))
        self._rows = next(iter(self._cuts.values()), ())  # the groups that the noise scale's squares are sharded over
        self.shards = math.prod(group.size() for group in self._rows)
        for group in self._rows:
            self.shard = self.shard * group.size() + group.rank()
        asks = torch.full((1,), bool(self._list_small()), dtype=torch.int64, device=devices_of(named)[0])
        self._asks = self.maximum(asks).item() > 0
        self.weight_key = next_key(self.size)

    def _list_small(self) -> list[NamedParameter]:
        """List the parameters that may have copies on other ranks, as their mesh is part of a larger one."""
        inside = {ranks for entry in self._named if is_dtensor(entry.param) for ranks in _parts_of_mesh(entry.param)}
        small = {ranks for ranks in self._meshes.values() if len(ranks) < self.size and ranks in inside}
        return [entry for entry in self._named if self._meshes[id(entry.param)] in small]

    @functools.cached_property
    def _replicas(self) -> dict[int, int]:
        """By id of a parameter, how many ranks hold the same part of it as this one; collective when first read.

        A parameter on a mesh of fewer ranks (for a plain one, this rank alone) may have copies on the others, like the
        norms of a tensor parallel model, or be one of many experts. Copies have equal values, and their mesh is part of
        a larger one, whose other dimensions shard other parameters. The first norm asks, not the constructor: loops
        load a checkpoint in between. Later they stay what they were then, as copies may drift apart by rounding.
        """
        copies = dict.fromkeys(self._meshes, 1)
        if self._asks:
            # What is trained is told by all that its module trains: experts may begin with the same biases.
            modules: dict[tuple[str, tuple[int, ...]], list[NamedParameter]] = {}
            for entry in self._list_small():
                if entry.obstacle() is None:  # else it is frozen for ever
                    module = entry.name.rpartition(".")[0] if entry.param.requires_grad else entry.name
                    modules.setdefault((module, self._meshes[id(entry.param)]), []).append(entry)
            contents = {key: _content(entries, key[1]) for key, entries in modules.items()}
            everyones = Counter(itertools.chain.from_iterable(self._group.gather(list(contents.values()))))
            copies |= {id(e.param): everyones[contents[key]] for key, entries in modules.items() for e in entries}
        return {
            key: len(ranks) // math.prod(group.size() for group in self._cuts.get(key, ())) * copies[key]
            for key, ranks in self._meshes.items()
        }

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """Refuse trainable plain parameters that FSDP2 was told to ignore, since nobody reduces their gradients.

        Raises:
            RuntimeError: names the first plain parameter, or one that was unfrozen and has other ranks than all others.
        """
        if late := [entry.name for entry in self._outside if entry.param.requires_grad]:
            raise RuntimeError(
                f"{late[0]!r} was frozen when the accumulator was built, and its mesh has ranks that are on no mesh of "
                "what was trainable: freeze it again, or shard all that is trained over one mesh, or over parts of it"
            )
        plain = [entry for entry in named if entry.param.requires_grad and not is_dtensor(entry.param)]
        if plain and self._sharded_by_fsdp and dist.get_world_size() > 1:
            raise _plain_beside_sharded(plain[0].name)

    # ---- the end of a window

    def maximum(self, tensor: Tensor) -> Tensor:
        """See `Ranks`; the host does not wait."""
        return self._group.sum(tensor, largest=True)

    def all_reduce_stats(self, report: LocalStats) -> GlobalStats:
        """Combine all ranks' reports; collective: if one skips, all do.

        FSDP2 has divided gradients by the number of ranks, so the divisor is the mean of the ranks' sums of weights; or
        by another factor, which changes the divisor as it changes gradients.

        The host reads the result as `_host_reads` says, and in windows with weights that came after backward.
        """
        # A divisor replaces the sum of weights, and the user knows what it divides.
        over_mean = 1.0 if report.divisor is not None else self._factor.over_mean()
        if over_mean != 1 and report.squares is not None:
            raise RuntimeError(
                "noise_scale needs gradients that are means over ranks; set_gradient_divide_factor makes them "
                f"{over_mean} times as large: remove that call, and pass losses that are means with their weights"
            )

        # Sum one vector of weights, flags, and what must be alike.
        host_reads = self._host_reads(report) or report.weighed_after
        state = torch.zeros_like(report.state) if report.dropped else report.state.clone()
        values = report._asdict() | {"state": state, "loss": report.loss_sums, "weight": state[State.WEIGHT].clone()}
        values["order"] = report.weights if report.weighed_after else 0.0
        table = _TABLE if report.squares is None else {**_TABLE, "weights": DIFFERS}
        found = Agreement(table, values, self._group, state.device, host_reads)

        # The device concludes this without the host.
        dropped = found["dropped"]
        state[State.WEIGHT] = found["state"][State.WEIGHT] / self.size * over_mean
        wrong = found.is_wrong(dropped | (found["state"][State.POISONED] > 0))
        stats = GlobalStats(
            state=torch.where(dropped, 0.0, found.flagged(state, wrong)),
            divisor=report.divisor,
            squares=None if report.squares is None else torch.where(found["weights"], torch.nan, report.squares[0]),
            loss=torch.where(dropped, 0.0, found["loss"]),
            idle=report.idle,  # no rank sends sums to another
        )

        # The host concludes the rest, where it may look.
        if not host_reads:
            return stats
        any_dropped, summed = found.sums["dropped"][0] > 0, found.sums["state"]
        if stats.squares is not None and found["weights"]:
            _warn_of_weights()
        return stats._replace(
            dropped=any_dropped,
            weight=summed[State.WEIGHT] / self.size * over_mean,
            error=found.error(any_dropped or summed[State.POISONED] > 0),
        )

    # ---- sums over shards

    def total_norm(
        self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device, only: Set[int] | None = None
    ) -> Tensor:
        """Norm over all touched segments of all ranks, or `only` those with these `id`s; 0-d fp64 on `device`."""
        copies = self._replicas  # also where no segment is touched: the first time it is collective
        parts = [
            (buffer, segment, copies[id(segment.param)])
            for buffer in buffers
            for segment in buffer.touched_segments()
            if only is None or id(segment.param) in only
        ]
        if norm_type in (2.0, math.inf):
            total = torch.zeros(1, dtype=torch.float64, device=device)
            for buffer in buffers:
                for replicas in sorted({r for b, _, r in parts if b is buffer}):
                    views = [buffer.views[s.index] for b, s, r in parts if b is buffer and r == replicas]
                    part = torch.zeros(1, dtype=torch.float64, device=buffer.device)
                    buffer.ops.norm_(part, views, ord=norm_type)
                    part = move(part, device)
                    total = total + part / replicas if norm_type == 2.0 else torch.maximum(total, part)
            return self._group.sum(total)[0].sqrt() if norm_type == 2.0 else self.maximum(total)[0]

        # For other orders, torch takes the norm of the norms of whole tensors.
        views = [move(buffer.views[s.index], device, torch.float64) for buffer, s, _ in parts]
        if norm_type == -math.inf:
            least = [view.abs().amin() if view.numel() else view.new_tensor(math.inf) for view in views]
            norms = -self.maximum(-_stack(least, device))
        else:
            count = norm_type == 0
            sums = [v.count_nonzero().double() if count else v.abs().pow(norm_type).sum() for v in views]
            norms = _stack([part / r for part, (_, _, r) in zip(sums, parts, strict=True)], device)
            norms = self._group.sum(norms) if count else self._group.sum(norms).pow(1 / norm_type)
        return torch.linalg.vector_norm(norms, norm_type)

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that hold different parts, if all parameters are sharded alike; in place."""
        for group in self._rows:
            dist.all_reduce(tensor, group=group)
        return tensor

    def check_noise_scale(self) -> None:
        """Refuse to measure if parameters are sharded in different ways.

        Raises:
            ValueError: they are; names the first two.
        """
        first, *others = self._named
        cut = self._cuts.get(id(first.param))
        if other := next((entry for entry in others if self._cuts.get(id(entry.param)) != cut), None):
            raise ValueError(
                f"noise_scale needs parameters that are all cut along the same mesh dimensions; {first.name!r} and "
                f"{other.name!r} are not, as in tensor parallel models"
            )

    # ---- checkpoints

    def joined(self, tensor: Tensor, *, largest: bool = False) -> Tensor:
        """See `Ranks`; collective."""
        return self.maximum(tensor) if largest else self._group.sum(tensor).div_(self.size)

    def portion(self, averaged_over: float) -> float:
        """See `Ranks`: here they are means over all ranks, on each of them."""
        return averaged_over / self.averaged_over

    def gather_rows(self, row: Tensor) -> Tensor:
        """See `Ranks`; collective."""
        rows = row.unsqueeze(0)
        for group in reversed(self._rows):
            gathered = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(gathered, rows, group)
            rows = torch.cat(gathered)
        return rows


def _mesh(entry: NamedParameter) -> tuple[int, ...]:
    """Return the ranks of a parameter's mesh; for a plain parameter, this one alone."""
    param: Any = entry.param
    if not is_dtensor(param):
        return (dist.get_rank(),)
    for placement in param.placements:
        if placement.is_partial():
            raise ValueError(f"params: {entry.name!r} is a DTensor with placement {placement}, which no parameter has")
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))


def _everyone(named: Sequence[NamedParameter], meshes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks of the mesh that has those of all others; frozen parameters count if theirs fit in.

    Raises:
        ValueError: names parameters on overlapping meshes, of which ranks would find different groups.
    """
    trainable = [entry for entry in named if entry.param.requires_grad]
    for entries in (named, trainable or named):
        largest = max(entries, key=lambda entry: len(meshes[id(entry.param)]))
        ranks = meshes[id(largest.param)]
        others = [entry.name for entry in entries if not set(ranks).issuperset(meshes[id(entry.param)])]
        if not others:
            return ranks
    raise ValueError(
        f"params: {largest.name!r} and {others[0]!r} are on meshes that overlap, and none has the ranks of all that is "
        "trained: shard them over one mesh, or over parts of it, as fully_shard does with tensor parallel modules "
        "inside; freeze one; or give it to an accumulator of its own"
    )


def _parts_of_mesh(param: Any) -> Iterator[tuple[int, ...]]:
    """For each set of mesh dims with one that shards a DTensor, yield the ranks with this one's place along them."""
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
    cut = _cut_dims(param)
    for count in range(1, mesh.ndim + 1):
        for fixed in itertools.combinations(range(mesh.ndim), count):
            if any(dim in cut for dim in fixed):
                index = tuple(coordinate[dim] if dim in fixed else slice(None) for dim in range(mesh.ndim))
                yield tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _cut_dims(param: Any) -> list[int]:
    """List the mesh dimensions that shard a DTensor, so that each rank holds another part."""
    size = param.device_mesh.size
    return [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate() and size(dim) > 1]


def _group_of(ranks: Sequence[int], params: Sequence[Any]) -> Any:
    """Return a group of exactly these ranks: a mesh dimension's, the whole world's, or a new one."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for param in params:
        for group in param.device_mesh.get_all_groups() if is_dtensor(param) else ():
            if group.size() == len(ranks):
                return group
    return own_group(ranks)


def _content(entries: Sequence[NamedParameter], ranks: tuple[int, ...]) -> bytes:
    """Describe this rank's part of parameters that share a mesh, by a digest that is equal if all values are."""
    description = [str(ranks.index(dist.get_rank()))]
    for entry in entries:
        part = local(entry.param).detach()
        norm = torch.linalg.vector_norm(part, dtype=torch.float64).item()
        description.append(f"{entry.name!r} {tuple(part.shape)} {part.sum(dtype=torch.float64).item()} {norm}")
    return hashlib.blake2b("\n".join(description).encode(), digest_size=8).digest()


_TABLE: Table = {
    "state": SUM,
    "loss": SUM,
    "dropped": ANY,
    "weighed_after": ANY,
    **SAME_WINDOW,
    **SAME_CLIPPING,
    "divisor": Alike(
        "the divisors of this window are, by rank, {} (0.0: none), and must be equal: the sum of weights of all ranks, "
        "divided by their number, as FSDP2 has averaged over ranks (docs/fsdp2.md)",
        if_counted=True,
    ),
    "weight": Alike(
        "the weights of this window sum, by rank, to {}, and were given to accumulate(): that is after FSDP2 has "
        "averaged over ranks. Call acc.backward(loss, weight), which weighs losses (docs/fsdp2.md), where no .grad is "
        "left from before (AK32)",
        if_counted=True,
        if_any="weighed_after",
    ),
    "order": Alike(
        "micro-batches of this window have other weights on other ranks, though their sums are equal, and weights were "
        "given to accumulate(): that is after FSDP2 has averaged over ranks. Call acc.backward(loss, weight), which "
        "weighs losses (docs/fsdp2.md)",
        if_counted=True,
        if_any="weighed_after",
    ),
}


@functools.cache
def _warn_of_weights() -> None:
    """Warn, once, that the noise scale is not measured."""
    _log.warning(
        "noise_scale: the micro-batches of this window have other weights on other ranks. FSDP2 has averaged their "
        "gradients, of which the noise scale would need the sum of their weights: such windows do not count"
    )


def _stack(scalars: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=torch.float64, device=device)


def _has_fsdp(params: Any) -> bool:
    """Whether `fully_shard` was applied to a module; assumed if the user passed only its parameters."""
    if not isinstance(params, nn.Module):
        return True
    # Compare names, because importing FSDP takes a second.
    return any(kind.__name__ == "FSDPModule" for module in params.modules() for kind in type(module).__mro__)


def _plain_beside_sharded(name: str) -> RuntimeError:
    """What a plain parameter is refused with that FSDP2 was told to ignore, or that came after `fully_shard`."""
    return RuntimeError(
        f"{name!r} is not a DTensor, though other parameters are. FSDP2 does not reduce the gradients of its "
        "ignored_params, nor of parameters that were added after fully_shard, as adapters: shard it too, freeze it, "
        "or give it to an accumulator of its own (process_group=). If the accumulator was built between a forward and "
        "its backward, call model.reshard() first"
    )


def mesh_of(params: Any, named: Sequence[NamedParameter], process_group: Any, noise_scale: Any) -> Sharded | None:
    """Find the meshes of the parameters; None if none is a DTensor.

    Args:
        params: The object that the parameters were found in.
        named: The parameters.
        process_group: FusedAccumulator's argument, or DistributedDataParallel's group.
        noise_scale: FusedAccumulator's argument.

    Raises:
        ValueError: an argument does not work with DTensors.
        RuntimeError: `params` is between a forward of FSDP2 and its backward.
    """
    first = next((entry for entry in named if is_dtensor(entry.param)), None)
    if first is None:
        if isinstance(params, nn.Module) and _has_fsdp(params):
            if any(map(is_dtensor, params.parameters())):  # frozen, and left out by a trainer, as a base under adapters
                raise _plain_beside_sharded(named[0].name)
            raise RuntimeError(
                f"params: {named[0].name!r} is not sharded, though fully_shard was applied: build the accumulator "
                "before the first forward, or call model.reshard() before"
            )
        return None
    if process_group is not None:
        raise ValueError(
            f"process_group must be None, as {first.name!r} is a DTensor: its mesh says which ranks there are, and "
            "FSDP2 reduces over them inside backward"
        )
    mesh = Sharded(named, _has_fsdp(params))
    if noise_scale is not False:
        mesh.check_noise_scale()
    return mesh


# ---- What FSDP2 divides gradients by: the number of ranks, or what `set_gradient_divide_factor` was called with

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"  # not imported before fully_shard: it takes a second


class DivideFactor:
    """The factor of the FSDP2 groups that hold some parameters, which may be set at any time.

    Args:
        named: All parameters.

    Attributes:
        ranks: How many reduce gradients, each with samples of its own: those of the largest group, 1 without any.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        ours = {id(entry.param): number for number, entry in enumerate(named)}
        kind = getattr(sys.modules.get(_MODULE), "FSDPParamGroup", None)
        numbered: list[tuple[int, Any]] = []
        # A parameter does not know its group, and the user may have passed parameters alone.
        for found in instances(kind) if kind is not None else ():
            numbers = [ours[id(p)] for p in (held.sharded_param for held in found.fsdp_params) if id(p) in ours]
            if numbers:
                numbered.append((min(numbers), found))
        # Name of a parameter, FSDP2's group, and how many ranks reduce. In the parameters' order: that of all objects
        # depends on when garbage was collected, and an error would name other parameters on other ranks.
        numbered.sort(key=lambda pair: pair[0])
        self._groups = [(named[number].name, group, _ranks_of(group)) for number, group in numbered]
        self.ranks = max((ranks for _, _, ranks in self._groups), default=1)

    def over_mean(self) -> float:
        """How many times larger gradients are than the mean over ranks.

        A group on a smaller mesh, such as experts', gets samples of all ranks, so its factor is held against the
        largest number of ranks. The number of its own ranks is FSDP2's default.

        Raises:
            RuntimeError: groups have different factors, which no single weight makes right.
        """
        first: tuple[str, float] | None = None
        for name, group, ranks in self._groups:
            factor = group.gradient_divide_factor
            over = 1.0 if factor is None or factor == ranks else self.ranks / factor
            if first is None:
                first = name, over
            elif first[1] != over:
                raise RuntimeError(
                    f"set_gradient_divide_factor differs between modules: FSDP2 sums the gradient of {first[0]!r} to "
                    f"{first[1]} times the mean over ranks, and that of {name!r} to {over} times. Call "
                    "set_gradient_divide_factor with one factor on every module that fully_shard was applied to, or "
                    "on none (docs/fsdp2.md)"
                )
        return 1.0 if first is None else first[1]


def _ranks_of(group: Any) -> int:
    """Return the number of ranks over which an FSDP2 group reduces its gradients."""
    mesh: Any = group.mesh_info
    return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))
