"""The accumulator of a trainer's optimizer, which may step masters, and may get further parameters later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..accumulator import FusedAccumulator, Parts, parts_of
from ..buffers.parameters import NamedParameter
from ..ranks.ddp import module_buffers, unwrapped
from ..window.optimizers import owned
from .ddp import counting, silent

_log = logging.getLogger(__name__)


class OptimizerAccumulator:
    """Accumulates the parameters that an optimizer steps, and lets the optimizer step their masters if there are any.

    Args:
        modules: The modules that have such parameters.
        optimizer: Changed while this object lives.
        scaler: The trainer's GradScaler, if it is enabled.
        alone: Whether no other optimizer steps parameters of the modules.
        **options: Of FusedAccumulator.

    Attributes:
        accumulator: Replaced by `renew`.
        parts: The accumulator's parts.
        sends_in_backward: Whether sums can be sent to other ranks while a backward runs.
    """

    accumulator: FusedAccumulator
    parts: Parts
    sends_in_backward: bool

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        alone: bool,
        **options: Any,
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._scaler = scaler
        self._alone = alone
        self._options = options
        self._cleanup = contextlib.ExitStack()
        self._build()

    def _build(self) -> None:
        """Make the accumulator of the parameters that the optimizer steps, and give the optimizer the masters."""
        self._owned = self._owners()
        stepped = {id(p) for p in owned((self._optimizer,))}
        wrapped = [ddp for ddp in map(unwrapped, self._modules) if isinstance(ddp, DistributedDataParallel)]
        if len(self._modules) == 1 and self._alone:
            self.accumulator = _Stepped(self._modules[0], stepped, scaler=self._scaler, **self._options)
        else:
            named = [
                (f"{index}.{name}" if len(self._modules) > 1 else name, p)
                for index, module in enumerate(self._modules)
                for name, p in module.named_parameters()
                if id(p) in stepped
            ]
            options = dict(self._options)
            for ddp in wrapped:
                self._cleanup.enter_context(silent(ddp))
            if wrapped:
                options["process_group"] = wrapped[0].process_group
            self.accumulator = FusedAccumulator(named, scaler=self._scaler, **options)
            if wrapped:
                parts_of(self.accumulator).ranks.share_from(
                    lambda: [buffer for ddp in wrapped for buffer in module_buffers(ddp.module, ddp)]
                )
        self.parts = parts_of(self.accumulator)
        self._no_syncs = [self._cleanup.enter_context(counting(ddp)) for ddp in wrapped]
        # In a static graph a parameter may get several gradients in a backward, and we cannot tell which is the last.
        static = any(ddp.static_graph for ddp in wrapped)
        early = self.parts.runner.captures.release_early
        self.sends_in_backward = self.parts.ranks.reduces_sums and early and not static
        if self.parts.ranks.sharded and self._options.get("master_weights"):
            raise ValueError(
                "master_weights=True with FSDP2 in a trainer: keep the parameters in fp32, and cast them in its "
                "mixed precision policy (param_dtype)"
            )
        self._translate(self.parts.store.target)

    def _owners(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]

    def _translate(self, target: Callable[[Tensor], Tensor]) -> None:
        """Let the optimizer step other tensors, and move its state to them."""
        for group in self._optimizer.param_groups:
            new = [target(p) for p in group["params"]]
            for old, other in zip(group["params"], new, strict=True):
                if old is not other and old in self._optimizer.state:
                    self._optimizer.state[other] = self._optimizer.state.pop(old)
            group["params"] = new
        self._owned = self._owners()

    def split_together(self, together: bool) -> bool:
        """Let ranks split batches into equally many parts; returns whether they do, which takes a module of its own."""
        if not isinstance(self.accumulator, _Stepped):
            return False
        self.accumulator.split_together(together)
        return together

    @property
    def outgrown(self) -> bool:
        """Whether the optimizer has got other parameters since the accumulator was made."""
        return self._owners() != self._owned

    def remove(self) -> dict[int, Tensor]:
        """Restore model and optimizer, keeping what was trained; returns the masters by id of their parameter."""
        store = self.parts.store
        masters = {id(e.param): store.target(e.param) for e in store.named if store.target(e.param) is not e.param}
        params = {id(store.target(e.param)): e.param for e in store.named}
        self._translate(lambda tensor: params.get(id(tensor), tensor))
        self.accumulator.remove()
        self._cleanup.close()
        return masters

    @torch.no_grad()
    def renew(self) -> None:
        """Accumulate what the optimizer steps now; masters keep their values."""
        masters = self.remove()
        self._build()
        store = self.parts.store
        for entry in store.named:
            if id(entry.param) in masters and entry.param.requires_grad:
                store.target(entry.param).copy_(masters[id(entry.param)])

    @property
    def inside_no_sync(self) -> bool:
        """Whether the loop is inside `no_sync` of a DistributedDataParallel module."""
        return any(no_sync.depth > 0 for no_sync in self._no_syncs)


class _Stepped(FusedAccumulator):
    """Leaves out parameters that the optimizer does not step, such as a frozen tower, or layers added later."""

    def __init__(self, module: nn.Module, stepped: set[int], **options: Any) -> None:
        self._stepped = stepped
        super().__init__(module, **options)

    def split_together(self, together: bool) -> None:
        """Whether ranks have equally many parts in `backward_batch`, since they wait for each other in the loss."""
        self._splits_together = together

    def _named(self, params: Any) -> list[NamedParameter]:
        named = super()._named(params)
        ignored = [e.name for e in named if id(e.param) not in self._stepped and e.param.requires_grad]
        if ignored:
            _log.warning(
                "no optimizer steps %s%s, so that no gradient of it is accumulated",
                ", ".join(map(repr, ignored[:3])),
                f" and {len(ignored) - 3} more" if len(ignored) > 3 else "",
            )
        return [e for e in named if id(e.param) in self._stepped]
