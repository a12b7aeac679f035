"""Process groups of the library's own, beside those of the user."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_groups: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by ranks: the world when it was made, and the group


def own_group(ranks: Sequence[int], like: Any = None) -> Any:
    """The library's group of these ranks, made when it is first asked for; collective over them then.

    Args:
        ranks: Global ranks, this one among them.
        like: A group whose timeout is taken; the default's otherwise.
    """
    world = dist.group.WORLD
    key = tuple(ranks)
    timeout = None if like is None else _timeout(like)
    made = _groups.get((*key, timeout))
    if made is not None and made[0] is world:
        return made[1]
    if len(key) == dist.get_world_size():
        group = dist.new_group(timeout=timeout)
    else:  # ranks outside of the group do not come here
        group = dist.new_group(list(key), timeout=timeout, use_local_synchronization=True)
    _groups[(*key, timeout)] = (world, group)
    return group


def _timeout(group: Any) -> timedelta | None:
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
