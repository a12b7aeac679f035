"""Puts the weights to be fused into the slots of `nn.Linear` and `nn.Embedding` while these run."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...buffers.flat import FlatBuffer
from ...buffers.store import Store
from ...hooks import Handles, Hook
from ..buckets import Buckets
from ..captures import Bucket, Capture, MicroBatch, Place, Sink
from ..compiled import split
from ..gradients import fills_grad, is_ours_alone
from . import gemm
from .functions import SlotWeight, in_slot, without_modes
from .policy import FusionPolicy
from .rows import add_rows


class _Place:
    """One weight's segment; a permitted backward adds the gradient to it."""

    def __init__(
        self, owner: FusedWeights, param: Tensor, buffer: FlatBuffer, index: int, policy: FusionPolicy
    ) -> None:
        self._owner = weakref.ref(owner)
        self._policy = policy
        self.param = param
        self.buffer = buffer
        self.index = index
        self._ways: dict[tuple[torch.dtype, int], gemm.Gemm | None] = {}  # by dtype and number of tokens
        with without_modes():
            # Held so that it stays the same: autograd itself does not keep a leaf's node between graphs.
            self.leaf = torch.autograd.graph.get_gradient_edge(param).node

    def add_linear(self, grad: Tensor, input: Tensor) -> bool:
        """See `functions.Target`."""
        multiplier = self._multiplier() if grad.dtype in self._policy.linear else None
        if multiplier is None or isinstance(multiplier, Tensor):
            return False
        view, key = self.buffer.views[self.index], (grad.dtype, grad.shape[0])
        if key not in self._ways:
            self._ways[key] = gemm.choose(view, *key)
        add = self._ways[key]
        if add is None:
            return False
        add(view, grad, input, multiplier, 0.0 if self._begins() else 1.0)
        return True

    def add_embedding(self, grad: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool) -> bool:
        """See `functions.Target`."""
        multiplier = self._multiplier() if self.param.dtype in self._policy.embedding else None
        if multiplier is None:
            return False
        view = self.buffer.views[self.index]
        if isinstance(multiplier, Tensor):
            multiplier = multiplier.to(view.device)
        if self._begins():
            view.zero_()
        add_rows(view, grad, indices, padding_idx, by_frequency, multiplier)
        return True

    def _multiplier(self) -> float | Tensor | None:
        """Return the gradient's factor, if backward would put it into `.grad` and nobody else sees it."""
        owner = self._owner()
        if owner is None or owner.multiplier is None or not self.buffer.views:  # released
            return None
        return owner.multiplier if is_ours_alone(self.param) and fills_grad(self.leaf) else None

    def _begins(self) -> bool:
        """Announce the ops that write the segment; return whether it holds no sum of this window yet."""
        owner = self._owner()
        assert owner is not None
        first = not self.buffer.touched[self.index]
        owner.see_write((self.buffer, self.index))
        return first


