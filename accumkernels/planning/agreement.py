"""Ranks that decide alike."""

from __future__ import annotations

from typing import Any

import torch


class Agreement:
    """Lets every rank know what all ranks found; alone where torch.distributed is not initialised.

    Args:
        process_group: Whose ranks; None for all, False for this rank alone.
    """

    def __init__(self, process_group: Any = None) -> None:
        distributed = torch.distributed
        ready = distributed.is_available() and distributed.is_initialized() and process_group is not False
        self._group = process_group
        self.size = distributed.get_world_size(process_group) if ready else 1

    def gather(self, found: Any) -> list[Any]:
        """What every rank found, in the order of ranks; collective."""
        if self.size == 1:
            return [found]
        everyones: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyones, found, group=self._group)
        return everyones
