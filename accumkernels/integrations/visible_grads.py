"""Sums shown as `.grad` inside a window, as autograd leaves gradients, and taken back with the loop's changes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers.dtensors import local, shaped_like
from ..buffers.flat import FlatBuffer
from ..buffers.layout import Segment
from ..buffers.store import Store


class VisibleGrads:
    """The part of a window that is shown, on one rank and only if sums are not divided, as in stock torch."""

    def __init__(self) -> None:
        self._grads: list[tuple[FlatBuffer, Segment, Tensor, Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self._grads)

    def show(self, store: Store) -> None:
        """Set `.grad` to the sum so far."""
        for buffer, segment in store.touched():
            view = buffer.hand_out()[segment.index]
            target = store.target(segment.param)
            grad = view if view.dtype == target.dtype else view.to(target.dtype)
            target.grad = shaped_like(grad, target) if buffer.sharded else grad
            self._grads.append((buffer, segment, target, grad, grad._version))

    @torch.no_grad()
    def take_back(self) -> bool:
        """Take `.grad` back as the loop left it: changed, replaced, or None.

        Returns:
            Whether all are None, which means that the window was dropped.
        """
        shown, self._grads = self._grads, []
        if shown and all(target.grad is None for _, _, target, _, _ in shown):
            return True
        for buffer, segment, target, grad, version in shown:
            if target.grad is None:
                buffer.touch(segment.index, False)
                continue
            found, view = local(target.grad), buffer.views[segment.index]
            replaced = found is not grad and found is not view
            if replaced or (grad.dtype != view.dtype and grad._version != version):
                view.copy_(found)
            target.grad = None
        return False

    def forget(self) -> None:
        """Forget what is shown, after the window has ended."""
        self._grads = []
