"""The views of a flat buffer that optimizers get as `.grad`, and what becomes of those that somebody keeps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor
from torch.nn import Parameter

from .layout import Segment

use_count = torch._C._storage_Use_Count


class HandedOut:
    """Hands out views of one flat buffer in every window, as the same tensors.

    The next window overwrites the buffer. Stock torch leaves a `.grad` that an optimizer or a user has kept as it was
    (`state["previous"] = p.grad`), and so does this: when the window ends, a kept tensor gets memory of its own. The
    reference counts of the tensors show it, and the use count of their storage shows aliases (`p.grad.detach()`), which
    are then looked for among Python's objects.

    Args:
        tensor: The flat buffer.
        segments: Of the views, in order.

    Attributes:
        views: Of all segments.
        unkept: Their reference counts if nobody keeps one.
        storage: The use count that matters is that of its `_cdata`.
    """

    def __init__(self, tensor: Tensor, segments: Sequence[Segment]) -> None:
        self._tensor = tensor
        self._segments = segments
        self.views = [self._view(segment) for segment in segments]
        self.unkept = list(map(getrefcount, self.views))
        self.storage = tensor.untyped_storage()

    def _view(self, segment: Segment) -> Tensor:
        # Detached, it shares memory and version but is no view for torch, which refuses detach_() on views (fastai's
        # zero_grad). The base of its views is itself, while that of views of `main_grad` is the buffer.
        return self._tensor.as_strided(segment.shape, segment.stride, segment.offset).detach()

    def renew(self) -> None:
        """Make views anew that were given other memory (`p.grad.data = ...`): they no longer show the buffer."""
        for index, view in enumerate(self.views):
            if view.untyped_storage()._cdata != self.storage._cdata:
                self.views[index] = self._view(self._segments[index])

    def move_kept(self, uses: int) -> None:
        """Move what somebody keeps out of the buffer, after every `.grad` was set to None.

        Args:
            uses: Of the storage, before this window handed out anything.
        """
        self.renew()
        counts = list(map(getrefcount, self.views))
        for index, (count, unkept) in enumerate(zip(counts, self.unkept, strict=True)):
            if count > unkept:
                _move(self.views[index])
                self.views[index] = self._view(self._segments[index])
        if use_count(self.storage._cdata) > uses:
            self._move_aliases(uses)

    def _move_aliases(self, uses: int) -> None:
        """Move aliases of views until only `uses` of the storage are left: new objects first, which are few.

        An alias that only a graph holds is not found; its backward raises torch's error for tensors that have changed.
        """
        ours = {id(tensor) for tensor in (self._tensor, *self.views)}
        for generation in range(3):
            for found in gc.get_objects(generation=generation):
                if type(found) in (Tensor, Parameter) and id(found) not in ours and self._holds(found):
                    _move(found)
            if use_count(self.storage._cdata) <= uses:
                return

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer, and is no view of `main_grad`."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse tensors have none
            return False
        return storage._cdata == self.storage._cdata and tensor._base is not self._tensor


def _move(tensor: Tensor) -> None:
    """Give a tensor memory of its own."""
    with torch.inference_mode(False), torch.no_grad():
        tensor.data = tensor.detach().clone()