class FusedWeights(Capture):
    """Hooks on a model's linear layers and embeddings that put their weights into their slots as `SlotWeight`s.

    The graph of a forward serves every backward: one without permission to add to the buffers makes the gradients that
    it would make without fusion.

    Args:
        module: The model. Only the caller keeps it alive.
        store: Holds the segments of its parameters.
        buckets: Takes other gradients in backward.
        policy: Decides which weights are fused.
        reports_leaves: Whether to tell sinks when all gradients of a fused weight have come.

    Attributes:
        multiplier: The factor of gradients that the running backward may add; None while it may add none.
        parameters: ids of the parameters that were ever fused.
    """

    def __init__(
        self, module: nn.Module, store: Store, buckets: Buckets, policy: FusionPolicy, reports_leaves: bool
    ) -> None:
        self.multiplier: float | Tensor | None = None
        self.added = False
        self.parameters: set[int] = set()
        self._listening = True
        self._store = store
        self._sink: Sink | None = None  # of the running backward
        self._tag = 0  # of the current micro-batch
        self._policy = policy
        self._reports_leaves = reports_leaves
        self._buckets = buckets
        self._places: dict[int, _Place] = {}  # by id of the parameter
        self._in_slots: dict[int, tuple[weakref.ref[nn.Module], Tensor, SlotWeight]] = {}  # by id of a running module
        self._handles = Handles(self)
        eager, _ = split(module)
        for part in eager:
            weight = part._parameters.get("weight") if isinstance(part, (nn.Linear, nn.Embedding)) else None
            if weight is not None and self.may_fuse(weight):
                self._handles.add(part.register_forward_pre_hook(Hook(self, FusedWeights._enter)))
                self._handles.add(part.register_forward_hook(Hook(self, FusedWeights._leave), always_call=True))
                self._handles.add(part.register_state_dict_pre_hook(Hook(self, FusedWeights._leave)))

    # ---- a module's forward

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._leave(module)  # it calls itself, or a Ctrl-C has interrupted its last forward
        if not self._listening or not torch.is_grad_enabled():
            return
        plain = module._parameters.get("weight")
        if plain is None or self._store.place(plain) is None:
            return  # something else stands in the slot
        linear = isinstance(module, nn.Linear)
        if linear and plain.dtype == torch.float32 and torch.is_autocast_enabled(plain.device.type):
            return  # autocast will cast it; the autocast route puts the cast tensor into the slot
        weight = self.dress_linear(plain, plain) if linear else self._dress(plain, plain)
        if isinstance(weight, SlotWeight):
            module._parameters["weight"] = weight  # type: ignore[assignment]
            self._in_slots[id(module)] = weakref.ref(module), plain, weight

    def dress_linear(self, plain: Tensor, param: Tensor) -> Tensor:
        """Return the tensor for the slot of `param` that replaces `plain`, or `plain` if it is not to be fused."""
        return self._dress(plain, param) if plain.dtype in self._policy.linear else plain

    def _dress(self, plain: Tensor, param: Tensor) -> Tensor:
        if not self.may_fuse(param) or not is_ours_alone(param) or not _is_eager():
            return plain
        place = self._places.get(id(param))
        if place is None:
            found = self._store.place(param)
            if found is None:
                return plain
            place = self._places[id(param)] = _Place(self, param, found[0], found[1].index, self._policy)
            if self._reports_leaves:
                ran = functools.partial(FusedWeights._leaf_ran, place=(found[0], found[1].index))
                self._handles.add(place.leaf.register_hook(Hook(self, ran)))
        return in_slot(plain, place)

    def may_fuse(self, param: Tensor) -> bool:
        """Whether a weight is large enough."""
        return param.numel() >= self._policy.min_numel

    def _leave(self, module: nn.Module, *_: Any) -> None:
        held = self._in_slots.pop(id(module), None)
        if held is None:
            return
        owner, plain, weight = held
        if owner() is module and module._parameters.get("weight") is weight:
            module._parameters["weight"] = plain  # type: ignore[assignment]

    def is_ready(self) -> bool:
        """See `Capture`: forward hooks do not run after a Ctrl-C."""
        for owner, _, _ in list(self._in_slots.values()):
            module = owner()
            if module is not None:
                self._leave(module)
        self._in_slots.clear()
        return True

    # ---- a backward

    def begin(self, micro_batch: MicroBatch, sink: Sink) -> None:
        """See `Capture`."""
        if not self._listening:
            return
        self.multiplier, self._tag = sink.multiplier(micro_batch), micro_batch.tag
        self._sink = sink
        for buffer in self._store.buffers:
            if buffer.tensor.is_cuda:
                self._buckets.order.take(buffer.device)

    def end(self, failed: bool) -> None:
        """See `Capture`."""
        self.multiplier = self._sink = None
        if self._buckets.order.writers:
            self._buckets.order.end()

    def see_write(self, place: Place) -> None:
        """Note that a segment is about to be written, on the stream of the running backward."""
        assert self._sink is not None
        self._sink.check_writable(place)
        buffer, index = place
        self.added = True
        self.parameters.add(id(buffer.params[index]))
        buffer.touch_unchecked(index, self._tag)
        if buffer.tensor.is_cuda:
            self._buckets.order.take(buffer.device)

    def _leaf_ran(self, *_: Any, place: Place) -> None:
        """Note that autograd reached a leaf, with or without a gradient, after all its uses have run."""
        if self._sink is not None and self._sink.leaf_ran(place, self._buckets.is_pending(place)):
            self._buckets.hand_over()

    def reports(self, place: Place) -> bool:
        """See `Capture`."""
        return id(place[0].params[place[1]]) in self._places

    @property
    def broken(self) -> bool:  # type: ignore[override]
        """See `Capture`: additions cannot be undone."""
        return self.added

    # ---- the life of a window

    def set_listening(self, listening: bool) -> None:
        """See `Capture`; also whether weights are put into slots."""
        self._listening = listening

    def drain(self) -> list[Bucket]:
        """See `Capture`: the ops have added everything. Defined here so that a micro-batch crosses fewer files."""
        return []

    def forget(self) -> None:
        """See `Capture`."""
        self.is_ready()
        self.added = False

    def remove(self) -> None:
        """See `Capture`; remaining graphs give their gradients to `.grad`."""
        self._listening = False
        self.is_ready()
        self._handles.remove()


def _is_eager() -> bool:
    """Whether nothing runs the model that could not take our function into its graph."""
    return not (
        torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
