"""Parameters that are DTensors (FSDP2's `fully_shard`): what ranks must agree on, and sums over the mesh.

Each rank accumulates its local shards; gradients were reduced over ranks inside backward. What is left to exchange is
small: flags, squared norms. A quantity summed over shards must be summed over the mesh dimensions that a parameter is
cut along, and not over those along which it is replicated (HSDP), where it would be counted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffers.devices import move
from ..buffers.dtensors import is_dtensor
from ..buffers.flat import FlatBuffer
from ..buffers.parameters import NamedParameter
from ..ops.schema import State
from .alone import Agreement, Alone, Report


class Mesh(Alone):
    """The meshes under the DTensors of one accumulator, whose gradients FSDP2 reduces inside backward.

    Args:
        named: All parameters; those that are no DTensors are left out.
    """

    sharded = True

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.size = 1
        self._groups: dict[str, dist.ProcessGroup] = {}  # of all mesh dimensions, by name
        self._cuts: dict[int, tuple[str, ...]] = {}  # by id of the parameter: groups that each hold a part of it
        self._compared = False
        for entry in named:
            if is_dtensor(entry.param):
                self._add(entry.name, entry.param)
        self._rows = next(iter(self._cuts.values()))  # the groups that the noise scale's squares are sharded over

    def _add(self, name: str, param: Any) -> None:
        mesh = param.device_mesh
        self.size = max(self.size, mesh.size())
        cut = []
        for dim, placement in enumerate(param.placements):
            if placement.is_partial():
                raise ValueError(f"params: {name!r} is a DTensor with placement {placement}, which no parameter has")
            if mesh.size(dim) > 1:
                group = mesh.get_group(dim)
                self._groups[group.group_name] = group
                if not placement.is_replicate():
                    cut.append(group.group_name)
        self._cuts[id(param)] = tuple(cut)

    def check_trainable(self, named: Sequence[NamedParameter]) -> None:
        """Refuse trainable plain parameters beside DTensors: FSDP2 does not reduce their gradients.

        Raises:
            RuntimeError: names the first plain parameter.
        """
        plain = [entry for entry in named if entry.param.requires_grad and not is_dtensor(entry.param)]
        mixed = len(plain) < sum(entry.param.requires_grad for entry in named)
        if plain and mixed and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{plain[0].name!r} is not a DTensor, though other parameters are. FSDP2 does not reduce the gradients "
                "of its ignored_params: shard it too, freeze it, or give it to an accumulator of its own "
                "(process_group=). If the accumulator was built between a forward and its backward, call "
                "model.reshard() first"
            )

    # ---- agreement

    def maximum(self, tensor: Tensor) -> Tensor:
        """See `Alone`; the host does not wait."""
        for group in self._groups.values():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        return tensor

    def agree(self, report: Report) -> Agreement:
        """Combine what all ranks report; collective: where one skips, all do.

        All must have weighted and divided by the same. The first window that is not skipped is read back to say so if
        they have not; in later ones that counts as overflow.
        """
        state = torch.zeros_like(report.state) if report.dropped else report.state.clone()
        weight = state[State.WEIGHT]
        divisor = weight
        if report.divisor is not None:  # one that cannot divide skips the step on all ranks
            bad = ~((report.divisor > 0) & torch.isfinite(report.divisor))
            divisor = torch.where(bad, 1.0, report.divisor)
            state[State.FOUND_INF] += bad
            state[State.POISONED] += bad
        largest = self.maximum(
            torch.stack([state[State.FOUND_INF], state[State.POISONED], weight, -weight, divisor, -divisor])
        )
        found_inf, poisoned, most, minus_least, largest_divisor, minus_smallest = largest
        # A rank that dropped its window, or gave it no weight, empties that of all.
        emptied = (minus_least == 0) & (most > 0)
        sound = ~emptied & (poisoned == 0)
        unequal = ((most != -minus_least) | (largest_divisor != -minus_smallest)) & sound
        state[State.FOUND_INF] = found_inf.maximum(unequal.double())
        state[State.POISONED] = poisoned.maximum(unequal.double())
        return Agreement(
            torch.where(emptied, 0.0, state), report.divisor, report.squares, None, None, None, self._compare(largest)
        )

    def _compare(self, largest: Tensor) -> str | None:
        """Read the first window that can tell, and say what differs between ranks."""
        if self._compared:
            return None
        _, poisoned, most, minus_least, largest_divisor, minus_smallest = largest.tolist()
        if poisoned or minus_least == 0:
            return None
        for what, high, low in (
            ("weights sum to", most, -minus_least),
            ("divisors are", largest_divisor, -minus_smallest),
        ):
            if high != low:
                return (
                    f"the window's {what} {low} on one rank and {high} on another: FSDP2 averages over ranks "
                    "inside backward, so they must be equal. For unequal micro-batches use sum-reduced losses "
                    "without weights, and one divisor for all ranks (docs/fsdp2.md)"
                )
        self._compared = True
        return None

    # ---- sums over shards

    def total_norm(self, buffers: Sequence[FlatBuffer], norm_type: float, device: torch.device) -> Tensor:
        """The norm over all touched segments of all ranks, 0-d fp64 on `device`; as `clipping.total_norm` elsewhere."""
        parts: dict[tuple[str, ...], list[tuple[FlatBuffer, list[Tensor]]]] = {}
        for buffer in buffers:
            by_cut: dict[tuple[str, ...], list[Tensor]] = {}
            for segment in buffer.touched_segments():
                by_cut.setdefault(self._cuts.get(id(segment.param), ()), []).append(buffer.views[segment.index])
            for cut, views in by_cut.items():
                parts.setdefault(cut, []).append((buffer, views))
        # In the order of all cuts: each is a collective, also on a rank that has nothing to add.
        norms = [
            self._norm(cut, parts.get(cut, []), norm_type, device) for cut in sorted(set(self._cuts.values()) | {()})
        ]
        joined = torch.cat(norms)
        if norm_type == 2.0:
            return joined.sum().sqrt()
        if math.isinf(norm_type) and norm_type > 0:
            return joined.amax()
        return torch.linalg.vector_norm(joined, norm_type)

    def _norm(
        self,
        cut: tuple[str, ...],
        parts: Sequence[tuple[FlatBuffer, list[Tensor]]],
        norm_type: float,
        device: torch.device,
    ) -> Tensor:
        """Fp64: the sum of squares or the maximum, of one element; for other orders one norm per tensor."""
        if norm_type in (2.0, math.inf):
            total = torch.zeros(1, dtype=torch.float64, device=device)
            for buffer, views in parts:
                part = torch.zeros(1, dtype=torch.float64, device=buffer.device)
                buffer.ops.norm_(part, views, ord=norm_type)
                total = torch.maximum(total, move(part, device)) if norm_type != 2.0 else total + move(part, device)
            return self._reduce(total, cut, dist.ReduceOp.SUM if norm_type == 2.0 else dist.ReduceOp.MAX)
        views = [move(view, device, torch.float64) for _, views in parts for view in views]
        if norm_type == -math.inf:
            return self._reduce(
                _stack([v.abs().amin() if v.numel() else v.new_tensor(math.inf) for v in views], device),
                cut,
                dist.ReduceOp.MIN,
            )
        if norm_type == 0:
            return self._reduce(_stack([v.count_nonzero().double() for v in views], device), cut, dist.ReduceOp.SUM)
        sums = self._reduce(_stack([v.abs().pow(norm_type).sum() for v in views], device), cut, dist.ReduceOp.SUM)
        return sums.pow(1 / norm_type)

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold different parts, where all parameters are cut alike; in place."""
        return self._reduce(tensor, self._rows, dist.ReduceOp.SUM)

    def _reduce(self, tensor: Tensor, cut: tuple[str, ...], op: Any) -> Tensor:
        for name in cut:
            dist.all_reduce(tensor, op, self._groups[name])
        return tensor

    def check_noise_scale(self) -> None:
        """Refuse to measure where parameters are cut in different ways.

        Raises:
            ValueError: they are.
        """
        if len(set(self._cuts.values())) > 1:
            raise ValueError(
                "noise_scale needs parameters that are all cut along the same mesh dimensions; these are not (tensor "
                "parallel beside fully_shard)"
            )

    # ---- checkpoints

    def gather_rows(self, row: Tensor) -> Tensor:
        """The rows of all ranks that hold different parts; row `self.shard` is this rank's."""
        rows = row.unsqueeze(0)
        for name in reversed(self._rows):
            group = self._groups[name]
            gathered = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(gathered, rows, group)
            rows = torch.cat(gathered)
        return rows

    @property
    def shards(self) -> int:
        """See `Alone`."""
        return math.prod(self._groups[name].size() for name in self._rows)

    @property
    def shard(self) -> int:
        """See `Alone`."""
        index = 0
        for name in self._rows:
            index = index * self._groups[name].size() + self._groups[name].rank()
        return index


