"""Which weights are fused: puts them into the slots of `nn.Linear` and `nn.Embedding` while these run."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...buffers.flat import FlatBuffer
from ...buffers.store import Store
from ...hooks import Handles, Hook
from ..compiled import split
from ..during_backward import DuringBackward
from ..gradients import fills_grad
from ..streams import StreamOrder
from . import gemm
from .functions import SlotWeight, in_slot, without_modes
from .rows import add_rows

Check = Callable[[FlatBuffer, int], None]


class FusionGrant(NamedTuple):
    """What a backward may add to the buffers.

    Attributes:
        grad_weight: Of every gradient, its weight over the loss scale: a number, or fp64 0-d on the first device.
        tag: The serial number of the micro-batch.
        linear: The dtypes of linear weights, as they are multiplied, that may be fused.
        embedding: The dtypes of embeddings that may be fused.
    """

    grad_weight: float | Tensor
    tag: int
    linear: frozenset[torch.dtype]
    embedding: frozenset[torch.dtype]


class _Place:
    """One weight's segment, where its gradient is added while a permitted backward runs."""

    def __init__(self, owner: FusedWeights, param: Tensor, buffer: FlatBuffer, index: int) -> None:
        self._owner = weakref.ref(owner)
        self.param = param
        self.buffer = buffer
        self.index = index
        with without_modes():
            # Held, so that it stays the one: autograd itself does not keep a leaf's node between graphs.
            self.leaf = torch.autograd.graph.get_gradient_edge(param).node

    def add_linear(self, grad: Tensor, input: Tensor) -> bool:
        """See `functions.Target`."""
        grant = self._grant()
        if grant is None or grad.dtype not in grant.linear or isinstance(grant.grad_weight, Tensor):
            return False
        view = self.buffer.views[self.index]
        add = gemm.choose(view, grad.dtype, grad.shape[0])
        if add is None:
            return False
        with self._adding(grant.tag) as first:
            add(view, grad, input, grant.grad_weight, 0.0 if first else 1.0)
        return True

    def add_embedding(self, grad: Tensor, indices: Tensor, padding_idx: int, by_frequency: bool) -> bool:
        """See `functions.Target`."""
        grant = self._grant()
        if grant is None or self.param.dtype not in grant.embedding:
            return False
        view, grad_weight = self.buffer.views[self.index], grant.grad_weight
        if isinstance(grad_weight, Tensor):
            grad_weight = grad_weight.to(view.device)
        with self._adding(grant.tag) as first:
            if first:
                view.zero_()
            add_rows(view, grad, indices, padding_idx, by_frequency, grad_weight)
        return True

    def _grant(self) -> FusionGrant | None:
        """What the backward that runs allows, where it would put the gradient into `.grad` and nobody else sees it."""
        owner = self._owner()
        if owner is None or owner.grant is None or self.buffer.released:
            return None
        if not owner.is_ours_alone(self.param) or not fills_grad(self.leaf):
            return None
        return owner.grant

    @contextlib.contextmanager
    def _adding(self, tag: int) -> Iterator[bool]:
        """Around the ops that write the segment; yields whether it holds no sum of this window yet."""
        owner = self._owner()
        assert owner is not None
        owner.begin_adding(self.buffer, self.index)
        yield not self.buffer.touched[self.index]
        self.buffer.touch_unchecked(self.index, tag)


