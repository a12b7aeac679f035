"""Many ranks in one process: threads that talk by torch's threaded process group, which is for tests alone."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from accumkernels.ranks import group as own_group
from accumkernels.window.loss_weighting import SharedLoss


class _PerThread:
    """Stands in for an object of which each process has its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._local = threading.local()

    def _mine(self) -> Any:
        if not hasattr(self._local, "found"):
            self._local.found = self._make()
        return self._local.found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())

    def __contains__(self, key: object) -> bool:
        return key in self._mine()

    def __getitem__(self, key: object) -> Any:
        return self._mine()[key]

    def __setitem__(self, key: object, value: object) -> None:
        self._mine()[key] = value


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """What the library keeps for each process is each thread's."""
    with (
        unittest.mock.patch.object(own_group, "_groups", _PerThread(dict)),
        unittest.mock.patch.object(own_group, "_users", _PerThread(dict)),
        unittest.mock.patch.object(own_group, "_timeout", lambda group, device: None),  # such a group has none
        unittest.mock.patch.object(SharedLoss, "alive", _PerThread(list)),
        unittest.mock.patch.object(gc, "get_objects", list),  # would hold tuples that another thread is still making
    ):
        yield


def run(size: int, rank_of: Callable[[int, int], Any]) -> list[Any]:
    """What `rank_of(rank, size)` returned on each rank; raises with the first traceback if any rank raised."""
    found: list[Any] = [None] * size
    errors: list[str] = []
    group = multi_threaded_pg.ProcessLocalGroup

    def rank_thread(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            found[rank] = rank_of(rank, size)
        except BaseException as error:
            if not isinstance(error, SystemExit):  # with which others are ended
                errors.append(f"rank {rank}: {traceback.format_exc()}")
            group.exception_handle(error)

    threads_before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    world = multi_threaded_pg._install_threaded_pg()
    assert world is not None
    torch.set_num_threads(1)
    sys.setswitchinterval(0.05)  # ranks wait for each other all the time anyway
    try:
        with _apart():
            store = dist.HashStore()
            threads = [threading.Thread(target=rank_thread, args=(rank, store)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads_before)
        group.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise AssertionError("\n".join(errors[:3]))
    return found
