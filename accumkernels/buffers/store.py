"""The parameters of an accumulator and everything on devices that belongs to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import ops
from ..errors import logger
from ..hooks import Follower, Hook, follow, unfollow
from ..ops.schema import State
from .flat import FlatBuffer, Segment, aligned, buffer_dtype, flat_buffers, zeros
from .parameters import FLOAT_DTYPES, NamedParameter, devices_of, is_dtensor, local, shaped_like, worst

_log = logger(__name__)
_touched = attrgetter("touched")
_unchecked = attrgetter("unchecked")
# Parameters carry no reference to their store: torch swaps no tensor that has a weak one (torch.utils.swap_tensors).
_stores: weakref.WeakSet[Store] = weakref.WeakSet()  # those with a claim


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


class Slots(Protocol):
    """Host memory that gradients and weights pass through, one slot per parameter; see `offload.slots`."""

    def grow(self, params: Sequence[Tensor]) -> None:
        """Allocate the slots of parameters that have none."""

    def send(self, params: Sequence[Tensor], masters: Sequence[Tensor], ops: ModuleType) -> None:
        """Round masters in host memory into parameters on devices, and wait for nothing but earlier copies."""


def has_accumulator(param: Tensor) -> bool:
    """Whether a live accumulator has the parameter."""
    return any(store.claims(param) for store in _stores)


class _AsBuilt:
    """Identity, dtype, device, shape and strides of parameters that are no DTensors, at construction.

    A look at all of them takes a few passes, a tenth of the time of one after another.
    It only says whether anything changed: `NamedParameter.check_identity` and `Segment.drift` say what.
    """

    def __init__(self, named: Sequence[NamedParameter], segments: Sequence[Segment]) -> None:
        places = [(owner, key, entry.param) for entry in named for owner, key in entry.owners]
        self._owners = [owner for owner, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._owned = [param for _, _, param in places]
        self._params = [s.param for s in segments]
        # Not of subclasses, which need not have an address.
        plain = all(type(p) in (Tensor, Parameter) for p in self._params)
        self._addresses = list(map(Tensor.data_ptr, self._params)) if plain else None
        self._kinds = [(s.dtype, s.device, s.shape, s.param_stride) for s in segments]

    def holds(self) -> bool:
        """Whether nothing changed."""
        params = self._params
        if not all(map(is_, map(dict.get, self._owners, self._keys), self._owned)):
            return False
        addresses = None if self._addresses is None else list(map(Tensor.data_ptr, params))
        if addresses is not None and addresses == self._addresses:
            return True  # what changes a parameter gives it other memory: one pass instead of one over four facts
        same = [(p.dtype, p.device, p.shape, p.stride()) for p in params] == self._kinds
        if same:
            self._addresses = addresses
        return same


class Layout(NamedTuple):
    """What follows from the buffers of a store: what is planned for one layout may not fit the next.

    Attributes:
        places: Where gradients are summed, by id of the parameter and of its master.
        device: The first that has sums, where weights are counted and results are returned.
        devices: Those that forward and backward run on. The first has losses, and weights until they are added.
        queues: The devices of parameters whose work is queued on streams.
        rounds: Whether any `.grad` has a narrower dtype than its sum.
        result_dtype: The dtype of norms: fp32, or fp64 if any parameter is fp64.
        as_built: What parameters were; None if one is a DTensor.
    """

    places: dict[int, tuple[FlatBuffer, Segment]]
    device: torch.device
    devices: list[torch.device]
    queues: tuple[torch.device, ...]
    rounds: bool
    result_dtype: torch.dtype
    as_built: _AsBuilt | None


class Store:
    """Flat buffers and device states: of parameters that are trainable, and of frozen ones that gave nothing back yet.

    Attributes:
        named: All parameters, in the order given, frozen ones too.
        buffers: The flat buffers; always the same list.
        layout: What follows from them.
        masters: fp32 masters of 16-bit parameters (with slots, of all on devices), or None.
        slots: Where gradients and weights pass through host memory, if that has the sums; None: sums are on the devices
            of their parameters.
        states: For each device, the fp64 state tensor that the kernels update (`ops.schema.State`).
        has_claim: Whether the parameters belong to this store, until `release_claim`.
        sharded: Whether any parameter is a DTensor, of which a rank accumulates its local shard.
    """

    def __init__(
        self, named: list[NamedParameter], backend: str, master_weights: bool, slots: Slots | None = None
    ) -> None:
        self.named = named
        self.slots = slots
        self.buffers: list[FlatBuffer] = []
        self.states: dict[torch.device, Tensor] = {}
        self.sharded = any(is_dtensor(entry.param) for entry in named)
        self._sums_on = None if slots is None else torch.device("cpu")
        self.has_claim = False
        self._backend = backend
        self._ids = {id(entry.param) for entry in named}
        self.masters: Masters | None = None
        devices = devices_of(named) if slots is None else sorted(devices_of(named), key=_is_cpu)
        self.layout = Layout({}, self._sums_on or devices[0], devices, (), False, torch.float32, None)
        ops.select(backend, self.layout.device)  # a wrong backend is an error at once, also with all frozen
        self._claim()
        if master_weights or slots is not None:
            self.masters = Masters(named, slots)
        self.grow(self.unplaced())

    def _claim(self) -> None:
        for entry in self.named:
            if has_accumulator(entry.param):
                gc.collect()  # it may be garbage in a cycle of a trainer or a notebook
            if has_accumulator(entry.param):
                raise RuntimeError(
                    f"{entry.name!r} already has a FusedAccumulator; call its remove(), or keep parameters apart (AK02)"
                )
        self.has_claim = True
        _stores.add(self)

    def claims(self, param: Tensor) -> bool:
        """Whether the parameter, or the master, belongs to this store."""
        return id(param) in self._ids or id(param) in self.layout.places

    def release_claim(self) -> None:
        """Let another accumulator take the parameters."""
        self.has_claim = False
        _stores.discard(self)
        if self.masters is not None:
            self.masters.remove()

    @property
    def ops(self) -> ModuleType:
        """The backend of the first device."""
        return self.buffers[0].ops if self.buffers else ops.reference

    def __str__(self) -> str:
        placed = sum(len(buffer.segments) for buffer in self.buffers)
        size = sum(buffer.tensor.nbytes for buffer in self.buffers)
        backends = dict.fromkeys(f"{ops.name(b.ops)} on {b.device}" for b in self.buffers)
        return (
            f"{len(self.named)} parameters, {placed} trainable, {size:,} bytes in {len(self.buffers)} flat buffers, "
            f"backend {', '.join(backends) or 'none yet'}"
        )

    def target(self, param: Tensor) -> Tensor:
        """The tensor that gets `.grad` and that an optimizer steps: the parameter, or its master."""
        return param if self.masters is None else self.masters.target(param)

    def param_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Param groups with every parameter replaced by the tensor that an optimizer steps for it."""
        translated = []
        for group in groups:
            params = group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            targets = [(p[0], self.target(p[1])) if isinstance(p, tuple) else self.target(p) for p in params]
            translated.append({**group, "params": targets})
        return translated

    def place(self, param: Tensor) -> tuple[FlatBuffer, Segment] | None:
        """Where the gradient of a parameter or master is summed; None if it is frozen, or not ours."""
        return self.layout.places.get(id(param))

    def unplaced(self) -> list[NamedParameter]:
        """Parameters that require a gradient and have no segment: those that were unfrozen since the last `grow`."""
        return [e for e in self.named if e.param.requires_grad and id(e.param) not in self.layout.places]

    def grow(self, fresh: list[NamedParameter]) -> list[FlatBuffer]:
        """Lay out parameters in new buffers, and return these.

        Raises:
            RuntimeError: names the first that cannot be accumulated, which was frozen at construction.
        """
        for entry in fresh:
            obstacle = entry.obstacle()
            if obstacle is not None:
                raise RuntimeError(
                    f"{obstacle}: it was frozen at construction and requires a gradient now; freeze it again"
                )
        devices = dict.fromkeys(self._sums_on or e.param.device for e in fresh)
        backends = {device: ops.select(self._backend, device) for device in devices}
        with torch.inference_mode(False), torch.no_grad():
            if self.slots is not None:
                self.slots.grow([e.param for e in fresh])
            buffers = flat_buffers(fresh, backends, self._sums_on)
            if self.masters is not None:
                self.masters.grow(buffers)
            for device in devices or [self.layout.device]:  # weights count also where all is frozen
                self.states.setdefault(device, torch.zeros(len(State), dtype=torch.float64, device=device))
        self.buffers += buffers
        for buffer in buffers:
            _log.debug("%s", buffer)
        self.layout = self._lay_out()
        return buffers

    def idle(self, touched: bytes, least: float = 0.5) -> bytes:
        """Find the segments whose parameters are frozen and that hold no sum, so that they could be given back.

        Args:
            touched: See `touched_bytes`.
            least: The part of all bytes that they have to be.

        Returns:
            For each segment, in the order of buffers, 1 if it is idle; empty if there are too few.
        """
        if 0 not in touched:  # nearly always: their parameters were trainable
            return b""
        pairs = [(segment, buffer.dtype.itemsize) for buffer in self.buffers for segment in buffer.segments]
        idle = bytes(
            not is_touched and not segment.param.requires_grad
            for is_touched, (segment, _) in zip(touched, pairs, strict=True)
        )
        # Whole sizes of DTensors, since ranks may have shards of different sizes, and are to decide alike.
        sizes = [segment.param.numel() * itemsize for segment, itemsize in pairs]
        freed = sum(size for size, is_idle in zip(sizes, idle, strict=True) if is_idle)
        # The first device counts weights, and needs a buffer for that while others have one.
        left = [buffer.device for buffer, gone in self._by_buffer(idle) if 0 in gone]
        if 1 not in idle or freed < least * sum(sizes) or (left and left[0] != self.layout.device):
            return b""
        return idle

    def give_back(self, idle: Sequence[int]) -> None:
        """Forget segments between windows, as if their parameters had always been frozen.

        A buffer that keeps some of its segments is laid out anew and has no memory until `allocate`. A buffer that
        keeps all of them stays as it is. Masters stay, too, since they hold values and not sums.

        Args:
            idle: For each segment, in the order of buffers, not 0 if it goes.
        """
        buffers = []
        for buffer, gone in self._by_buffer(idle):
            if not any(gone):
                buffers.append(buffer)
                continue
            buffer.release()
            if not all(gone):
                with torch.inference_mode(False), torch.no_grad():
                    buffers.append(buffer.without(gone))
        self.buffers[:] = buffers
        self.layout = self._lay_out()
        _log.debug("frozen parameters gave back %d segments: %s", sum(map(bool, idle)), self)

    def _by_buffer(self, values: Sequence[int]) -> Iterator[tuple[FlatBuffer, Sequence[int]]]:
        """Split values, one for each segment in the order of buffers, by buffer."""
        start = 0
        for buffer in self.buffers:
            end = start + len(buffer.segments)
            yield buffer, values[start:end]
            start = end

    def _lay_out(self) -> Layout:
        """Find what follows from the buffers; devices stay as they were if there are none."""
        places: dict[int, tuple[FlatBuffer, Segment]] = {}
        for buffer in self.buffers:
            for segment in buffer.segments:
                places[id(segment.param)] = places[id(self.target(segment.param))] = (buffer, segment)
        found = list(dict.fromkeys(buffer.grad_device for buffer in self.buffers)) or self.layout.devices
        segments = [segment for buffer in self.buffers for segment in buffer.segments]
        sharded = any(buffer.sharded for buffer in self.buffers)
        wide = any(buffer.dtype == torch.float64 for buffer in self.buffers)
        return Layout(
            places=places,
            device=self.buffers[0].device if self.buffers else self.layout.device,
            devices=found if self.slots is None else sorted(found, key=_is_cpu),
            queues=tuple(dict.fromkeys(buffer.grad_device for buffer in self.buffers if buffer.queues)),
            rounds=self.masters is None and any(s.dtype != b.dtype for b in self.buffers for s in b.segments),
            result_dtype=torch.float64 if wide else torch.float32,
            as_built=None if sharded else _AsBuilt(self.named, segments),
        )

    def check_drift(self) -> None:
        """Refuse parameters that have changed since construction.

        Raises:
            RuntimeError: Names the parameter and its change of dtype, device, shape or identity.
        """
        if self.layout.as_built is not None and self.layout.as_built.holds():
            return
        for entry in self.named:
            place = self.place(entry.param)
            change = entry.check_identity() or (place[1].drift() if place else None)
            if change is not None:
                raise RuntimeError(
                    f"{change}; after such a change call remove() and build a new FusedAccumulator and optimizer"
                )

    def touched(self) -> Iterator[tuple[FlatBuffer, Segment]]:
        """Segments that hold a sum of this window, with their buffers."""
        return ((buffer, segment) for buffer in self.buffers for segment in buffer.touched_segments())

    def touched_bytes(self) -> bytes:
        """For each segment, in the order of buffers, 1 where it holds a sum."""
        return b"".join(map(_touched, self.buffers))

    def state(self) -> Tensor:
        """The first device's state, with the flags of all devices.

        Only the first device counts weights; overflow may be found on any.
        """
        state = self.states[self.layout.device]
        if len(self.states) > 1:
            of_any = worst(self.states.values(), self.layout.device)
            state = state.clone()
            for flag in (State.FOUND_INF, State.POISONED):
                state[flag] = of_any[flag]
        return state

    @property
    def unchecked(self) -> bool:
        """Whether anything was added to sums without a look for an overflow."""
        return any(map(_unchecked, self.buffers))

    def check_sums(self, micro_batches: int, checks: bool, norm: Tensor | None = None) -> Tensor:
        """Look for an overflow in sums that were added to without a look; the state afterwards.

        In which micro-batch it was is not known: it counts as the last, and with it all that were found before.

        Args:
            micro_batches: How many the window has.
            checks: Whether an overflow matters.
            norm: Of the sums, or its square, where it is known: what the host can read spares a pass over them.
        """
        unchecked = list(filter(_unchecked, self.buffers))
        if not unchecked:
            return self.state()
        finite = norm is not None and norm.device.type == "cpu" and bool(torch.isfinite(norm))
        if checks and not finite:
            tag = max(max(buffer.unchecked.values()) for buffer in unchecked)
            for buffer in unchecked:
                buffer.check_sums(self.states[buffer.device], tag, tag - max(micro_batches, 1))
        for buffer in unchecked:
            buffer.unchecked.clear()
        return self.state()

    def flagged(self) -> tuple[int, list[str]]:
        """Serial number of the last micro-batch with an overflow, and the parameters it was in; synchronises."""
        tags = {
            segment.name: tag
            for buffer in self.buffers
            for tag, segment in zip(buffer.flags.tolist(), buffer.segments, strict=True)
        }
        last = max(tags.values(), default=0)
        return last, [e.name for e in self.named if last and tags.get(e.name) == last]

    def count(self, tag: int, weight: tuple[float, Tensor | None], drop: Tensor | None) -> None:
        """Count micro-batch `tag`, of which no flat buffer gets anything; see the op `accumulate_`."""
        state = self.states[self.layout.device]
        nothing = torch.empty(0, device=state.device)
        ops.reference.accumulate_(nothing, state, [], [], [], nothing, nothing, None, tag, *weight, None, drop)

    def agreed(self, state: Tensor, touched: Sequence[int] | None) -> None:
        """Adopt the state that all ranks agreed on.

        Args:
            state: The state of the first device.
            touched: For each segment, in the order of buffers, whether it holds a sum; None to leave that as it is.
        """
        self.states[self.layout.device].copy_(state)
        if touched is None:
            return
        for buffer, of_buffer in self._by_buffer(touched):
            buffer.set_touched(of_buffer)

    def drop_grads(self) -> None:
        """Set every `.grad` to None, and leave those that somebody keeps as they are."""
        for entry in self.named:
            entry.param.grad = None
            if self.masters is not None:
                self.masters.target(entry.param).grad = None
        for buffer in self.buffers:
            buffer.take_back()

    def allocate(self) -> None:
        """Allocate again the flat buffers that `release` freed."""
        for buffer in self.buffers:
            if buffer.released:
                with torch.inference_mode(False), torch.no_grad():
                    buffer.allocate()

    def release(self) -> None:
        """Free the flat buffers until `allocate`."""
        for buffer in self.buffers:
            buffer.release()

    def open_window(self) -> None:
        """Reset all segments to untouched and all states to zero."""
        for state in self.states.values():
            state.zero_()
        for buffer in self.buffers:
            buffer.open_window()


