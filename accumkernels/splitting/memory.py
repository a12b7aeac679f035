"""What a device's memory has free, and what a micro-batch takes of it."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import devices
from ..hooks import eagerly

# ---- Counts the bytes of live tensors op by op, for devices whose allocator does not keep count

BLOCK = 512  # bytes; the caching allocators of CUDA and XPU round up to multiples of it


class _StorageReference(weakref.ref):
    """A weak reference that remembers the key of its storage, and its size as counted and without rounding."""

    __slots__ = ("exact", "key", "nbytes")

    exact: int
    key: int
    nbytes: int


def format_bytes(nbytes: float) -> str:
    """Format bytes for people: 1,234 bytes are "1.2 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


class LiveBytes(TorchDispatchMode):
    """Counts the storages of the tensors that ops return, once each, for as long as they live.

    It does not see what an op allocates and frees inside. Compiled models run eagerly. It works with fake tensors.

    Args:
        limit: Bytes of the device. An op that would exceed them raises `torch.OutOfMemoryError` before it runs, or
            afterwards if torch cannot say what it will return. None: no limit.
        granularity: Bytes that allocations are rounded up to.
        device: Count tensors of this device alone; None, or the CPU, where no other trains: of all.

    Attributes:
        peak: The most bytes alive after any op, or after one that was refused.
        exact: What `live` was when it was last read or added to, without rounding.
    """

    def __init__(self, limit: int | None = None, granularity: int = 1, device: torch.device | None = None) -> None:
        super().__init__()
        self._of = None if device is None or device.type == "cpu" else device
        self._live = 0
        self._eager = contextlib.ExitStack()
        self.peak = self.exact = 0
        self._limit = limit
        self._granularity = granularity
        self._storages: dict[int, _StorageReference] = {}
        # Filled by weak references' callbacks. A Python callback might run a Ctrl-C's handler and, being a callback,
        # swallow its KeyboardInterrupt; deque.append cannot.
        self._dead: deque[_StorageReference] = deque()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        while self._dead:
            reference = self._dead.popleft()
            del self._storages[reference.key]
            self._live -= reference.nbytes
            self.exact -= reference.exact
        return self._live

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count existing tensors; return the bytes that were not counted yet."""
        before = self.live
        for tensor in tensors:
            self._add(tensor)
        self._check()
        return self.live - before

    def nbytes(self, tensors: Iterable[Tensor]) -> int:
        """Sum the bytes of the distinct storages of `tensors`, rounded as counted here."""
        distinct = {
            storage._cdata: self._rounded(storage) for storage in map(storage_of, tensors) if storage is not None
        }
        return sum(distinct.values())

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.peak = self.live

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._granularity) * self._granularity

    def _add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._storages:
            return
        if self._of is not None and tensor.device != self._of:
            return
        reference = _StorageReference(storage, self._dead.append)
        reference.key, reference.exact, reference.nbytes = storage._cdata, storage.nbytes(), self._rounded(storage)
        self._storages[reference.key] = reference
        self._live += reference.nbytes
        self.exact += reference.exact

    def _check(self, more: int = 0) -> None:
        live = self.live
        self.peak = max(self.peak, live)
        live += more
        if self._limit is not None and live > self._limit:
            self.peak = max(self.peak, live)
            raise torch.OutOfMemoryError(
                f"out of the memory limit: {format_bytes(live)} of tensors alive, limit {format_bytes(self._limit)}"
            )

    def __enter__(self) -> LiveBytes:
        # Under a mode torch.compile gives up on the functions that it meets, for good: these are compiled later.
        self._eager.enter_context(eagerly())
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._eager.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._limit is not None:
            self._check(returned_bytes(func, args, kwargs or {}))
        result = self.call(func, args, kwargs or {})
        before = self.live
        for tensor in tensors_of(result):
            self._add(tensor)
        if self._live > before:  # an op in place has done its work, and must not seem to have failed
            self._check()
        return result

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op; subclasses may change how."""
        return func(*args, **kwargs)


# ---- Frees what an error holds


