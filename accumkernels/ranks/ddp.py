"""Checks which DistributedDataParallel modules an accumulator accepts, and keeps them silent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ..errors import logger
from ..hooks import Handles, Hook

_log = logger(__name__)
_DELAYED = "_static_graph_delay_allreduce_enqueued"  # set by the first backward of a static graph


def refuse_wrapped(named: list[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose gradients a DistributedDataParallel module averages in every backward.

    Raises:
        ValueError: names the first such parameter.
    """
    name = first_wrapped(named)
    if name is not None:
        raise ValueError(
            f"params: {name!r} belongs to a DistributedDataParallel module, which would average its gradient in every "
            "backward: pass that module itself as params"
        )


def first_wrapped(named: Iterable[tuple[str, Tensor]], averages: bool = False) -> str | None:
    """Find a parameter whose gradients a DistributedDataParallel module averages in every backward; returns its name.

    With `averages` the module must have begun to: its logger counts forwards after which it does, from the second on.

    A silenced module averages nothing, so several accumulators may share its parameters. A parameter does not know its
    reducer, so this searches all objects, which takes a fraction of a second.
    """
    ours = {id(param): name for name, param in named}

    def search() -> str | None:
        for candidate in instances(DistributedDataParallel):
            if not is_silent(candidate) and (not averages or _has_averaged(candidate)):
                for name, param in candidate.module.named_parameters():
                    if id(param) in ours and name not in candidate.parameters_to_ignore:
                        return ours[id(param)]
        return None

    name = search()
    if name is not None:
        gc.collect()  # the wrapper may be dead already, but held by cycles
        name = search()
    return name


def _has_averaged(ddp: Any) -> bool:
    return ddp.logger is not None and bool(ddp._get_ddp_logging_data().get("iteration"))


def instances(kind: type) -> list[Any]:
    """List all living objects of a class; looking at types first takes a sixth of the time of asking every object."""
    objects = gc.get_objects()
    kinds = {found for found in set(map(type, objects)) if issubclass(found, kind)}
    return [candidate for candidate in objects if type(candidate) in kinds] if kinds else []


def check_ddp(ddp: DistributedDataParallel) -> None:
    """Refuse modules whose options a silent DistributedDataParallel module cannot honour.

    Raises:
        ValueError: names the argument, and what to use instead.
    """
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) casts gradients in its reduction; use torch.autocast"
        )
    if getattr(ddp, "_delay_all_reduce_all_params", False) or getattr(ddp, "_delay_all_reduce_params", ()):
        raise ValueError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces what the accumulator is to reduce; "
            "leave it out"
        )
    if getattr(ddp, "_comm_hooks", ()):
        raise ValueError(
            "the DistributedDataParallel module has a communication hook, which would never be called; use "
            "comm_dtype=, or for LocalSGD pass and call its .module, with process_group=False"
        )
    for name, param in ddp.module.named_parameters():
        if name in ddp.parameters_to_ignore and param.requires_grad:
            raise ValueError(
                f"params: {name!r} is one that DistributedDataParallel was told to ignore. Without that wrapper, give "
                "such parameters an accumulator with process_group=False, and the rest another with process_group=; "
                "after each loss.backward() call accumulate(weight) of both"
            )


class Silence:
    """Keeps a DistributedDataParallel module from communicating, in forward and backward, until `remove`.

    Its reducer stays silent while `require_backward_grad_sync` is False, and its buffer broadcast while
    `require_forward_param_sync` is False. `no_sync()` and trainers reset the flags to their old values or to True; a
    hook before each forward, where the module reads them, clears them again.
    """

    _FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._ran = False  # whether the module has had a forward
        self._before = {name: getattr(ddp, name) for name in self._FLAGS}
        # With static_graph=True the first backward would reduce after its end, whatever the flags say.
        self._before[_DELAYED] = getattr(ddp, _DELAYED, False)
        setattr(ddp, _DELAYED, True)
        self._handles = Handles(self)
        self._handles.add(ddp.register_forward_pre_hook(Hook(self, Silence._be_silent)))
        for name in self._FLAGS:
            setattr(ddp, name, False)

    def _be_silent(self, ddp: nn.Module, *_: Any) -> None:
        self._ran = True
        for name in self._FLAGS:
            if getattr(ddp, name):  # rarely true, and modules are slow to set attributes
                setattr(ddp, name, False)
        if not getattr(ddp, _DELAYED, True):  # by `_set_static_graph()`, which says that it has not reduced yet
            setattr(ddp, _DELAYED, True)

    def check_end(self, caller: str) -> None:
        """Refuse to end a window if the module's state rules out a correct result.

        Raises:
            RuntimeError: says what to change.
        """
        ddp = self._ddp()
        if ddp is None:
            return
        if _inside_join(ddp):
            raise RuntimeError(
                f"{caller} inside join(): a rank that has joined would not take part, and the others would wait for "
                "it. A rank without micro-batches calls it all the same, so join() is not needed; or put join() around "
                "the micro-batches of a window, and end the window after it"
            )
        if getattr(ddp, "_comm_hooks", ()):
            raise RuntimeError(
                f"{caller}: a communication hook was registered on the DistributedDataParallel module, and is never "
                "called, since the accumulator reduces its own sums; use comm_dtype="
            )

    def remove(self) -> None:
        """Let the module communicate as before."""
        self._handles.remove()
        ddp = self._ddp()
        if ddp is not None and ddp.static_graph and self._ran and not self._before.get(_DELAYED, True):
            _log.warning(
                "remove(): DistributedDataParallel(static_graph=True) has learned from backwards in which it was "
                "silent, and will not average gradients: wrap the module anew to train it without an accumulator"
            )
        for name, value in self._before.items() if ddp is not None else ():
            setattr(ddp, name, value)
        self._before.clear()


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper and Lightning Fabric's, if it has any."""
    while (inner := next((module._modules[name] for name in _WRAPPED if name in module._modules), None)) is not None:
        if len(list(inner.parameters())) < len(list(module.parameters())):
            break  # not a wrapper: it has parameters of its own
        module = inner
    return module


_WRAPPED = ("_orig_mod", "_forward_module")


def is_silent(ddp: DistributedDataParallel) -> bool:
    """Whether an accumulator keeps the module from communicating."""
    hooks = ddp._forward_pre_hooks.values()
    return any(isinstance(hook, Hook) and hook.method is Silence._be_silent for hook in hooks)


def _inside_join(ddp: Any) -> bool:
    """Whether this is inside `join()`; the module does not know when that ends, but its context is gone then."""
    if not ddp._join_config.enable:
        return False
    if any(joinable is ddp for join in instances(Join) for joinable in join._joinables):
        return True
    ddp._join_config = type(ddp._join_config).construct_disabled_join_config()
    return False


def module_buffers(params: Any, ddp: DistributedDataParallel | None) -> list[Tensor]:
    """List the module buffers that all ranks share with rank 0: those that DistributedDataParallel would broadcast.

    Args:
        params: A module; anything else has no buffers.
        ddp: Its wrapper, with `broadcast_buffers` and a list of names to ignore.
    """
    if not isinstance(params, nn.Module) or (ddp is not None and not ddp.broadcast_buffers):
        return []
    source: Any = (
        ddp.parameters_to_ignore if ddp is not None else getattr(params, "_ddp_params_and_buffers_to_ignore", ())
    )
    return [buffer for name, buffer in params.named_buffers() if name not in source]