# ---- fp32 masters of 16-bit parameters, which optimizers step and the model's values are rounded from

_param = attrgetter("param")
_master = attrgetter("master")
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
        slots: If masters are in host memory; then every parameter on another device gets one, too.

    Raises:
        ValueError: Two trainable parameters begin at the same memory; names them.
    """

    def __init__(self, named: Sequence[NamedParameter], slots: Slots | None) -> None:
        self.flat: list[Tensor] = []
        self._slots = slots
        self._masters: dict[int, nn.Parameter] = {}  # by id of the parameter
        self._pairs: dict[int, _Pair] = {}  # by id of the master, once it has memory
        self._waiting: set[int] = set()  # ids of frozen parameters whose masters were loaded
        # Versions and memory of the parameters, by id of the master, when they last had their masters' values.
        self._versions: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        self._rounded: dict[int, Any] = {}  # versions of the masters then
        self._window_steps = False
        self._hooked: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # with hooks' handles
        self._storages: dict[int, StorageWeakRef] = {}  # of the parameters: keep the address of a freed one from reuse
        at: dict[Any, str] = {}  # names by memory
        for entry in named:
            p = entry.param
            offloaded = slots is not None and not _is_cpu(p.device) and p.dtype in FLOAT_DTYPES
            if offloaded or p.dtype in (torch.float16, torch.bfloat16):
                if p.requires_grad and local(p).numel():
                    place = local(p).untyped_storage()._cdata, local(p).storage_offset()
                    if at.setdefault(place, entry.name) != entry.name:
                        raise ValueError(
                            f"params: {entry.name!r} and {at[place]!r} are two parameters in the same memory, and each "
                            "would get a master: rounding one would undo the other's step. Make them one parameter "
                            "(module.weight = other.weight)"
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
            self.flat.append(flat)
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
            self._watch(pair)
        self._stamp(pairs)

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
        """
        edited = self._edited()
        for pair in edited:
            # A changed dtype or shape is refused with the parameter's name when a window begins or ends.
            if pair.segment.drift() is None:
                master = local(pair.master).detach()
                _take_edited(pair.param, master, out=master)
            self._watch(pair)
        self._stamp(edited)

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
        self._rounded.update(zip(keys, _versions(list(map(_master, pairs))), strict=True))

    def round(self) -> None:
        """Round all masters into the model's parameters."""
        self._round(list(self._pairs.values()))

    def _round(self, pairs: Sequence[_Pair]) -> None:
        """Round masters into the model's parameters: one pass per device."""
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
        params = list(map(_param, pairs))
        torch.autograd.graph.increment_version(params)
        keys = [id(pair.master) for pair in pairs]
        self._versions.update(zip(keys, _versions(params), strict=True))
        self._rounded.update(zip(keys, _versions(list(map(_master, pairs))), strict=True))

    def round_late(self, unseen: bool) -> None:
        """Round the masters that were written to since they were rounded, where no hook has seen the end of a step.

        An update by hand has no hooks, nor have wrappers of optimizers that do not call `Optimizer.__init__`, as most
        Lookaheads; and a closure runs before its step ends.

        Args:
            unseen: Whether any may have been, by way of `.data` too, which no version counter shows.

        Raises:
            RuntimeError: A parameter was written to as well, and has neither its master's value nor that from before.
        """
        versions = dict(zip(self._pairs, _versions(list(map(_master, self._pairs.values()))), strict=True))
        if not unseen and versions == self._rounded:
            return
        edited = {id(pair.master) for pair in self._edited()}
        written = {key for key, version in versions.items() if version != self._rounded[key]}
        self._round([pair for key, pair in self._pairs.items() if (unseen or key in written) and key not in edited])
        for pair in (self._pairs[key] for key in self._pairs if key in written & edited):
            master, param = local(pair.master).detach(), local(pair.param).detach()
            if not torch.equal(master.to(param.device, param.dtype), param):  # the loop has rounded others itself
                self._round([pair])
                raise RuntimeError(
                    f"{pair.segment.name!r} was edited before its master, which was updated too, was rounded into it, "
                    "and the edit is lost: edit weights after acc.zero_()"
                )

    def begin_steps(self) -> None:
        """Take over edits before a window steps its optimizers, so that none of these steps has to look for them."""
        self.take_over()
        self._window_steps = True

    def end_steps(self) -> None:
        """Look for edits before each step again."""
        self._window_steps = False

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Take over edits if the optimizer steps masters, and see to it that its hooks find the model rounded."""
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
        self.take_over()
        unfollow(self)
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def _take_edited(param: Tensor, master: Tensor, out: Tensor) -> None:
    """Write a master's values, but the parameter's where it is not the master's, rounded."""
    param = local(param).detach().to(master.device)
    torch.where(param != master.to(param.dtype), param, master, out=out)


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
