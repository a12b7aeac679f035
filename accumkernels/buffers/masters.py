"""fp32 masters of 16-bit parameters, which optimizers step and the model's values are rounded from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..hooks import Follower, follow, unfollow
from .dtensors import local, shaped_like
from .flat import FlatBuffer
from .layout import aligned
from .pages import zeros
from .parameters import NamedParameter


class Masters(Follower):
    """The masters of one store, as views of flat fp32 buffers, one for each flat buffer of gradients.

    After a step of any optimizer that owns masters, their values are rounded into the model's parameters.

    Args:
        named: All parameters. Each 16-bit parameter gets a master. The master of a frozen parameter has its shape but
            no memory, until the parameter is unfrozen.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.flat: list[Tensor] = []
        self._masters: dict[int, nn.Parameter] = {}  # by id of the parameter
        self._pairs: dict[int, tuple[nn.Parameter, Tensor, ModuleType]] = {}  # by id of the master, once it has memory
        for entry in named:
            p = entry.param
            if p.dtype in (torch.float16, torch.bfloat16):
                placeholder = torch.zeros((), dtype=torch.float32, device=p.device).expand(local(p).shape)
                self._masters[id(p)] = nn.Parameter(shaped_like(placeholder, p), requires_grad=p.requires_grad)
        follow(self)

    def target(self, param: Tensor) -> Tensor:
        """The tensor that an optimizer steps for a parameter: its master, or the parameter itself."""
        return self._masters.get(id(param), param)

    def grow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Allocate the masters of parameters that got a segment, and copy the parameters' values into them."""
        for buffer in buffers:
            segments = [s for s in buffer.segments if id(s.param) in self._masters]
            sizes = [aligned(s.numel, torch.float32) for s in segments]
            flat = zeros(sum(sizes), torch.float32, buffer.device)
            self.flat.append(flat)
            offset = 0
            for segment, size in zip(segments, sizes, strict=True):
                master = self._masters[id(segment.param)]
                local(master).data = flat.as_strided(segment.shape, segment.stride, offset)
                master.requires_grad_(True)
                self._pairs[id(master)] = (master, segment.param, buffer.ops)
                with torch.no_grad():
                    local(master).copy_(local(segment.param))
                offset += size

    def refresh(self) -> None:
        """Copy the model's values into the masters."""
        with torch.no_grad():
            for master, param, _ in self._pairs.values():
                local(master).copy_(local(param))

    def round(self, masters: Iterable[Tensor] | None = None) -> None:
        """Round masters (None: all) into the model's parameters: one pass per device."""
        if masters is None:
            pairs = list(self._pairs.values())
        else:
            pairs = [self._pairs[id(m)] for m in masters if id(m) in self._pairs]
        parts: dict[torch.device, tuple[ModuleType, list[Tensor], list[Tensor]]] = {}
        for sharded_master, sharded_param, ops in pairs:
            master, param = local(sharded_master), local(sharded_param)
            _, outputs, inputs = parts.setdefault(param.device, (ops, [], []))
            if param.stride() == master.stride():
                outputs.append(param.detach())
                inputs.append(master.detach())
            else:  # not dense, and the op works in memory order
                param.detach().copy_(master.detach())
        for ops, outputs, inputs in parts.values():
            ops.scaled_copy_(outputs, inputs)
        # Our ops do not bump version counters by themselves, and a backward through old values must fail.
        torch.autograd.graph.increment_version([param for _, param, _ in pairs])

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Round the masters that the optimizer stepped."""
        self.round(p for group in optimizer.param_groups for p in group["params"])

    def values(self) -> dict[int, Tensor]:
        """The masters that have memory, by id of their parameters."""
        return {id(param): master for master, param, _ in self._pairs.values()}

    def param_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Param groups with every parameter replaced by the tensor that an optimizer steps for it."""
        translated = []
        for group in groups:
            params = group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            targets = [(p[0], self.target(p[1])) if isinstance(p, tuple) else self.target(p) for p in params]
            translated.append({**group, "params": targets})
        return translated

    def remove(self) -> None:
        """Stop following optimizers."""
        unfollow(self)
