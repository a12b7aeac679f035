"""Which tensors are alive, followed op by op: memory where no allocator keeps count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Follows the storages of the tensors that ops return, once each, for as long as they live.

    What an op allocates and frees inside is not seen, and neither is what compiled code allocates.

    Attributes:
        nbytes: By storage (its `_cdata`), the bytes of those that are alive.
        peak: The most bytes that were alive after any op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: dict[int, int] = {}
        self.peak = 0
        self._live = 0
        self._references: dict[int, weakref.ref] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Follow tensors that exist already; the answer is their bytes, as far as they were not followed yet."""
        before = self._live
        for tensor in tensors:
            self.follow(tensor)
        self.peak = max(self.peak, self._live)
        return self._live - before

    def follow(self, tensor: Tensor) -> int:
        """Follow the storage of one tensor; the answer is its key in `nbytes`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.nbytes:
            return key

        def gone(_: weakref.ref) -> None:
            self._live -= self.nbytes.pop(key)
            del self._references[key]
            self.forget(key)

        self._references[key] = weakref.ref(storage, gone)
        self.nbytes[key] = storage.nbytes()
        self._live += self.nbytes[key]
        return key

    def forget(self, key: int) -> None:
        """Told that a storage is gone: another may come to have its key."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
        return result
