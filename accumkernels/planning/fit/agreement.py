"""Lets ranks come to the same decision."""

from __future__ import annotations

from typing import Any

import torch

from ...ranks.choice import check_kind


class Agreement:
    """Tells every rank what all ranks found; without torch.distributed there is one rank.

    Args:
        process_group: The ranks that take part; None for all, False for this rank alone.

    Raises:
        TypeError, ValueError: `process_group` is something else, or a group that this rank is not in.
    """

    def __init__(self, process_group: Any = None) -> None:
        if process_group is not None and process_group is not False:
            check_kind(process_group)
        distributed = torch.distributed
        ready = distributed.is_available() and distributed.is_initialized() and process_group is not False
        self._group = process_group
        self.size = distributed.get_world_size(process_group) if ready else 1

    def gather(self, found: Any) -> list[Any]:
        """Collect every rank's result, in the order of ranks; collective."""
        if self.size == 1:
            return [found]
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, found, group=self._group)
        return everyones


def check_ranks(everyones: list[Any], caller: str, what: str) -> None:
    """Stop if another rank did, which gathered None.

    Raises:
        RuntimeError: names the first such rank.
    """
    for rank, found in enumerate(everyones):
        if found is None:
            raise RuntimeError(f"{caller}: rank {rank} failed at {what}; its own error says why")
