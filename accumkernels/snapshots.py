"""Remembers random generators and the contents of containers, and puts them back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class RandomState:
    """The random generators of Python, numpy (if imported) and torch.

    Args:
        devices: GPUs whose generators count; None for all, if CUDA is initialised.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules.get("numpy")
        self._numpy_state = None if self._numpy is None else self._numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        if devices is None:
            count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            devices = [torch.device("cuda", index) for index in range(count)]
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def restore(self) -> None:
        """Restore them all."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)


def copied(container: Any) -> Any:
    """A container's content, for `refill`."""
    return dict(container) if isinstance(container, dict) else list(container)


def refill(container: Any, content: Any) -> None:
    """Restore a container's old content in place, because others hold it too."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(content)
    else:
        container.extend(content)
