"""What is in memory, op by op, over one window of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .live_storages import LiveStorages

# From the bottom of the picture to the top.
KINDS = ("parameters", "16-bit copies", "optimizer state", "accumulators", "gradients", "activations", "workspace")
HELD = ("parameters", "optimizer state", "accumulators")  # by somebody who says so
_HALF = (torch.float16, torch.bfloat16)


class Timeline(LiveStorages):
    """Bytes of each kind after every op, once per storage.

    Whoever holds a tensor says what it is (`held`). Of the rest, what has a weight's number of elements is a gradient
    when it was made after backward began, and a 16-bit copy of the weight when a forward pass makes it in 16 bit, as
    autocast casts weights. All other tensors are activations when the forward pass made them, and workspace else.
    Batches must be chosen so that no activation has a weight's number of elements; vectors (biases) count as workspace.

    Args:
        model: What is trained.
        held: For each of `HELD`, a function that lists the tensors.

    Attributes:
        points: Per op, bytes by kind.
    """

    def __init__(self, model: nn.Module, held: dict[str, Callable[[], Iterable[Tensor]]]) -> None:
        super().__init__()
        self.points: list[dict[str, int]] = []
        self.recording = False
        self._held = held
        self._numels = {p.numel() for p in model.parameters() if p.dim() > 1}
        self._model = model
        self._kinds: dict[int, str] = {}  # by storage
        self._forward = True

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Tell forward from backward by hooks on the model, whose forward returns the loss."""

        def began(*_: Any) -> None:
            self._forward = True

        def ended(_: Any, __: Any, loss: Tensor) -> None:
            if loss.requires_grad:
                loss.register_hook(backward_begins)

        def backward_begins(_: Tensor) -> None:
            self._forward = False

        handles = [self._model.register_forward_pre_hook(began), self._model.register_forward_hook(ended)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._classify(leaf)
        if self.recording:
            self.points.append(self._bytes())
        return result

    def forget(self, key: int) -> None:
        """What it was is not what the next one is."""
        self._kinds.pop(key, None)

    def _classify(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        is_weight = tensor.numel() in self._numels
        if self._forward and is_weight and tensor.dtype in _HALF and self._kinds.get(key) != "gradients":
            self._kinds[key] = "16-bit copies"
        elif key not in self._kinds:
            rest = "activations" if self._forward else "workspace"
            self._kinds[key] = "gradients" if is_weight and not self._forward else rest

    def _bytes(self) -> dict[str, int]:
        held = {tensor.untyped_storage()._cdata: kind for kind in HELD for tensor in self._held[kind]()}
        point = dict.fromkeys(KINDS, 0)
        for key, nbytes in self.nbytes.items():
            point[held.get(key) or self._kinds.get(key, "workspace")] += nbytes
        return point


def thinned(points: Sequence[dict[str, int]], most: int) -> list[dict[str, int]]:
    """At most `most` points, of each stretch the one with the most bytes: peaks stay."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    return [max(points[a:b], key=lambda p: sum(p.values())) for a, b in zip(edges, edges[1:], strict=False)]
