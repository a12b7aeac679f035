"""Keeps autocast's 16-bit copies of the weights for a window, in torch's own cache (`cache_casts=True`).

Autocast caches the cast of a weight until its outermost context is left. While the context's nesting is held one level
deeper, that moment does not come, so all micro-batches of a window use one cast, and one node of the graph, which has
saved nothing and may run in each of their backwards.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

from ..buffers.store import Store
from ..hooks import Follower, follow, unfollow

# Before, a cast that was cached by a forward without a graph was given to later forwards with one.
_MIXES_GRAPHS = torch.__version__ < (2, 12)  # type: ignore[operator]


class _Nesting(threading.local):
    """What a thread has to leave, of the levels of nesting that it holds: nesting is a number of each thread."""

    def __init__(self) -> None:
        self.levels: list[_Level] = []

    def leave(self) -> None:
        """Leave levels that were released, by this thread or by others."""
        for level in [level for level in self.levels if level.released]:
            self.levels.remove(level)
            torch.autocast_decrement_nesting()


class _Level:
    """One level of nesting that a thread holds.

    Args:
        versions: Those of the parameters when it began.

    Attributes:
        released: Whether the thread may leave it.
    """

    def __init__(self, versions: list[int]) -> None:
        self.versions = versions
        self.released = False
        self._hook: Any = None
        if _MIXES_GRAPHS:
            self._hook = torch.nn.modules.module.register_module_forward_hook(_clear_without_graph)

    def release(self) -> None:
        """Drop all casts."""
        self.released = True
        torch.clear_autocast_cache()
        if self._hook is not None:
            self._hook.remove()


_nesting = _Nesting()


class CastCache(Follower):
    """Holds autocast's cache from a window's first backward, or from the beginning of `acc.window`, to its end.

    Between windows nothing is held, since evaluation, averages of weights and checkpoints belong there. The cache is
    cleared at each release, and after any optimizer's step.

    Args:
        store: Holds the parameters.
        owner: The cache is released when it is freed.
    """

    def __init__(self, store: Store, owner: object) -> None:
        self._store = store
        self._level: _Level | None = None
        weakref.finalize(owner, self.release).atexit = False
        follow(self)

    def hold(self) -> None:
        """Keep casts that are cached from now on."""
        _nesting.leave()
        if self._level is None:
            self._level = _Level([entry.param._version for entry in self._store.named])
            _nesting.levels.append(self._level)
            torch.autocast_increment_nesting()

    def check(self) -> None:
        """Refuse weights that have changed since casts were first kept.

        Raises:
            RuntimeError: names the parameter.
        """
        if self._level is None:
            return
        for entry, version in zip(self._store.named, self._level.versions, strict=True):
            if entry.param._version != version:
                self.release()
                raise RuntimeError(
                    f"{entry.name!r} was changed in place inside a window, whose micro-batches share one cast of it "
                    "(cache_casts=True): change weights between windows, or leave cache_casts out. This micro-batch "
                    "was not added, and the next forward casts anew"
                )
        self._store.check_drift()

    def release(self) -> None:
        """Drop all casts, and keep no more."""
        level, self._level = self._level, None
        if level is not None:
            level.release()
        _nesting.leave()

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Drop casts of weights that may have changed; fused optimizers do not count as changes in place."""
        if self._level is not None:
            torch.clear_autocast_cache()
        _nesting.leave()

    def remove(self) -> None:
        """Release for good."""
        self.release()
        unfollow(self)


def _clear_without_graph(*_: Any) -> None:
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        torch.clear_autocast_cache()
