"""Counts the bytes of live tensors op by op, for devices whose allocator does not keep count."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA_BLOCK = 512  # bytes; the caching allocator rounds up to multiples of it


class _StorageReference(weakref.ref):
    """A weak reference that remembers the key and the size of its storage."""

    __slots__ = ("key", "nbytes")

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
        limit: Bytes of the device; exceeding them raises `torch.OutOfMemoryError`. None: no limit.
        granularity: Bytes that allocations are rounded up to.

    Attributes:
        peak: The most bytes alive after any op.
    """

    def __init__(self, limit: int | None = None, granularity: int = 1) -> None:
        super().__init__()
        self._live = 0
        self._eager: Any = contextlib.nullcontext()
        self.peak = 0
        self._limit = limit
        self._granularity = granularity
        self._storages: dict[int, _StorageReference] = {}
        # Filled by weak references' callbacks. A Python callback might run a Ctrl-C's handler and, being a callback,
        # swallow its KeyboardInterrupt; deque.append cannot.
        self._dead: deque[_StorageReference] = deque()

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._sweep()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count existing tensors; return the bytes that were not counted yet."""
        before = self._sweep()
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
        self.peak = self._sweep()

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._granularity) * self._granularity

    def _sweep(self) -> int:
        while self._dead:
            reference = self._dead.popleft()
            if self._storages.get(reference.key) is reference:
                del self._storages[reference.key]
                self._live -= reference.nbytes
        return self._live

    def _add(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._storages:
            return
        reference = _StorageReference(storage, self._dead.append)
        reference.key, reference.nbytes = storage._cdata, self._rounded(storage)
        self._storages[reference.key] = reference
        self._live += reference.nbytes

    def _check(self) -> None:
        self.peak = max(self.peak, self._live)
        if self._limit is not None and self._live > self._limit:
            raise torch.OutOfMemoryError(
                f"out of the memory limit: {format_bytes(self._live)} of tensors alive, "
                f"limit {format_bytes(self._limit)}"
            )

    def __enter__(self) -> LiveBytes:
        # Under a mode torch.compile gives up on the functions that it meets, for good. So they run eagerly here, where
        # their ops are seen, and are compiled later.
        compiles = "torch._dynamo" in sys.modules  # importing it takes a second
        self._eager = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
        self._eager.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._eager.__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.call(func, args, kwargs or {})
        self._sweep()
        if isinstance(result, Tensor):
            self._add(result)
        elif isinstance(result, tuple | list):
            for value in torch.utils._pytree.tree_leaves(result):
                if isinstance(value, Tensor):
                    self._add(value)
        self._check()
        return result

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op; subclasses may change how."""
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return its storage; None for tensors without one of their own: sparse ones, and wrappers around others."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # the last: of a lazy module
        return None


class LiveCudaBytes(LiveBytes):
    """Counts tensors like `LiveBytes`, and takes peaks from the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(granularity=CUDA_BLOCK)
        self._device = device
        gc.collect()
        torch.cuda.empty_cache()
        self._foreign: int | None = None  # bytes on the device that do not belong to the model

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors like the base class; everything else on the device counts as foreign."""
        added = super().add(tensors)
        self._foreign = torch.cuda.memory_allocated(self._device) - self.live
        return added

    def reset_peak(self) -> None:
        """Forget the peak, and the allocator's too."""
        super().reset_peak()
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int:
        """The allocator's peak without foreign bytes."""
        if self._foreign is None:
            return 0
        return torch.cuda.max_memory_allocated(self._device) - self._foreign

    @peak.setter
    def peak(self, value: int) -> None:
        pass