class FusedWeights:
    """Hooks on a model's linear layers and embeddings that put their weights into their slots as `SlotWeight`s.

    What a forward has made serves every backward: where none is permitted to add to the buffers, gradients are what
    they would be without.

    Args:
        module: The model. Nothing keeps it alive but the caller.
        store: Where its parameters have their segments.
        hooks: Of the accumulator's own, which wait for the gradient of each parameter.
        check: Called with a buffer and a segment before that is added to; may raise.
        min_numel: Smaller weights are left alone.
        linear: The dtypes of linear weights, as they are multiplied, that a backward may ever fuse; others are left.

    Attributes:
        grant: What the backward that runs may add; None while none does.
        taken: ids of the parameters whose gradients were added since the last `reset`.
        parameters: ids of the parameters that were ever fused.
    """

    def __init__(
        self,
        module: nn.Module,
        store: Store,
        hooks: DuringBackward | None,
        check: Check,
        min_numel: int,
        linear: frozenset[torch.dtype],
    ) -> None:
        self.grant: FusionGrant | None = None
        self.taken: set[int] = set()
        self.parameters: set[int] = set()
        self._listening = True
        self._store = store
        self._check = check
        self._complete: Check | None = None
        self._min_numel = min_numel
        self._linear = linear
        self._hooks = hooks
        self._places: dict[int, _Place] = {}  # by id of the parameter
        self._in_slots: dict[int, tuple[weakref.ref[nn.Module], Tensor, SlotWeight]] = {}  # by id of a module that runs
        self._turns = StreamOrder()
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
            return  # it will be cast; the autocast route puts what it is cast to into the slot
        weight = self.dress_linear(plain, plain) if linear else self._dress(plain, plain)
        if isinstance(weight, SlotWeight):
            module._parameters["weight"] = weight  # type: ignore[assignment]
            self._in_slots[id(module)] = weakref.ref(module), plain, weight

    def dress_linear(self, plain: Tensor, param: Tensor) -> Tensor:
        """What is to stand in the slot of `param` in the place of `plain`: that itself where it is not to be fused."""
        return self._dress(plain, param) if plain.dtype in self._linear else plain

    def _dress(self, plain: Tensor, param: Tensor) -> Tensor:
        if not self.may_fuse(param) or not self.is_ours_alone(param) or not _is_eager():
            return plain
        place = self._places.get(id(param))
        if place is None:
            found = self._store.place(param)
            if found is None:
                return plain
            place = self._places[id(param)] = _Place(self, param, found[0], found[1].index)
            done = functools.partial(FusedWeights._leaf_ran, buffer=found[0], index=found[1].index)
            self._handles.add(place.leaf.register_hook(Hook(self, done)))
        return in_slot(plain, place)

    def watches(self, param: Tensor) -> bool:
        """Whether gradients of a parameter may come in parts that only `complete` of `adding` sums up."""
        return id(param) in self._places

    def may_fuse(self, param: Tensor) -> bool:
        """Whether a weight is large enough."""
        return param.numel() >= self._min_numel

    def is_ours_alone(self, param: Tensor) -> bool:
        """Whether nobody else waits for the gradient: hooks would not see what never gets there."""
        after = param._post_accumulate_grad_hooks
        ours = 1 if self._hooks is not None and self._hooks.listens else 0
        return param.requires_grad and not param._backward_hooks and (0 if after is None else len(after)) <= ours

    def _leave(self, module: nn.Module, *_: Any) -> None:
        held = self._in_slots.pop(id(module), None)
        if held is None:
            return
        owner, plain, weight = held
        if owner() is module and module._parameters.get("weight") is weight:
            module._parameters["weight"] = plain  # type: ignore[assignment]

    def restore_slots(self) -> None:
        """Put back every parameter: forward hooks do not run after a Ctrl-C."""
        for owner, _, _ in list(self._in_slots.values()):
            module = owner()
            if module is not None:
                self._leave(module)
        self._in_slots.clear()

    # ---- a backward

    @contextlib.contextmanager
    def adding(self, grant: FusionGrant | None, complete: Check | None = None) -> Iterator[None]:
        """Let the backward that runs inside add to the buffers.

        Args:
            grant: None: it may not.
            complete: Called with a buffer and a segment that this backward will not add to any more.
        """
        self.grant = grant if self._listening else None
        self._complete = complete
        for buffer in self._store.buffers:
            self._turns.take(buffer.device)
        try:
            yield
        finally:
            self.grant = self._complete = None
            self._turns.end()

    def begin_adding(self, buffer: FlatBuffer, index: int) -> None:
        """Note that a segment is about to be written, on the stream of the backward that runs."""
        self._check(buffer, index)
        param = buffer.params[index]
        self.taken.add(id(param))
        self.parameters.add(id(param))
        self._turns.take(buffer.device)

    def take_turn(self, buffer: FlatBuffer) -> None:
        """Something else is about to write a buffer, which comes after what was added."""
        self._turns.take(buffer.device)

    def _leaf_ran(self, *_: Any, buffer: FlatBuffer, index: int) -> None:
        """Autograd comes to a leaf, with or without a gradient, when all that used it have run."""
        if self._complete is not None:
            self._complete(buffer, index)

    # ---- the life of a window

    def set_listening(self, listening: bool) -> None:
        """Whether weights are put into slots, and backwards may add."""
        self._listening = listening

    def reset(self) -> None:
        """A micro-batch has ended."""
        self.restore_slots()
        self.taken.clear()

    def remove(self) -> None:
        """Take off every hook; graphs that are left give their gradients to `.grad`."""
        self._listening = False
        self.restore_slots()
        self._handles.remove()


def _is_eager() -> bool:
    """Whether nothing runs the model that could not take a function of ours into its graph."""
    return not (
        torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
