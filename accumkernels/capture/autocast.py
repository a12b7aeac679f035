"""The autocast route: 16-bit gradients of fp32 parameters, taken before autocast's backward widens them.

Autocast casts an fp32 weight to 16 bits in every forward. The cast's backward widens the returning gradient (6 bytes
per element) before AccumulateGrad adds it (12). With the route, a module's forward finds a 16-bit tensor in the
parameter's slot: a view of a flat shadow that is rounded from the parameters once per window. In the graph, this tensor
comes from a function whose backward takes the 16-bit gradient to the flat buffer without widening it. Bytes per element
and micro-batch: stock 24 (6 to cast, 6 to widen, 12 to add), here 10.

The function connects the shadow to its parameters, so that `torch.autograd.grad` with respect to them works as usual.
One function per micro-batch serves all parameters; if gradients are released in backward, there is one for each weight
and its bias. Hooks on modules, unlike a walk over the graph or one hook on the model, also serve submodules called
alone, autocast inside forward, and checkpointing's reruns. The route learns which slots autocast casts by watching the
ops of each module's first forward; a slot that is also read uncast keeps its parameter. Values and gradients are bit
for bit those of stock autocast: the cast rounds alike, and gradients of several uses of one weight are summed in 16
bits, as for autocast's cached cast.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..buffers.flat import FlatBuffer
from ..buffers.layout import Segment, aligned
from ..buffers.pages import zeros
from ..buffers.store import Store
from ..hooks import Handles, Hook
from .buckets import Buckets
from .captures import Capture, MicroBatch, Place, Sink
from .cast_recorder import CastRecorder
from .compiled import casting_modules, hook_around, is_compiled, split
from .fused.functions import plain_of
from .fused.weights import FusedWeights
from .gradients import Gradients, fills_grad, is_ours_alone
from .streams import Ready

_HALF = (torch.float16, torch.bfloat16)


class _Shadow:
    """A parameter's place in the 16-bit shadow, and which values of the parameter it holds."""

    def __init__(self, param: Tensor, dtype: torch.dtype, buffer: FlatBuffer, segment: Segment) -> None:
        self.param = param
        self.dtype = dtype
        self.buffer = buffer
        self.segment = segment
        self.tensor: Tensor | None = None  # allocated, with others, at the end of the micro-batch
        self.holds: tuple[int, int] | None = None

    def current(self) -> tuple[int, int]:
        """Return what changes with the parameter's values: its version, or where `param.data` points."""
        return self.param._version, self.param.data_ptr()


