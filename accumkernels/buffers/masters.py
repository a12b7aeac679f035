"""fp32 masters of 16-bit parameters, which optimizers step and the model's values are rounded from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from ..errors import logger
from ..hooks import Follower, Hook, follow, unfollow
from .flat import FlatBuffer, Segment, aligned, buffer_dtype, zeros
from .parameters import FLOAT_DTYPES, NamedParameter, local, shaped_like

_log = logger(__name__)
_param = attrgetter("param")
_master = attrgetter("master")
_version = attrgetter("_version")
_address = attrgetter("_cdata")  # of a storage
_PLAIN = frozenset((Tensor, nn.Parameter))


class Slots(Protocol):
    """Host memory that gradients and weights pass through, one slot per parameter; see `offload.host`."""

    def grow(self, params: Sequence[Tensor]) -> None:
        """Allocate the slots of parameters that have none."""

    def send(self, params: Sequence[Tensor], masters: Sequence[Tensor], ops: ModuleType) -> None:
        """Round masters in host memory into parameters on devices, and wait for nothing but earlier copies."""


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
        slots: If masters are in host memory; then every parameter on another device gets one, too.

    Raises:
        ValueError: Two trainable parameters begin at the same memory; names them.
    """

    def __init__(self, named: Sequence[NamedParameter], slots: Slots | None) -> None:
        self._slots = slots
        self._masters: dict[int, nn.Parameter] = {}  # by id of the parameter
        self._pairs: dict[int, _Pair] = {}  # by id of the master, once it has memory
        self._waiting: set[int] = set()  # ids of frozen parameters whose masters were loaded
        # Versions and memory of the parameters, by id of the master, when they last had their masters' values.
        self._versions: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        self._rounded: dict[int, Any] = {}  # versions of the masters then
        self._window_steps = False
        self._stepping: set[int] = set()  # ids of optimizers whose steps have begun and not ended
        self._warned = False  # of masters that were written to without a step
        self._hooked: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # with hooks' handles
        self._storages: dict[int, StorageWeakRef] = {}  # of the parameters: keep the address of a freed one from reuse
        at: dict[Any, str] = {}  # names by memory
        for entry in named:
            p = entry.param
            offloaded = slots is not None and p.device.type != "cpu" and p.dtype in FLOAT_DTYPES
            if offloaded or p.dtype in (torch.float16, torch.bfloat16):
                if p.requires_grad and local(p).numel():
                    memory = local(p).untyped_storage()._cdata, local(p).storage_offset()
                    if at.setdefault(memory, entry.name) != entry.name:
                        raise ValueError(
                            f"params: {entry.name!r} and {at[memory]!r} are two parameters in the same memory, and "
                            "each would get a master: rounding one would undo the other's step. Make them one "
                            "parameter (module.weight = other.weight)"
                        )
                device, dtype = p.device if slots is None else "cpu", buffer_dtype(p.dtype)
                placeholder = torch.zeros((), dtype=dtype, device=device).expand(local(p).shape)
                self._masters[id(p)] = nn.Parameter(shaped_like(placeholder, p), requires_grad=p.requires_grad)
        follow(self)

    def target(self, param: Tensor) -> Tensor:
        """The tensor that an optimizer steps for a parameter: its master, or the parameter itself."""
        return self._masters.get(id(param), param)

    def grow(self, buffers: Sequence[FlatBuffer]) -> None:
        """Allocate the masters of parameters that got a segment, and copy the parameters' values into them.

        One that was unfrozen before has its master, which is more exact than the parameter, and so may a loaded one be.
        """
        for buffer in buffers:
            with_master = [s for s in buffer.segments if id(s.param) in self._masters]
            segments = [s for s in with_master if id(self._masters[id(s.param)]) not in self._pairs]
            sizes = [aligned(s.numel, buffer.dtype) for s in segments]
            flat = zeros(sum(sizes), buffer.dtype, buffer.device)
            offset = 0
            for segment, size in zip(segments, sizes, strict=True):
                master = self._masters[id(segment.param)]
                loaded = local(master).detach()
                local(master).data = flat.as_strided(segment.shape, segment.stride, offset)
                master.requires_grad_(True)
                pair = self._pairs[id(master)] = _Pair(master, segment.param, segment, buffer.ops)
                self._copy([pair])
                if id(segment.param) in self._waiting:
                    self._waiting.remove(id(segment.param))
                    _take_edited(segment.param, loaded, out=local(master).detach())
                    self._stamp([pair])
                offset += size

    def refresh(self) -> None:
        """Copy the model's values into the masters."""
        self._copy(list(self._pairs.values()))
        self._waiting.clear()

    def load(self, param: Tensor, saved: Tensor | None) -> None:
        """Copy a saved master, also of a parameter that is frozen, for when it is unfrozen; None: there is none.

        A parameter that has no master because it is fp32 here gets the value itself.
        """
        master = self._masters.get(id(param))
        if saved is None:
            return
        if master is None:
            if param.dtype in FLOAT_DTYPES:
                local(param).detach().copy_(local(saved))
        elif id(master) in self._pairs:
            local(master).copy_(local(saved))
        else:
            local(master).data = torch.empty_like(local(master), memory_format=torch.contiguous_format).copy_(
                local(saved)
            )
            self._waiting.add(id(param))

    @torch.no_grad()
    def _copy(self, pairs: Sequence[_Pair]) -> None:
        for pair in pairs:
            # Cast where the master is: a cast on the parameter's device would take memory there.
            local(pair.master).copy_(local(pair.param).to(local(pair.master).device))
        self._watch(pairs)

    def _edited(self) -> list[_Pair]:
        """Pairs whose parameter may have been written to since it had its master's value, and by somebody else."""
        params = list(map(_param, self._pairs.values()))
        versions = dict(zip(self._pairs, _versions(params), strict=True))
        memory = dict(zip(self._pairs, _memory(params), strict=True))
        if versions == self._versions and memory == self._memory:
            return []
        kept, at = self._versions, self._memory
        return [pair for key, pair in self._pairs.items() if versions[key] != kept[key] or memory[key] != at[key]]

    def take_over(self) -> None:
        """Copy into the masters what somebody has written to the model's parameters, element by element.

        Elements that the edit has left as they were keep their master, which is more precise. Nothing is read from the
        device, and no value of a parameter that nobody has edited is read at all.

        Raises:
            RuntimeError: A master was written to as well, so that it no longer tells which elements the edit has left.
        """
        edited = self._edited()
        for pair in self._written(edited):
            if pair.segment.drift() is None and not _is_rounded(pair):
                raise RuntimeError(
                    f"{pair.segment.name!r} and its fp32 master were both edited since the last step, and one of the "
                    "edits would be lost: acc.refresh_masters() keeps the weight's. Edit weights alone, or call "
                    "acc.load_state_dict(acc.state_dict()) after an edit of masters, which rounds them into the model"
                )
        self._take_over(edited)

    def _take_over(self, edited: Sequence[_Pair]) -> None:
        for pair in edited:
            # A changed dtype or shape is refused with the parameter's name when a window begins or ends.
            if pair.segment.drift() is None:
                master = local(pair.master).detach()
                _take_edited(pair.param, master, out=master)
        self._watch(edited)

    def _written(self, pairs: Sequence[_Pair]) -> list[_Pair]:
        """Those of the pairs whose masters were written to since they were rounded."""
        versions = _versions(list(map(_master, pairs)))
        return [p for p, version in zip(pairs, versions, strict=True) if version != self._rounded[id(p.master)]]

    def warn_of_edits(self) -> None:
        """Warn once if a master was written to without a step, so that the model, which has run, has another value."""
        if self._warned:
            return
        for pair in self._written(list(self._pairs.values())):
            if pair.segment.drift() is None and not _is_rounded(pair):
                self._warned = True
                _log.warning(
                    "the fp32 master of %r was edited without a step, and this window's forward used the old value, "
                    "which the model keeps until the next step: edit the model's weights, or call "
                    "acc.load_state_dict(acc.state_dict()) after the edit, which rounds masters into the model",
                    pair.segment.name,
                )
                return

    def _watch(self, pairs: Sequence[_Pair]) -> None:
        """Note that parameters have their masters' values, and where."""
        keys, params = [id(pair.master) for pair in pairs], list(map(_param, pairs))
        self._memory.update(zip(keys, _memory(params), strict=True))
        # No other storage is to get a parameter's address, as long as this is compared.
        parts = [(key, part) for key, part in zip(keys, map(local, params), strict=True) if type(part) in _PLAIN]
        self._storages.update((key, StorageWeakRef(part.untyped_storage())) for key, part in parts)
        self._stamp(pairs)

    def _stamp(self, pairs: Sequence[_Pair]) -> None:
        """Note that parameters have their masters' values."""
        keys = [id(pair.master) for pair in pairs]
        self._versions.update(zip(keys, _versions(list(map(_param, pairs))), strict=True))
        self._rounded.update(zip(keys, _versions(list(map(_master, pairs))), strict=True))

    def round(self) -> None:
        """Round all masters into the model's parameters."""
        self._round(list(self._pairs.values()))

    def _round(self, pairs: Sequence[_Pair]) -> None:
        """Round masters into the model's parameters: one pass per device."""
        others = list(self._pairs.values()) if len(pairs) < len(self._pairs) else []
        versions = _versions(list(map(_param, others)))
        kept = [p for p, version in zip(others, versions, strict=True) if version == self._versions[id(p.master)]]
        parts: dict[torch.device, tuple[ModuleType, list[Tensor], list[Tensor]]] = {}
        away = [pair for pair in pairs if local(pair.master).device != local(pair.param).device]
        if away and self._slots is not None:
            self._slots.send([pair.param for pair in away], [pair.master.detach() for pair in away], away[0].ops)
        for pair in pairs:
            master, param = local(pair.master), local(pair.param)
            if master.device != param.device:
                continue
            _, outputs, inputs = parts.setdefault(param.device, (pair.ops, [], []))
            if param.stride() == master.stride():
                outputs.append(param.detach())
                inputs.append(master.detach())
            else:  # not dense, and the op works in memory order
                param.detach().copy_(master.detach())
        for of_device, outputs, inputs in parts.values():
            of_device.scaled_copy_(outputs, inputs)
        # Our ops do not bump version counters by themselves, and a backward through old values must fail.
        torch.autograd.graph.increment_version(list(map(_param, pairs)))
        # Slices of one tensor share its counter: those whose masters were not rounded now were not edited by this.
        versions = _versions(list(map(_param, kept)))
        self._versions.update(zip([id(p.master) for p in kept], versions, strict=True))
        self._stamp(pairs)

    def round_late(self, unseen: bool) -> None:
        """Round the masters that were written to since they were rounded, where no hook has seen the end of a step.

        An update by hand has no hooks, nor have wrappers of optimizers that do not call `Optimizer.__init__`, as most
        Lookaheads; a closure runs before its step ends; and a step that raises has no end.

        Args:
            unseen: Whether any may have been, by way of `.data` too, which no version counter shows.

        Raises:
            RuntimeError: A parameter was written to as well, and has neither its master's value nor that from before.
        """
        versions = dict(zip(self._pairs, _versions(list(map(_master, self._pairs.values()))), strict=True))
        unseen |= bool(self._stepping)
        if not unseen and versions == self._rounded:
            return
        edited = {id(pair.master) for pair in self._edited()}
        written = {key for key, version in versions.items() if version != self._rounded[key]}
        self._round([pair for key, pair in self._pairs.items() if (unseen or key in written) and key not in edited])
        self._stepping.clear()
        for pair in (self._pairs[key] for key in self._pairs if key in written & edited):
            if not _is_rounded(pair):  # the loop has rounded others itself
                self._round([pair])
                raise RuntimeError(
                    f"{pair.segment.name!r} was edited before its master, which was updated too, was rounded into it, "
                    "and the edit is lost: edit weights after acc.zero_()"
                )

    def begin_steps(self) -> None:
        """A window, which has taken over edits, steps its optimizers: none of these steps has to look for them."""
        self._window_steps = True

    def end_steps(self) -> None:
        """Look for edits before each step again."""
        self._window_steps = False

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take over edits if the optimizer steps masters, and see to it that its hooks find the model rounded."""
        self._stepping.add(id(optimizer))
        hooks = optimizer._optimizer_step_post_hooks
        if self._window_steps and not hooks:
            return
        if any(id(p) in self._pairs for group in optimizer.param_groups for p in group["params"]):
            if not self._window_steps:
                self.take_over()
            if hooks and optimizer not in self._hooked:  # torch calls those of all optimizers after its own
                self._hooked[optimizer] = handle = optimizer.register_step_post_hook(Hook(self, Masters._round_stepped))
                hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Round the masters that the optimizer stepped; once more if its own hooks ran, which may have written to them.

        Raises:
            RuntimeError: Something has written to a parameter that then had the value from before the step.
        """
        if optimizer in self._hooked:
            self.round_late(unseen=True)
        else:
            self._round_stepped(optimizer)
        self._stepping.discard(id(optimizer))

    def _round_stepped(self, optimizer: Optimizer, *args: Any) -> None:
        keys = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in self._pairs]
        pairs = [self._pairs[key] for key in keys]
        versions = _versions(list(map(_param, pairs)))
        edited = [p for key, p, v in zip(keys, pairs, versions, strict=True) if v != self._versions[key]]
        self._round(pairs)
        if edited:
            raise RuntimeError(
                f"{edited[0].segment.name!r} was edited while {type(optimizer).__name__}.step() ran, before its master "
                "was rounded into it, and the edit is lost: edit weights after the step, not in a closure or pre-hook"
                " (AK16)"
            )

    def values(self) -> dict[int, Tensor]:
        """The masters that have values, and more bits than their parameters, by id of these.

        With edits of the parameters, or loading would round the masters over them. The masters themselves get these
        later: a loop that saves averaged weights puts the others back.
        """
        pairs = self._pairs.values()
        found = {id(pair.param): pair.master.detach() for pair in pairs if pair.master.dtype != pair.segment.dtype}
        for pair in self._edited():
            if id(pair.param) in found and pair.segment.drift() is None:
                found[id(pair.param)] = master = pair.master.detach().clone()
                _take_edited(pair.param, local(master), out=local(master))
        return found | {key: self._masters[key].detach() for key in self._waiting}

    def remove(self) -> None:
        """Take over the last edits, and stop following optimizers."""
        self._take_over(self._edited())
        unfollow(self)
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def _is_rounded(pair: _Pair) -> bool:
    """Whether the parameter has its master's value; reads it from the device."""
    param = local(pair.param).detach()
    rounded = local(pair.master).detach().to(param.device, param.dtype)
    return torch.allclose(rounded, param, rtol=0, atol=0, equal_nan=True)


def _take_edited(param: Tensor, master: Tensor, out: Tensor) -> None:
    """Write a master's values, but the parameter's where it is not the master's, rounded."""
    param = local(param).detach().to(master.device)
    torch.where(param != master.to(param.dtype), param, master, out=out)


def _versions(params: Sequence[Tensor]) -> list[Any]:
    """Version counters, which in-place ops bump: on a DTensor its own, on its local part that part's.

    A parameter's is alike whatever parameters it is listed with; so is its `_memory`.
    """
    versions = list(map(_version, params))
    if _PLAIN.issuperset(map(type, params)):
        return versions
    return [v if type(p) in _PLAIN else (v, local(p)._version) for p, v in zip(params, versions, strict=True)]


def _memory(params: Sequence[Tensor]) -> list[Any]:
    """Addresses and storages, which `p.data = x` changes; None for subclasses that may lack both."""
    if not _PLAIN.issuperset(map(type, params)):
        return [_memory([p])[0] if type(p) in _PLAIN else None for p in map(local, params)]
    return list(zip(map(Tensor.data_ptr, params), map(_address, map(Tensor.untyped_storage, params)), strict=True))
