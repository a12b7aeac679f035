"""The views of a flat buffer that optimizers get as `.grad`, and what becomes of those that somebody keeps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from .layout import Segment

_log = logging.getLogger(__name__)
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
        self._searches = True

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
        if self._searches and use_count(self.storage._cdata) > uses:
            self._move_aliases(uses)

    def _move_aliases(self, uses: int) -> None:
        """Move aliases of views until only `uses` of the storage are left: new objects first, which are few.

        Some are not found: those of graphs (their backward raises torch's error for tensors that have changed), and
        what `gc.freeze` hides. The search looks at every object, so one in vain is the last.
        """
        ours = {id(tensor) for tensor in (self._tensor, *self.views)}
        moved, of_main_grad = False, -len(self.views)  # without the buffer's own
        for generation in range(3):
            objects = gc.get_objects(generation=generation)
            kinds = list(map(type, objects))
            wanted = {kind for kind in set(kinds) if _is_plain(kind)}
            for found in [found for found, kind in zip(objects, kinds, strict=True) if kind in wanted]:
                if id(found) in ours or not self._holds(found):
                    continue
                if found._base is self._tensor:
                    of_main_grad += 1
                else:
                    moved = True
                    _move(found)
            if use_count(self.storage._cdata) <= uses:
                return
        if not moved and of_main_grad <= 0:
            self._searches = False
            _log.warning(
                "something keeps the memory of a .grad over the end of a window, and no search finds it (gc.freeze(), "
                "a graph): the next window overwrites it. Keep p.grad.clone() instead. From now "
                "on, aliases such as p.grad.detach() are not looked for either"
            )

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse tensors have none
            return False
        return storage._cdata == self.storage._cdata


def _is_plain(kind: type) -> bool:
    """Whether these are tensors with memory of their own, which DTensors and fake tensors leave to a plain one."""
    return Tensor in kind.__mro__ and kind.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _move(tensor: Tensor) -> None:
    """Give a tensor memory of its own."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor.data = tensor.detach().clone()
