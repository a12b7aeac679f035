"""Warns of gradients that another loss left before a window, and that its first backward adds.

A generator's loss leaves gradients in the discriminator. A stock loop drops them by the zero_grad before the next
backward, which a swapped loop has deleted. A loop that runs a backward of its own before each acc.backward has
gradients before the first one too, and means them; but it also has them before the second one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..buffers.dtensors import local
from ..buffers.store import Store

_log = logging.getLogger(__name__)


class Leftovers:
    """Looks for gradients before a window's first backward: at one attribute of each parameter, once in a window.

    Args:
        store: Holds the parameters.
        uncounted: Whether captures hold gradients that nobody counted.

    Attributes:
        found: Whether gradients were there before the first backward of the open window, and before no other so far.
    """

    def __init__(self, store: Store, uncounted: Callable[[], bool]) -> None:
        self._store = store
        self._uncounted = uncounted
        self._looks = True
        self.found = False

    def open_window(self) -> None:
        """Begin anew."""
        self.found = False

    def see_backward(self, first: bool) -> None:
        """Look before `acc.backward`: the first one of its window, and others while `found`."""
        if not self._looks:
            return
        if first:
            self.found = False  # also if an earlier first one has failed
        grads = [p.grad for buffer in self._store.buffers for p in buffer.params if p.grad is not None]
        if not grads and not self._uncounted():
            return
        self.found = first
        if not first or not (self._uncounted() or any(map(_is_something, grads))):
            self._looks = False  # the loop means them, or has filled them with zeros: zero_grad(set_to_none=False)

    def see_end(self) -> None:
        """Warn, once, if the window that ends began with gradients of another loss."""
        if self._looks and self.found:
            self._looks = False
            _log.warning(
                "gradients of another loss were there before this window's first acc.backward, which has added them: "
                "keep the parameters out of that loss, module.requires_grad_(False), or drop its gradients by "
                "acc.zero_() before the window. If they are meant, pass the sum of the losses to acc.backward"
            )


def _is_something(grad: torch.Tensor) -> bool:
    """Whether a gradient is not all zeros, as far as the host may ask."""
    if grad.layout is not torch.strided or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    return bool(local(grad).any())
