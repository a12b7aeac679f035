"""What FSDP2 divides gradients by: the number of ranks, or what `set_gradient_divide_factor` was called with."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

from ..buffers.parameters import NamedParameter

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"  # not imported before fully_shard: it takes a second


class DivideFactor:
    """The factor of the FSDP2 groups that hold some parameters, which may be set at any time.

    Args:
        named: All parameters.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        ours = {id(entry.param): number for number, entry in enumerate(named)}
        kind = getattr(sys.modules.get(_MODULE), "FSDPParamGroup", None)
        numbered: list[tuple[int, Any]] = []
        # A parameter does not know its group, and the user may have passed parameters alone.
        for found in gc.get_objects() if kind is not None else ():
            if type(found) is kind:
                numbers = [ours[id(p)] for p in (held.sharded_param for held in found.fsdp_params) if id(p) in ours]
                if numbers:
                    numbered.append((min(numbers), found))
        # Name of a parameter, FSDP2's group, and how many ranks reduce. In the parameters' order: that of all objects
        # depends on when garbage was collected, and an error would name other parameters on other ranks.
        numbered.sort(key=lambda pair: pair[0])
        self._groups = [(named[number].name, group, _ranks_of(group)) for number, group in numbered]
        self._ranks = max((ranks for _, _, ranks in self._groups), default=1)

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
            over = 1.0 if factor is None or factor == ranks else self._ranks / factor
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
