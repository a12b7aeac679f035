"""Process groups of the library's own, beside those of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_groups: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # by ranks and what they are like: the world then, and the group


def own_group(ranks: Sequence[int], like: Any = None, device: torch.device | None = None) -> Any:
    """The library's group of these ranks, made when it is first asked for; collective over them then.

    Args:
        ranks: Global ranks, this one among them.
        like: A group of the same ranks, whose backend and timeout are taken; the default's otherwise.
        device: One that `like` communicates from.

    Returns:
        The group; None where it cannot be made because the ranks have made different numbers of groups before, which
        torch names new ones by.
    """
    world = dist.group.WORLD
    backend, timeout = (None, None) if like is None else (dist.get_backend_config(like), _timeout(like, device))
    # One for each group of the user's: whoever makes a new one after a failure gets a new one here too.
    key = (tuple(ranks), backend, timeout, None if like is None else like.group_name)
    made = _groups.get(key)
    if made is not None and made[0] is world:
        return made[1]
    if len(ranks) == dist.get_world_size():
        group = dist.new_group(backend=backend, timeout=timeout)
    elif like is not None and not _alike(len(dist.distributed_c10d._world.pg_names), like, device):
        group = None
    else:  # ranks outside of the group do not come here
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    if like is not None:
        # A rank that has connected may end before it communicates; others would find it gone while they connect.
        dist.all_reduce(torch.zeros(1, device=device), group=like)
    _groups[key] = (world, group)
    return group


def _alike(number: int, group: Any, device: torch.device | None) -> bool:
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both.sum().item() == 0


def _timeout(group: Any, device: torch.device | None) -> Any:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
