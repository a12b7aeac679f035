"""Process groups of the library's own, besides the user's."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# By ranks and their properties: the world at that time, and the group. Held weakly: a group that outlives
# destroy_process_group() would end with the interpreter, and its threads with a crash.
_groups: dict[tuple[Any, ...], tuple[weakref.ref[Any], Callable[[], Any]]] = {}
_MOST = 64  # groups of the same ranks; further users share the last
_users: dict[tuple[Any, ...], weakref.ref[Any]] = {}  # the user of each group, by the same keys


@atexit.register
def _end() -> None:
    """End groups that nobody has ended, while their threads can still be joined."""
    for _, made in _groups.values():
        group = made()
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            with contextlib.suppress(Exception):  # another rank may be gone
                dist.destroy_process_group(group)


def own_group(ranks: Sequence[int], like: Any = None, device: torch.device | None = None, user: Any = None) -> Any:
    """Return a group of the library's own of these ranks, made if there is none yet; collective over them.

    Args:
        ranks: Global ranks, this one among them.
        like: A group of the same ranks, whose backend and timeout to use instead of the default's.
        device: A device that `like` communicates from.
        user: Has the group for itself as long as it lives; the ranks' users come in one order. Two users' collectives
            may come in different orders on different ranks: one may have nothing to send in its last backward.

    Returns:
        The group; None if it cannot be made, because the ranks have made different numbers of groups before, from which
        torch makes the names of new ones.
    """
    world = dist.group.WORLD
    backend, timeout = (None, None) if like is None else (dist.get_backend_config(like), _timeout(like, device))
    # Key by the user's group, so that a user who makes a new one after a failure gets a new one here too.
    key: tuple[Any, ...] = (tuple(ranks), backend, timeout, None if like is None else like.group_name)
    if user is not None:
        key = (*key, _free(key, like, device))
        _users[key] = weakref.ref(user)
    if key in _groups and _groups[key][0]() is world:
        find = _groups[key][1]
        made = find()
        if find is _none or (made is not None and made in dist.distributed_c10d._world.pg_map):
            return made
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(backend=backend, timeout=timeout)
    elif like is not None and not _alike(len(dist.distributed_c10d._world.pg_names), like, device):
        group = None
    else:  # other ranks do not call this
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    if like is not None:
        # A rank that has connected may end before it communicates; others would then fail to connect to it.
        dist.all_reduce(torch.zeros(1, device=device), group=like)
    _groups[key] = (weakref.ref(world), _none if group is None else weakref.ref(group))
    return group


def _free(key: tuple[Any, ...], group: Any, device: torch.device | None) -> int:
    """Find the first number without a living user on any rank: objects do not die at the same time on all of them."""
    places = [(*key, number) for number in range(_MOST)]
    taken = torch.tensor([p in _users and _users[p]() is not None for p in places], dtype=torch.uint8, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group)
    numbers = taken.tolist()
    return numbers.index(0) if 0 in numbers else _MOST - 1


def _none() -> None:
    """Stand in for a group that could not be made."""


def _alike(number: int, group: Any, device: torch.device | None) -> bool:
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both.sum().item() == 0


def _timeout(group: Any, device: torch.device | None) -> Any:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