class _Take(torch.autograd.Function):
    """Maps parameters to their shadows; backward takes 16-bit gradients, or widens those that it must not take."""

    @staticmethod
    def forward(ctx: Any, route: weakref.ref[AutocastRoute], shadows: list[_Shadow], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.shadows = route, shadows
        ctx.set_materialize_grads(False)
        return tuple(shadow.tensor.detach() for shadow in shadows if shadow.tensor is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        route = ctx.route()
        results: list[Tensor | None] = [None, None]
        wanted = ctx.needs_input_grad[2:]
        for shadow, grad, needed, (leaf, _) in zip(ctx.shadows, grads, wanted, ctx.next_functions, strict=True):
            if grad is None or not needed:
                results.append(None)
            elif route is not None and route.take(shadow, grad, leaf):
                results.append(None)
            else:
                results.append(grad.to(shadow.param.dtype))
        return tuple(results)


class _Slots:
    """The route's knowledge of one module's own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.shadows: dict[str, _Shadow] | None = None  # by slot; None until learned
        self.learned_in = -1  # the generation; the next one begins to use the shadows
        self.recorder: CastRecorder | None = None
        self.unwatched: set[int] | None = None  # its parameters, while it runs without grad inside a watched module
        self.swapped: list[tuple[str, Tensor, Tensor]] = []


def _own(module: nn.Module) -> set[int]:
    return {id(plain_of(p)) for p in module._parameters.values() if p is not None and p.requires_grad}


class AutocastRoute(Capture):
    """Hooks on a model's modules that put 16-bit shadows in the slots of parameters which autocast casts.

    Args:
        store: Holds the segments of the model's parameters.
        buckets: Collects gradients while backward runs, if it takes that backward's gradients.
        gradients: Keeps them otherwise.
        fused: Decides what stands in the slots of linear weights that it fuses.
        always: Whether to take gradients in every backward. If not, backwards outside `begin` and `end` widen them into
            `.grad`, where a loop of its own may look for them.
        module: The model. Only the caller keeps it alive.
        smallest: Modules whose parameters all have fewer elements are left to autocast.

    Attributes:
        keeps_whole: Whether no gradient may come in several parts.
        used: Whether a module ran under autocast in this window.
        backwards: Number of backwards in this window that it took part in.
    """

    def __init__(
        self,
        store: Store,
        buckets: Buckets,
        gradients: Gradients,
        fused: FusedWeights | None,
        always: bool,
        module: nn.Module,
        smallest: int,
    ) -> None:
        self._fused = fused
        self.keeps_whole = self.used = False
        self._taking = False  # while a backward runs that `accumulate` follows at once
        self._listening = True  # False between `finalize` and the next window, when gradients are torch's alone
        self.backwards = 0
        self._rounded: dict[torch.device, Ready] = {}  # when shadows on CUDA devices were rounded
        self._store = store
        self._buckets = buckets
        self._gradients = gradients
        self._always = always
        self._shadows: dict[int, _Shadow] = {}  # by id of the parameter
        self._new: list[_Shadow] = []
        self._live: dict[int, Tensor] = {}  # by id of the parameter: its shadow in this micro-batch's graph
        self._direct: set[int] = set()  # ids of parameters that some forward reads uncast
        self._elsewhere: set[int] = set()  # ids of parameters used outside of their own modules
        self._casts: dict[tuple[int, torch.Size], int] = {}
        self._at_home: list[set[int]] = []  # parameters of the running modules, while any is watched
        self._swapped: list[_Slots] = []  # running modules with a shadow in a slot
        self._recorders: list[CastRecorder] = []  # of running modules, the innermost last
        self._generation = 0  # number of micro-batches begun
        self._root = id(module)
        self._modules: dict[int, _Slots] = {}
        self._handles = Handles(self)
        eager, compiled = split(module)
        self._inside: dict[int, list[_Slots]] = {}  # by id of a compiled part: its modules that autocast casts
        for part in compiled:
            casting = casting_modules(part)
            self._inside[id(part)] = [_Slots(inner) for inner in casting]
            for inner in part.modules():
                if inner not in casting:
                    self._direct |= _own(inner)
            enter, leave = Hook(self, AutocastRoute._enter_compiled), Hook(self, AutocastRoute._leave_compiled)
            hook_around(part, enter, leave, self._handles)
            self._handles.add(part.register_state_dict_pre_hook(Hook(self, AutocastRoute._leave_compiled)))
        for part in eager:
            params = [p for p in part._parameters.values() if p is not None and p.dtype == torch.float32]
            if part is module or any(p.numel() >= smallest for p in params):
                self._modules[id(part)] = _Slots(part)
                self._handles.add(part.register_forward_pre_hook(Hook(self, AutocastRoute._enter)))
                self._handles.add(part.register_forward_hook(Hook(self, AutocastRoute._leave), always_call=True))
                self._handles.add(part.register_state_dict_pre_hook(Hook(self, AutocastRoute._restore_module)))
        weakref.finalize(self, _stop, self._recorders).atexit = False

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters that take the route."""
        return {id(s.param) for s in self._shadows.values() if self._may_route(s.param)}

    def in_parts(self, place: Place) -> bool:
        """See `Capture`: a tied embedding's gradient comes in two, a 16-bit and an fp32 part."""
        return id(place[0].params[place[1]]) in self._direct

    def begin(self, micro_batch: MicroBatch, sink: Sink) -> None:
        """See `Capture`."""
        self._taking = True
        self.backwards += 1

    def end(self, failed: bool) -> None:
        """See `Capture`."""
        self._taking = False

    def set_listening(self, listening: bool) -> None:
        """See `Capture`; also whether shadows are put into slots."""
        self._listening = listening

    # ---- a module's forward

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._listening:
            return  # the optimizer may have stepped, and torch's fused ones do not count as in-place changes
        slots = self._modules.get(id(module))
        if slots is None or slots.module() is not module or slots.recorder is not None:
            return  # a copy, or a module that calls itself
        self._put_back(slots)
        if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
            return  # neither can take our function into its graph
        if not torch.is_grad_enabled():
            if self._at_home:  # the first run of a reentrant checkpoint; learn from its second run
                slots.unwatched = _own(module)
                self._at_home.append(slots.unwatched)
            return
        shadows = slots.shadows
        learning = shadows is None or slots.learned_in == self._generation
        if not shadows and not learning:
            return
        device_type = self._store.device.type
        if not torch.is_autocast_enabled(device_type):
            return
        self.used = True
        dtype = torch.get_autocast_dtype(device_type)
        if learning:
            # Dynamo does not compile parts of a module while a dispatch mode is active.
            if dtype in _HALF and not any(map(is_compiled, module.modules())):
                self._watch(slots, module, dtype)
            return
        self._fill(slots, module, dtype, self._fused)

    def _fill(self, slots: _Slots, module: nn.Module, dtype: torch.dtype, fused: FusedWeights | None) -> None:
        """Put shadows into a module's slots."""
        params = module._parameters
        ready = [
            (name, shadow)
            for name, shadow in (slots.shadows or {}).items()
            if shadow.tensor is not None
            and shadow.dtype is dtype
            and params.get(name) is shadow.param
            and self._may_route(shadow.param)
        ]
        if not ready:
            return
        if any(shadow.holds != shadow.current() for _, shadow in ready):
            self._refresh()
        for device in {shadow.param.device for _, shadow in ready if shadow.param.is_cuda}:
            self._rounded[device].wait()
        if any(id(shadow.param) not in self._live for _, shadow in ready):
            self._connect([shadow for _, shadow in ready])
        for name, shadow in ready:
            param = shadow.param
            live = self._live[id(param)]
            if fused is not None and name == "weight" and isinstance(module, nn.Linear):
                live = fused.dress_linear(live, param)
            params[name] = live  # type: ignore[assignment]
            slots.swapped.append((name, param, live))
        self._swapped.append(slots)

    def _connect(self, of_module: list[_Shadow]) -> None:
        """Put a module's shadows into this micro-batch's graph, or all shadows if nothing is released in backward.

        A function takes its gradients when the last of them arrives. A bias's gradient comes with its weight's and
        causes no wait; two weights of a module do not wait for each other.
        """
        if self._buckets.listens:
            new = [s for s in of_module if id(s.param) not in self._live]
            groups = [[s] for s in new if s.param.dim() > 1] or [[]]
            groups[0] += [s for s in new if s.param.dim() <= 1]
        else:
            known = (s for s in self._shadows.values() if s.tensor is not None and id(s.param) not in self._live)
            groups = [[s for s in known if self._may_route(s.param)]]
        for shadows in groups:
            tensors = _Take.apply(weakref.ref(self), shadows, *(s.param for s in shadows))
            for shadow, tensor in zip(shadows, tensors, strict=True):
                tensor.__dict__ = shadow.param.__dict__  # attributes that a forward of the user's reads or sets
                self._live[id(shadow.param)] = tensor

    def take(self, shadow: _Shadow, grad: Tensor, leaf: Any) -> bool:
        """Take the gradient if this backward would fill `.grad`; False: the caller wants it there, in fp32."""
        if not self._listening or not (self._always or self._taking) or not fills_grad(leaf):
            return False
        place = shadow.buffer, shadow.segment.index
        if not self._buckets.collect(place, grad):
            self._gradients.stash(place, grad)
        return True

    def _watch(self, slots: _Slots, module: nn.Module, dtype: torch.dtype) -> None:
        own = _own(module)
        others: set[int] = set()
        if id(module) == self._root:
            others = {id(e.param) for e in self._store.named if e.param.dtype == torch.float32}
        slots.recorder = CastRecorder(own, others, self._at_home, self._casts, dtype)
        self._at_home.append(own)
        slots.recorder.__enter__()
        self._recorders.append(slots.recorder)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        slots = self._modules.get(id(module))
        if slots is None or slots.module() is not module:
            return
        self._put_back(slots)
        if slots.unwatched is not None:
            self._at_home.remove(slots.unwatched)
            slots.unwatched = None
        watch, slots.recorder = slots.recorder, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self._recorders.remove(watch)
            self._at_home.remove(watch.own)
            self._learn(slots, watch)

    def _put_back(self, slots: _Slots) -> None:
        module = slots.module()
        if module is None or not slots.swapped:
            return
        for name, param, live in slots.swapped:
            if module._parameters.get(name) is live:
                module._parameters[name] = param  # type: ignore[assignment]
        slots.swapped.clear()
        self._swapped.remove(slots)

    # ---- a compiled part's call

    def _enter_compiled(self, part: nn.Module, *_: Any) -> None:
        """Put shadows into all slots of a part before Dynamo sees them, so that its code has nothing to cast."""
        self._leave_compiled(part)
        device_type = self._store.device.type
        dtype = torch.get_autocast_dtype(device_type)
        if not self._listening or not torch.is_grad_enabled() or not torch.is_autocast_enabled(device_type):
            return
        if dtype not in _HALF or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
            return
        for slots in self._inside[id(part)]:
            module = slots.module()
            shadows = slots.shadows = slots.shadows or {}
            for name, param in module._parameters.items() if module is not None else ():
                if param is not None and name not in shadows:
                    self._give_shadow(shadows, name, param, dtype)
        if self._new:  # allocate now, not at the end of the micro-batch as in eager mode: it would compile twice
            self._allocate()
        for slots in self._inside[id(part)]:
            module = slots.module()
            if module is not None:
                self._fill(slots, module, dtype, None)

    def _leave_compiled(self, part: nn.Module, *_: Any) -> None:
        for slots in self._inside[id(part)]:
            self._put_back(slots)

    def _restore_module(self, module: nn.Module, *_: Any) -> None:
        """Restore the slots before the module's state_dict is made, which may happen in its forward."""
        slots = self._modules.get(id(module))
        if slots is not None and slots.module() is module:
            self._put_back(slots)

    def is_ready(self) -> bool:
        """See `Capture`: forward hooks do not run after a Ctrl-C."""
        for slots in list(self._swapped):
            self._put_back(slots)
        return True

    def _may_route(self, param: Tensor) -> bool:
        """Whether nobody else wants a parameter's gradient, and it comes in one part if it has to."""
        if id(param) in self._elsewhere:
            return False  # autograd would sum the gradients from both sides in 16 bits
        if self.keeps_whole and self._buckets.listens and id(param) in self._direct:
            return False  # its gradient would come in two parts
        return is_ours_alone(param)

    def _learn(self, slots: _Slots, watch: CastRecorder) -> None:
        module = slots.module()
        assert module is not None
        self._elsewhere |= watch.elsewhere
        self._direct |= watch.direct
        if not watch.cast and not watch.direct and watch.own:
            return  # the forward raised, or ran nothing: watch the next one
        slots.learned_in = self._generation
        if slots.shadows is None:
            slots.shadows = {}
        for name, param in module._parameters.items():
            if param is None or id(param) not in watch.cast or id(param) in watch.direct:
                slots.shadows.pop(name, None)
                continue
            self._give_shadow(slots.shadows, name, param, watch.dtype)

    def _give_shadow(self, shadows: dict[str, _Shadow], name: str, param: Tensor, dtype: torch.dtype) -> None:
        """Give a slot its parameter's shadow, if the parameter is accumulated and cast from fp32."""
        place = self._store.place(param)
        if param.dtype != torch.float32 or place is None:
            return
        shadow = self._shadows.get(id(param))
        if shadow is None:
            shadow = self._shadows[id(param)] = _Shadow(param, dtype, *place)
            self._new.append(shadow)
        if shadow.dtype == dtype:
            shadows[name] = shadow

    # ---- the shadow

    def _allocate(self) -> None:
        """Give new shadows views of one flat tensor per device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[_Shadow]] = {}
        for shadow in self._new:
            groups.setdefault((shadow.param.device, shadow.dtype), []).append(shadow)
        self._new.clear()
        for (device, dtype), shadows in groups.items():
            sizes = [aligned(shadow.segment.numel, dtype) for shadow in shadows]
            with torch.inference_mode(False), torch.no_grad():
                flat = zeros(sum(sizes), dtype, device)
                for shadow, part in zip(shadows, flat.split(sizes), strict=True):
                    segment = shadow.segment
                    shadow.tensor = part.as_strided(segment.shape, segment.stride, part.storage_offset())

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round every parameter that changed, in one pass per device."""
        stale: dict[torch.device, list[_Shadow]] = {}
        for shadow in self._shadows.values():
            if shadow.tensor is not None and shadow.holds != shadow.current():
                stale.setdefault(shadow.param.device, []).append(shadow)
        for shadows in stale.values():
            outputs = [shadow.tensor for shadow in shadows if shadow.tensor is not None]
            inputs = [shadow.param.detach() for shadow in shadows]
            if all(output.stride() == input.stride() for output, input in zip(outputs, inputs, strict=True)):
                shadows[0].buffer.ops.scaled_copy_(outputs, inputs)
            else:  # a parameter that is not dense
                torch._foreach_copy_(outputs, inputs)
            device = shadows[0].param.device
            if device.type == "cuda":  # round all modules' shadows on the stream of the first module that runs
                self._rounded[device] = Ready(device)
            # A graph that still holds the old values must notice the change.
            torch.autograd.graph.increment_version(outputs)
            for shadow in shadows:
                shadow.holds = shadow.current()

    def renew(self, keeps_whole: bool) -> None:
        """Round the shadow again, because the optimizer has stepped.

        Args:
            keeps_whole: Whether no gradient of the next window may come in several parts.
        """
        self.keeps_whole = keeps_whole
        self.used, self.backwards = False, 0
        for shadow in self._shadows.values():
            shadow.holds = None

    def keep_whole(self) -> None:
        """Let no gradient of the open window come in several parts."""
        self.keeps_whole = True

    def forget(self) -> None:
        """See `Capture`; from now on, use what was learned in the micro-batch."""
        self.is_ready()
        self._casts.clear()
        self._live.clear()
        self._generation += 1
        if self._new:
            self._allocate()

    def remove(self) -> None:
        """See `Capture`; remaining graphs give their gradients to `.grad`."""
        self._listening = False
        self.is_ready()
        _stop(self._recorders)
        self._handles.remove()


def _stop(recorders: list[CastRecorder]) -> None:
    """Stop recorders that a Ctrl-C in a first forward left on, or every op of the thread would pass through them."""
    while recorders and _get_current_dispatch_mode() is recorders[-1]:
        recorders.pop().__exit__(None, None, None)
