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
        # Versions and memory of the parameters, by id of the master, when they last had their masters' values.
        self._versions: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        self._window_steps = False
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
        """Allocate the masters of parameters that got a segment, and copy the parameters' values into them.

        One that was unfrozen before has its master, which is more exact than the parameter.
        """
        for buffer in buffers:
            with_master = [s for s in buffer.segments if id(s.param) in self._masters]
            segments = [s for s in with_master if id(self._masters[id(s.param)]) not in self._pairs]
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

    def _edited(self) -> list[_Pair]:
        """Pairs whose parameter may have been written to since the last call, and by somebody else."""
        params = list(map(_param, self._pairs.values()))
        versions = dict(zip(self._pairs, _versions(params), strict=True))
        memory = dict(zip(self._pairs, _memory(params), strict=True))
        if versions == self._versions and memory == self._memory:
            return []
        old_versions, self._versions = self._versions, versions
        old_memory, self._memory = self._memory, memory
        edited = []
        for key, pair in self._pairs.items():
            if versions[key] != old_versions[key] or memory[key] != old_memory[key]:
                edited.append(pair)
                self._watch(pair)
        return edited

    def take_over(self) -> None:
        """Copy into the masters what somebody has written to the model's parameters, element by element.

        Elements that the edit has left as they were keep their master, which is more precise. Nothing is read from the
        device, and no value of a parameter that nobody has edited is read at all.
        """
        for pair in self._edited():
            # A changed dtype or shape is refused with the parameter's name when a window begins or ends.
            if pair.segment.drift() is None:
                param, master = local(pair.param).detach(), local(pair.master).detach()
                torch.where(param != master.to(param.dtype), param, master, out=master)

    def _watch(self, pair: _Pair) -> None:
        """Let no other storage get the address of the parameter's, as long as this is compared."""
        part = local(pair.param)
        if type(part) in _PLAIN:
            self._storages[id(pair.master)] = StorageWeakRef(part.untyped_storage())

    def _stamp(self, pairs: Sequence[_Pair]) -> None:
        """Note that parameters have their masters' values."""
        keys, params = [id(pair.master) for pair in pairs], list(map(_param, pairs))
        self._versions.update(zip(keys, _versions(params), strict=True))
        self._memory.update(zip(keys, _memory(params), strict=True))

    def round(self) -> None:
        """Round all masters into the model's parameters."""
        self._round(list(self._pairs.values()))

    def _round(self, pairs: Sequence[_Pair]) -> None:
        """Round masters into the model's parameters: one pass per device."""
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
        params = list(map(_param, pairs))
        torch.autograd.graph.increment_version(params)
        self._versions.update(zip([id(pair.master) for pair in pairs], _versions(params), strict=True))

    def begin_steps(self) -> None:
        """Take over edits before a window steps its optimizers, so that none of these steps has to look for them."""
        self.take_over()
        self._window_steps = True

    def end_steps(self) -> None:
        """Look for edits before each step again."""
        self._window_steps = False

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take over edits if the optimizer steps masters."""
        if self._window_steps:
            return
        if any(id(p) in self._pairs for group in optimizer.param_groups for p in group["params"]):
            self.take_over()

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Round the masters that the optimizer stepped.

        Raises:
            RuntimeError: A hook on the step has written to a parameter, which then had the value from before the step.
        """
        keys = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in self._pairs]
        pairs = [self._pairs[key] for key in keys]
        versions = _versions(list(map(_param, pairs)))
        edited = [p for key, p, v in zip(keys, pairs, versions, strict=True) if v != self._versions[key]]
        self._round(pairs)
        if edited:
            raise RuntimeError(
                f"{edited[0].segment.name!r} was edited while {type(optimizer).__name__}.step() ran, before its master "
                "was rounded into it, and the edit is lost: edit weights after the step, not in its hooks or closure"
            )

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


def _versions(params: Sequence[Tensor]) -> list[Any]:
    """Version counters, which in-place ops bump: on a DTensor its own, on its local part that part's."""
    versions = list(map(_version, params))
    if _PLAIN.issuperset(map(type, params)):
        return versions
    return list(zip(versions, map(_version, map(local, params)), strict=True))


def _memory(params: Sequence[Tensor]) -> list[Any]:
    """Addresses and storages, which `p.data = x` changes; None for all if there are subclasses that may lack both."""
    if not _PLAIN.issuperset(map(type, params)):
        params = list(map(local, params))
        if not _PLAIN.issuperset(map(type, params)):
            return [None] * len(params)
    return list(zip(map(Tensor.data_ptr, params), map(_address, map(Tensor.untyped_storage, params)), strict=True))