def let_go(error: BaseException, outer: BaseException | None = None) -> str:
    """Free what the frames of an error hold, and of those that it is chained to; return its message.

    Args:
        error: Nobody will see its traceback.
        outer: One that was being handled before: its frames are its owner's.
    """
    seen: set[int] = {id(outer)}
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            links += [link.__cause__, link.__context__]
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None
    return str(error)


# ---- What a device's memory has free, and how much of it a micro-batch takes

# A graph that is older than any user's. A backward that raises on the CPU leaves nodes in its thread's queue, and with
# them what they saved; the queue hands out the newest first and drops what belongs to no backward any more.
with torch.enable_grad():
    _leaf = torch.zeros((), device="cpu", requires_grad=True)
    _oldest = _leaf.clone()


class Memory:
    """A device's memory. The base class knows neither limit nor peaks: errors alone say what does not fit.

    Attributes:
        limit: Bytes that tensors of the process may take; None if that is not known.
        before: Bytes alive before what was measured last; None if unknown, as the following.
        peak: The most bytes alive in it, also if it ran out of memory.
        taken: How many of them it added.
        over_limit: Whether it does not fit though it ran: it took more than the limit, or the allocator had to give its
            cached blocks back.
        counts_ops: Whether it counts op by op, so that measuring is slow, and the limit holds where it measures alone.
    """

    limit: int | None = None
    before: int | None = None
    peak: int | None = None
    taken: int | None = None
    over_limit = False
    counts_ops = False

    def alive(self) -> int | None:
        """Bytes that tensors take now; None if that is not known."""
        return None

    def free(self) -> int | None:
        """Bytes that a micro-batch may take now; None if that is not known."""
        limit, alive = self.limit, self.alive()
        return None if limit is None or alive is None else limit - alive

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what runs inside, and keep it within the limit: an op that exceeds it runs out of memory."""
        yield

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Keep what runs inside within the limit where that costs nothing, measured or not."""
        yield

    def let_go(self) -> None:
        """Give back what an error has left."""
        torch.autograd.grad(_oldest, _leaf, retain_graph=True)
        gc.collect()
        torch.clear_autocast_cache()


