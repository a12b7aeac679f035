"""Which code of a Lightning module, its callbacks and its optimizers looks at `.grad`, and when.

Lightning calls it between a backward and the next window. It sees averaged gradients where they are set before, which
takes a pass over them that is left out where nobody looks.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Set
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    import lightning.pytorch as pl

# The user's code in one of these may look at `.grad` between the last backward of a window and the next window.
_HOOKS = (
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_step",
)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "accumkernels")  # whose code is not after gradients
_CALLED = {"__init__", "__call__", "forward"}  # where an object's name is all that code says


def reads_grad(owners: Iterable[pl.LightningModule | pl.Callback]) -> bool:
    """Whether any hook between a window's last backward and the next window runs code of the user's."""
    return any(is_users(owner, name) for owner in owners for name in _HOOKS)


def is_users(owner: pl.LightningModule | pl.Callback, name: str) -> bool:
    """Whether a hook runs code of the user's, which an object may have for itself, as each LambdaCallback has."""
    hook = getattr(owner, name, None)
    return hook is not None and (name in vars(owner) or str(hook.__module__).partition(".")[0] not in _LIBRARIES)


def reader_of_grad(module: pl.LightningModule, optimizers: Iterable[Optimizer], methods: Set[str]) -> str | None:
    """The name of a function that a module's methods may call and that reads a tensor's `.grad`; torch's are left out.

    Of optimizers, too, as SAM's `first_step`, but for what is called where gradients are there.

    Code that skips a `.grad` of None says nothing when it runs, so its names are all there is to see.
    """
    seen: set[FunctionType] = set()
    children = dict(module.named_children())
    waiting = [*_functions_of(module, methods)]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        for code in codes:
            instructions = [i for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")]
            if any(i.argrepr == "grad" and i.opname == "LOAD_ATTR" for i in instructions):  # not torch.autograd's
                return function.__qualname__
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            attributes = {i.argval for i in instructions if "ATTR" in i.opname or "METHOD" in i.opname} - {"__init__"}
            found = [function.__globals__.get(i.argval) for i in instructions if i.opname == "LOAD_GLOBAL"]
            found += [vars(value).get(name) for value in found if isinstance(value, ModuleType) for name in attributes]
            found += [vars(module).get(name, children.get(name)) for name in attributes]
            waiting += _functions_of(module, attributes)
            for optimizer in optimizers:
                waiting += _functions_of(optimizer, attributes - {"step", "zero_grad"})
            for value in found:
                if all(value is not kind for kind in type(module).__mro__):  # whose methods are found already
                    waiting += _functions_of(value, attributes | _CALLED)
    return None


def _functions_of(value: Any, names: Set[str]) -> Iterator[FunctionType]:
    """A function, or those of a class or object that have one of these names; none of torch's, Lightning's or ours."""
    members = [value]
    if not isinstance(value, FunctionType):
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        members = [vars(kind)[name] for kind in kinds for name in names if name in vars(kind)]
    for member in members:
        function = getattr(member, "__func__", None) if isinstance(member, staticmethod | classmethod) else member
        if isinstance(function, FunctionType):
            function = inspect.unwrap(function)
            if str(function.__module__).partition(".")[0] not in _LIBRARIES:
                yield function
