"""DistributedDataParallel modules that the windows of several optimizers share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..ranks.ddp import Silence

_silences: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()
_no_syncs: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Shared:
    """State that the windows of one module share."""

    held: Any
    windows: int = 0


@contextlib.contextmanager
def silent(ddp: DistributedDataParallel) -> Iterator[None]:
    """Keep the module silent until the last of its windows is closed."""
    if ddp not in _silences:
        _silences[ddp] = _Shared(Silence(ddp))
    _silences[ddp].windows += 1
    try:
        yield
    finally:
        _silences[ddp].windows -= 1
        if _silences[ddp].windows == 0:
            _silences.pop(ddp).held.remove()


@contextlib.contextmanager
def counting(ddp: DistributedDataParallel) -> Iterator[_NoSync]:
    """Replace the module's `no_sync` by one that knows whether a loop is inside it."""
    if ddp not in _no_syncs:
        ddp.no_sync = _NoSync(type(ddp), weakref.ref(ddp))  # type: ignore[method-assign]
        _no_syncs[ddp] = _Shared(ddp.no_sync)
    _no_syncs[ddp].windows += 1
    try:
        yield _no_syncs[ddp].held
    finally:
        _no_syncs[ddp].windows -= 1
        if _no_syncs[ddp].windows == 0:
            del _no_syncs[ddp]
            del ddp.no_sync


class _NoSync:
    """Counts the loops inside `no_sync`; in a copy or pickle of the module it does nothing."""

    def __init__(self, kind: type[DistributedDataParallel], ddp: weakref.ref[DistributedDataParallel]) -> None:
        self.depth = 0
        self._kind = kind
        self._ddp = ddp

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        ddp = self._ddp()
        assert ddp is not None
        with self._kind.no_sync(ddp):
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (contextlib.nullcontext,)
