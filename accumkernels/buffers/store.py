"""The parameters of an accumulator and everything on devices that belongs to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import ops
from ..errors import logger
from ..ops.schema import State
from .flat import FlatBuffer, Segment, flat_buffers
from .masters import Masters, Slots
from .parameters import NamedParameter, devices_of, is_dtensor, worst

_log = logger(__name__)
_touched = attrgetter("touched")
_unchecked = attrgetter("unchecked")
# Parameters carry no reference to their store: torch swaps no tensor that has a weak one (torch.utils.swap_tensors).
_stores: weakref.WeakSet[Store] = weakref.WeakSet()  # those with a claim


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def has_accumulator(param: Tensor) -> bool:
    """Whether a live accumulator has the parameter."""
    return any(store.claims(param) for store in _stores)


class _AsBuilt:
    """Identity, dtype, device, shape and strides of parameters that are no DTensors, at construction.

    A look at all of them takes a few passes, a tenth of the time of one after another.
    It only says whether anything changed: `NamedParameter.check_identity` and `Segment.drift` say what.
    """

    def __init__(self, named: Sequence[NamedParameter], segments: Sequence[Segment]) -> None:
        owned = [(owner, key, entry.param) for entry in named for owner, key in entry.owners]
        self._owners = [owner for owner, _, _ in owned]
        self._keys = [key for _, key, _ in owned]
        self._owned = [param for _, _, param in owned]
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
        segments_by_id: Where gradients are summed, by id of the parameter and of its master.
        device: The first that has sums, where weights are counted and results are returned.
        devices: Those that forward and backward run on. The first has losses, and weights until they are added.
        queues: The devices of parameters whose work is queued on streams.
        rounds: Whether any `.grad` has a narrower dtype than its sum.
        result_dtype: The dtype of norms: fp32, or fp64 if any parameter is fp64.
        as_built: What parameters were; None if one is a DTensor.
    """

    segments_by_id: dict[int, tuple[FlatBuffer, Segment]]
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
        return id(param) in self._ids or id(param) in self.layout.segments_by_id

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

    def segment_of(self, param: Tensor) -> tuple[FlatBuffer, Segment] | None:
        """Where the gradient of a parameter or master is summed; None if it is frozen, or not ours."""
        return self.layout.segments_by_id.get(id(param))

    def unplaced(self) -> list[NamedParameter]:
        """Parameters that require a gradient and have no segment: those that were unfrozen since the last `grow`."""
        return [e for e in self.named if e.param.requires_grad and id(e.param) not in self.layout.segments_by_id]

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
        left = [buffer.device for buffer, freed in self._by_buffer(idle) if 0 in freed]
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
        for buffer, freed in self._by_buffer(idle):
            if not any(freed):
                buffers.append(buffer)
                continue
            buffer.release()
            if not all(freed):
                with torch.inference_mode(False), torch.no_grad():
                    buffers.append(buffer.without(freed))
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
        segments_by_id: dict[int, tuple[FlatBuffer, Segment]] = {}
        for buffer in self.buffers:
            for segment in buffer.segments:
                segments_by_id[id(segment.param)] = segments_by_id[id(self.target(segment.param))] = (buffer, segment)
        found = list(dict.fromkeys(buffer.grad_device for buffer in self.buffers)) or self.layout.devices
        segments = [segment for buffer in self.buffers for segment in buffer.segments]
        sharded = any(buffer.sharded for buffer in self.buffers)
        wide = any(buffer.dtype == torch.float64 for buffer in self.buffers)
        return Layout(
            segments_by_id=segments_by_id,
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
            found = self.segment_of(entry.param)
            change = entry.check_identity() or (found[1].drift() if found else None)
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

    def adopt(self, state: Tensor, touched: Sequence[int] | None) -> None:
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
            buffer.set_touched(bytes(len(buffer.segments)))
            buffer.unchecked.clear()