def _stack(scalars: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=torch.float64, device=device)


def mesh_of(
    params: Any, named: Sequence[NamedParameter], process_group: Any, autocast_route: Any, noise_scale: Any
) -> Mesh | None:
    """The meshes under the parameters; None where none is a DTensor.

    Args:
        params: What the parameters were found in.
        named: The parameters.
        process_group: As FusedAccumulator's, or that of DistributedDataParallel.
        autocast_route: As FusedAccumulator's.
        noise_scale: As FusedAccumulator's.

    Raises:
        ValueError: an argument that is not for DTensors.
        RuntimeError: `params` is between a forward of FSDP2 and its backward.
    """
    first = next((entry for entry in named if is_dtensor(entry.param)), None)
    if first is None:
        modules = params.modules() if isinstance(params, nn.Module) else ()
        # By name: importing FSDP takes a second.
        if any(kind.__name__ == "FSDPModule" for module in modules for kind in type(module).__mro__):
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
    if autocast_route is True:
        raise ValueError(
            f"autocast_route=True is not for DTensors, as {first.name!r}: FSDP2 casts parameters itself "
            "(MixedPrecisionPolicy); use 'auto' or False"
        )
    mesh = Mesh(named)
    if noise_scale is not False:
        mesh.check_noise_scale()
    return mesh