class CountedMemory(Memory):
    """Counts live tensors, for devices whose allocator does not keep count. Looking for them takes milliseconds.

    What exceeds the limit is noticed when the op that allocates it returns.

    Args:
        device: The device.
        limit: Bytes that tensors may take; None: any number.
        tensors: What is alive before; None: every tensor of the process on the device.
    """

    counts_ops = True

    def __init__(
        self, device: torch.device, limit: int | None, tensors: Callable[[], Iterable[Tensor]] | None = None
    ) -> None:
        self.limit = limit
        self._device = device
        self._existing = self._tensors if tensors is None else tensors

    def alive(self) -> int:
        """See `Memory`."""
        return LiveBytes(device=self._device).add(self._existing())

    def _tensors(self) -> Iterator[Tensor]:
        for found in gc.get_objects():
            if not issubclass(type(found), Tensor):  # isinstance would ask lazy proxies for their class
                continue
            # A `.grad` that nobody has looked at has no object of Python's. Fake tensors' storages are on meta.
            for tensor in [found] if not found.is_leaf or found.grad is None else [found, found.grad]:
                storage = storage_of(tensor)
                if storage is not None and storage.device == self._device:
                    yield tensor

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`."""
        counter, self.before = LiveBytes(self.limit, device=self._device), None
        try:
            counter.add(self._existing())
            self.before = counter.live
            with counter:
                yield
        finally:
            if self.before is None:  # it is beyond the limit already
                self.before = counter.live
            self.peak, self.taken = counter.peak, counter.peak - self.before


class AllocatorMemory(Memory):
    """Reads an accelerator's caching allocator, which keeps what it has reserved within the user's limit.

    Args:
        device: The device.
        limit: Bytes that the allocator may take; None: all that the device has for it.
    """

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self._device = device
        self._limit = limit

    @property
    def limit(self) -> int:  # type: ignore[override]
        """Bytes that tensors of this process may take: all but what others hold, or one of the user's limits.

        These are the accumulator's, and the part of the memory that the allocator was given
        (`set_per_process_memory_fraction`). What is reserved for CUDA graphs takes no other tensors.
        """
        free, total = torch.accelerator.get_memory_info(self._device)
        available = free + torch.accelerator.memory_reserved(self._device)
        fraction = devices.memory_fraction(self._device)
        if fraction is not None:
            available = min(available, int(fraction * total))
        available -= devices.idle_bytes_of_graphs(self._device)
        return available if self._limit is None else min(self._limit, available)

    def alive(self) -> int:
        """See `Memory`."""
        return torch.accelerator.memory_allocated(self._device)

    def _retries(self) -> int:
        return torch.accelerator.memory_stats(self._device).get("num_alloc_retries", 0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """See `Memory`. The allocator's peak statistics begin anew."""
        before, retries, limit = self.alive(), self._retries(), self.limit
        self.before = before
        torch.accelerator.reset_peak_memory_stats(self._device)
        try:
            with self.limited():
                yield
        finally:
            self.peak = torch.accelerator.max_memory_allocated(self._device)
            self.taken = self.peak - before
            self.over_limit = self.peak > limit or self._retries() > retries

    @contextmanager
    def limited(self) -> Iterator[None]:
        """See `Memory`."""
        before = None if self._limit is None else devices.memory_fraction(self._device)
        if self._limit is None or before is None:
            yield
            return
        if torch.accelerator.memory_reserved(self._device) > self._limit:  # cached, it would be used beyond the limit
            torch.accelerator.empty_cache()
        _, total = torch.accelerator.get_memory_info(self._device)
        try:
            devices.set_memory_fraction(self._device, min(before, max(0, self._limit) / total))
            yield
        finally:
            devices.set_memory_fraction(self._device, before)

    def let_go(self) -> None:
        """See `Memory`."""
        super().let_go()
        torch.accelerator.empty_cache()


def memory_of(device: torch.device, limit: int | None, tensors: Callable[[], Iterable[Tensor]] | None = None) -> Memory:
    """The memory of a device, or `limit` bytes of it; see `CountedMemory` for `tensors`, which alone are counted.

    The allocator counts where it can: if there is a limit, where it can be given one.
    """
    if devices.counts_memory(device) and (limit is None or devices.memory_fraction(device) is not None):
        return AllocatorMemory(device, limit)
    return Memory() if limit is None and tensors is None else CountedMemory(device, limit, tensors)


# ---- How many bytes an op will return, before it runs, so that a limit is kept by ops that are refused

_MOST_KNOWN = 10_000
_known: dict[Any, int] = {}  # bytes by op and arguments; a run on the meta device takes longer than most ops


def returned_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The bytes of what an op will return and allocate, from a run on the meta device; 0 if that cannot be known."""
    schema = func._schema
    if all(one.alias_info is not None for one in schema.returns):
        return 0
    try:
        key = func, _form(args), *((name, _form(value)) for name, value in kwargs.items())
        known = _known.get(key)
    except (RuntimeError, TypeError):  # a tensor of another class or without strides, or what has no hash
        return 0
    if known is not None:
        return known
    given: set[int] = set()

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        given.add(meta.untyped_storage()._cdata)
        return meta

    try:
        with torch._C._DisableTorchDispatch():
            args, kwargs = torch.utils._pytree.tree_map(on_meta, (args, kwargs))
            if any(one.name == "device" for one in schema.arguments):
                kwargs["device"] = torch.device("meta")
            result = func(*args, **kwargs)
            found = {s._cdata: s.nbytes() for s in map(storage_of, tensors_of(result)) if s is not None}
    except Exception:  # it depends on values, or has no such kernel
        found = {}
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = sum(nbytes for storage, nbytes in found.items() if storage not in given)
    return _known[key]


def _form(value: Any) -> Any:
    """What decides about the size of an op's result."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
            raise NotImplementedError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 make other dtypes


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, such as what an op returned."""
    leaves = (tree,) if isinstance(tree, Tensor) else torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return its storage; None for tensors without one of their own: sparse ones, and wrappers around others."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # the last: of a lazy module
        return None
