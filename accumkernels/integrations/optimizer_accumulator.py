"""The accumulator of a trainer's optimizer, which may step masters, and may get further parameters later."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator
from ..arguments import Options
from ..engine import Engine
from ..errors import logger
from ..ranks.ddp import Silence, module_buffers, unwrapped
from ..window.optimizers import owned

_log = logger(__name__)


class OptimizerAccumulator:
    """Accumulates the parameters that an optimizer steps, and lets the optimizer step their masters if there are any.

    Args:
        modules: The modules that have such parameters.
        optimizer: Changed while this object lives.
        scaler: The trainer's GradScaler, if it is enabled.
        exclusive: Whether no other optimizer steps parameters of the modules.
        masters: What the masters of trainable parameters begin with, by id of the parameter; else with its values.
        **options: Of FusedAccumulator.

    Attributes:
        accumulator: Of the parameters that the optimizer steps when this is made.
        engine: The accumulator's.
        sends_in_backward: Whether sums can be sent to other ranks while a backward runs.
        no_syncs: Those of DistributedDataParallel modules, which know whether a loop is inside.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        exclusive: bool,
        masters: Mapping[int, Tensor],
        **options: Any,
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._cleanup = contextlib.ExitStack()
        stepped = set(map(id, owned((optimizer,))))
        wrapped = [ddp for ddp in map(unwrapped, modules) if isinstance(ddp, DistributedDataParallel)]
        group = options.pop("process_group", None)
        if options.get("cpu_offload"):
            raise ValueError(
                "cpu_offload=True in a trainer: it moves the optimizer's state to the model's device, and its "
                "checkpoints would lack the masters. Use FusedAccumulator in a loop of your own (docs/cpu_offload.md)"
            )
        checked = Options(scaler=scaler, in_trainer=True, **options)
        if len(modules) == 1 and exclusive:
            self.engine = Engine(modules[0], checked, group, stepped=stepped)
        else:
            named: dict[int, tuple[str, Tensor]] = {}
            for index, module in enumerate(modules):
                for name, p in module.named_parameters():
                    if id(p) in stepped:  # modules may share it, as heads on one encoder do
                        named.setdefault(id(p), (f"{index}.{name}" if len(modules) > 1 else name, p))
            for ddp in wrapped:
                self._cleanup.enter_context(shared(_silences, ddp, Silence))
            buffers = None
            if wrapped:
                group = wrapped[0].process_group
                buffers = lambda: [buffer for ddp in wrapped for buffer in module_buffers(ddp.module, ddp)]  # noqa: E731
            self.engine = Engine(list(named.values()), checked, group, shared=buffers)
        self.engine.misuse.once.update(("drops", "dropped grads"))  # hooks that call zero_grad() mean it
        self.accumulator = FusedAccumulator(self.engine)  # type: ignore[arg-type]  # see there
        self.no_syncs = [self._cleanup.enter_context(shared(_no_syncs, ddp, _NoSync)) for ddp in wrapped]
        # In a static graph a parameter may get several gradients in a backward, and we cannot tell which is the last.
        static = any(ddp.static_graph for ddp in wrapped)
        early = self.engine.runner.captures.release_early
        self.sends_in_backward = self.engine.ranks.reduces_sums and early and not static
        store = self.engine.store
        if store.sharded and checked.master_weights:
            raise ValueError(
                "master_weights=True with FSDP2 in a trainer: keep the parameters in fp32, and cast them in its "
                "mixed precision policy (param_dtype)"
            )
        self._translate(store.target)
        self._owned = list(map(id, owned((optimizer,))))
        with torch.no_grad():
            for entry in store.named:
                if id(entry.param) in masters and entry.param.requires_grad:
                    store.target(entry.param).copy_(masters[id(entry.param)])

    def _translate(self, target: Callable[[Tensor], Tensor]) -> None:
        """Let the optimizer step other tensors, and move its state to them."""
        for group in self._optimizer.param_groups:
            new = [target(p) for p in group["params"]]
            for old, other in zip(group["params"], new, strict=True):
                if old is not other and old in self._optimizer.state:
                    self._optimizer.state[other] = self._optimizer.state.pop(old)
            group["params"] = new

    @property
    def outgrown(self) -> bool:
        """Whether the optimizer has got other parameters since then, or modules have other names for the same."""
        as_built = self.engine.store.layout.as_built
        stepped = chain.from_iterable(map(itemgetter("params"), self._optimizer.param_groups))  # asked in every window
        if list(map(id, stepped)) != self._owned:
            return True
        return as_built is not None and not as_built.holds() and self._are_elsewhere()

    def _are_elsewhere(self) -> bool:
        """Whether all parameters are still in the modules, as pruning and parametrizations leave them."""
        here = {id(p) for module in self._modules for p in module.parameters()}
        segments = [segment for buffer in self.engine.store.buffers for segment in buffer.segments]
        return all(id(e.param) in here for e in self.engine.store.named) and not any(s.drift() for s in segments)

    def _param(self) -> Callable[[Tensor], Tensor]:
        """The model's parameter for a tensor that the optimizer steps, which may be its master."""
        store = self.engine.store
        params = {id(store.target(e.param)): e.param for e in store.named}
        return lambda tensor: params.get(id(tensor), tensor)

    def stepped(self) -> list[Tensor]:
        """The model's parameters that the optimizer steps, itself or by their masters."""
        return list(map(self._param(), owned((self._optimizer,))))

    def remove(self) -> dict[int, Tensor]:
        """Restore model and optimizer, keeping what was trained; returns the masters by id of their parameter."""
        store = self.engine.store
        masters = {id(e.param): store.target(e.param) for e in store.named if store.target(e.param) is not e.param}
        self._translate(self._param())
        self.accumulator.remove()
        self._cleanup.close()
        return masters


# ---- DistributedDataParallel modules that the windows of several optimizers share

_silences: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()
_no_syncs: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Shared:
    """State that the windows of one module share."""

    held: Any
    windows: int = 0


@contextlib.contextmanager
def shared(of: weakref.WeakKeyDictionary[nn.Module, _Shared], ddp: DistributedDataParallel, kind: Any) -> Iterator[Any]:
    """What windows of a module share: made of it for the first, and removed with the last that is closed."""
    if ddp not in of:
        of[ddp] = _Shared(kind(ddp))
    state = of[ddp]
    state.windows += 1
    try:
        yield state.held
    finally:
        state.windows -= 1
        if state.windows == 0:
            of.pop(ddp, None)  # not there any more where garbage is collected
            state.held.remove()


class _NoSync:
    """Counts the loops inside a module's `no_sync`, which it replaces; in a copy or pickle of it, it does nothing."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.depth = 0
        self._ddp = weakref.ref(ddp)
        ddp.no_sync = self  # type: ignore[method-assign]

    def remove(self) -> None:
        if (ddp := self._ddp()) is not None:
            del ddp.no_sync

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        ddp = self._ddp()
        assert ddp is not None
        with type(ddp).no_sync(ddp):
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (contextlib.nullcontext,)
