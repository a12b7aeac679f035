"""fp32 masters of 16-bit parameters, which optimizers step and the model's values are rounded from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ..hooks import Follower, follow, unfollow
from .dtensors import local, shaped_like
from .flat import FlatBuffer
from .layout import Segment, aligned
from .pages import zeros
from .parameters import NamedParameter

_param = attrgetter("param")
_version = attrgetter("_version")
_address = attrgetter("_cdata")  # of a storage
_PLAIN = frozenset((Tensor, nn.Parameter))


class _Pair(NamedTuple):
    """A master that has memory, and the parameter that it is rounded into."""

    master: nn.Parameter
    param: Tensor
    segment: Segment
    ops: ModuleType


class Masters(Follower):
    """The masters of one store, as views of flat fp32 buffers, one for each flat buffer of gradients.

    After a step of any optimizer that owns masters, their values are rounded into the model's parameters. What somebody
    else writes to these is taken over into the masters before the next step, which would overwrite it otherwise.

    In-place edits show in version counters, and `p.data = x` in the parameter's memory. An in-place edit of an alias
    that has a counter of its own (`p.data.clamp_()`, numpy) shows in neither. Finding these means to read all values
    before each step, which takes as long as the step itself: `refresh` has to be called after them.

    Args:
        named: All parameters. Each 16-bit parameter gets a master. The master of a frozen parameter has its shape but
            no memory, until the parameter is unfrozen.
    """

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.flat: list[Tensor] = []
        self._masters: dict[int, nn.Parameter] = {}  # by id of the parameter
        self._pairs: dict[int, _Pair] = {}  # by id of the master, once it has memory
        self._stamps: dict[int, tuple[Any, ...]] = {}  # of the parameters when they last had their masters' values
        self._storages: dict[int, StorageWeakRef] = {}  # of the parameters: keep the address of a freed one from reuse
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
                pair = self._pairs[id(master)] = _Pair(master, segment.param, segment, buffer.ops)
                self._copy([pair])
                offset += size

    def refresh(self) -> None:
        """Copy the model's values into the masters."""
        self._copy(list(self._pairs.values()))

    @torch.no_grad()
    def _copy(self, pairs: Sequence[_Pair]) -> None:
        for pair in pairs:
            local(pair.master).copy_(local(pair.param))
            self._watch(pair)
        self._stamp(pairs)

    def take_over(self) -> None:
        """Copy into the masters what somebody has written to the model's parameters, element by element.

        Elements that the edit has left as they were keep their master, which is more precise. Nothing is read from the
        device, and no value of a parameter that nobody has edited is read at all.
        """
        stamps = dict(zip(self._pairs, _stamps(list(map(_param, self._pairs.values()))), strict=True))
        if stamps == self._stamps:
            return
        with torch.no_grad():
            for key, pair in self._pairs.items():
                # A changed dtype or shape is refused with the parameter's name when a window begins or ends.
                if stamps[key] != self._stamps[key] and pair.segment.drift() is None:
                    param, master = local(pair.param), local(pair.master)
                    edited = param != master.to(param.dtype)
                    torch.where(edited, param, master, out=master)
                    self._watch(pair)
        self._stamps = stamps

    def _watch(self, pair: _Pair) -> None:
        """Let no other storage get the address of the parameter's, as long as this is compared."""
        part = local(pair.param)
        if type(part) in _PLAIN:
            self._storages[id(pair.master)] = StorageWeakRef(part.untyped_storage())

    def _stamp(self, pairs: Sequence[_Pair]) -> None:
        """Note that parameters have their masters' values."""
        stamps = _stamps(list(map(_param, pairs)))
        self._stamps.update(zip([id(pair.master) for pair in pairs], stamps, strict=True))

    def round(self, masters: Iterable[Tensor] | None = None) -> None:
        """Round masters (None: all) into the model's parameters: one pass per device."""
        if masters is None:
            pairs = list(self._pairs.values())
        else:
            pairs = [self._pairs[id(m)] for m in masters if id(m) in self._pairs]
        parts: dict[torch.device, tuple[ModuleType, list[Tensor], list[Tensor]]] = {}
        for pair in pairs:
            master, param = local(pair.master), local(pair.param)
            _, outputs, inputs = parts.setdefault(param.device, (pair.ops, [], []))
            if param.stride() == master.stride():
                outputs.append(param.detach())
                inputs.append(master.detach())
            else:  # not dense, and the op works in memory order
                param.detach().copy_(master.detach())
        for ops, outputs, inputs in parts.values():
            ops.scaled_copy_(outputs, inputs)
        # Our ops do not bump version counters by themselves, and a backward through old values must fail.
        torch.autograd.graph.increment_version([pair.param for pair in pairs])
        self._stamp(pairs)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take over edits if the optimizer steps masters."""
        if any(id(p) in self._pairs for group in optimizer.param_groups for p in group["params"]):
            self.take_over()

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Round the masters that the optimizer stepped."""
        self.round(p for group in optimizer.param_groups for p in group["params"])

    def values(self) -> dict[int, Tensor]:
        """The masters that have memory, by id of their parameters."""
        return {id(pair.param): pair.master for pair in self._pairs.values()}

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
        """Take over the last edits, and stop following optimizers."""
        self.take_over()
        unfollow(self)


def _stamps(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """For each parameter, what an edit changes: its version, and the memory that it has."""
    if not _PLAIN.issuperset(map(type, params)):
        # An op on a DTensor bumps its version, an op on its local part that part's. Other subclasses may lack memory.
        parts = list(map(local, params))
        of_parts: Iterable[Any] = _stamps(parts) if _PLAIN.issuperset(map(type, parts)) else map(_version, parts)
        return list(zip(map(_version, params), of_parts, strict=True))
    storages = map(_address, map(Tensor.untyped_storage, params))
    return list(zip(map(_version, params), map(Tensor.data_ptr, params), storages, strict=True))
