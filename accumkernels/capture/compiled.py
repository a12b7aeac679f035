"""Finds the compiled parts of a model, and puts hooks around their calls, where Dynamo does not look.

A hook on a module inside a compiled part is compiled with it. A hook around the whole part is not, however the part was
compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..hooks import Handles, Hook

# Modules whose parameters autocast casts, all of them.
_CAST = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` compiles its calls."""
    return _is_wrapper(module) or module._compiled_call_impl is not None


def _is_wrapper(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules  # importing Dynamo for the class takes a second


def split(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """List the modules that run eagerly, and the outermost compiled ones."""
    compiled: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def walk(part: nn.Module) -> Iterator[nn.Module]:
        if part in seen:
            return
        seen.add(part)
        if is_compiled(part):
            compiled.append(part)
            return
        yield part
        for child in part._modules.values():
            if child is not None:
                yield from walk(child)

    return list(walk(module)), compiled


def casting_modules(part: nn.Module) -> list[nn.Module]:
    """List a compiled part's modules whose own parameters autocast casts and no other code reads in forward."""
    return [
        module
        for module in part.modules()
        if isinstance(module, _CAST) and any(type(module).forward is kind.forward for kind in _CAST)
    ]


def hook_around(part: nn.Module, enter: Hook[Any], leave: Hook[Any], handles: Handles) -> None:
    """Call `enter(part)` and `leave(part)` around every call of a compiled part."""
    if _is_wrapper(part):
        handles.add(part.register_forward_pre_hook(enter))
        handles.add(part.register_forward_hook(leave, always_call=True))
    else:
        handles.add(_Around(part, enter, leave))


class _Around:
    """Replaces what `module.compile()` has made, which copies and pickles of the module leave behind."""

    def __init__(self, module: nn.Module, enter: Hook[Any], leave: Hook[Any]) -> None:
        call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        this = weakref.ref(module)

        def around(*args: Any, **kwargs: Any) -> Any:
            module = this()
            if module is None or torch.compiler.is_compiling():
                return call(*args, **kwargs)
            enter(module)
            try:
                return call(*args, **kwargs)
            finally:
                leave(module)

        self._module, self._call, self._around = this, call, around
        module._compiled_call_impl = around

    def remove(self) -> None:
        """Restore the original, unless the module was compiled again."""
        module = self._module()
        if module is not None and module._compiled_call_impl is self._around:
            module._compiled_call_impl = self._call
