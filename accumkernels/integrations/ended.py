"""Which rank ended a run first, for ranks that wait for it in vain; kept in torch.distributed's store."""

from __future__ import annotations

import itertools

import torch

_runs = itertools.count()


class Endings:
    """The ends of one run on several ranks, each of which makes these objects in the same order."""

    def __init__(self) -> None:
        self._key = f"accumkernels/ended/{next(_runs)}"

    def note(self, windows: int) -> None:
        """Note that this rank ended after so many windows, unless another has noted its own end before."""
        if _is_initialized():
            _store().compare_set(self._key, "", f"{torch.distributed.get_rank()} {windows}")

    def first(self) -> tuple[int, int] | None:
        """The rank that ended first, and after how many windows; None if no rank did, or the store ended with it."""
        if not _is_initialized():
            return None
        try:
            if not _store().check([self._key]):
                return None
            rank, windows = map(int, _store().get(self._key).split())
        except RuntimeError:
            return None
        return rank, windows


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _store() -> torch.distributed.Store:
    """The default process group's, for which torch has no public name."""
    return torch.distributed.distributed_c10d._get_default_store()
