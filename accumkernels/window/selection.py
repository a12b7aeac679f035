"""Some of an accumulator's parameters, as a user names them: to be clipped together, or owned by no optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ..arguments import as_scalar
from ..buffers.store import Store
from ..errors import wrong_type
from .optimizers import owned


class Limit(NamedTuple):
    """What is clipped together.

    Attributes:
        ids: `id`s of the parameters and of their masters; None for all that are accumulated.
        max_norm: Largest 2-norm of their averaged gradient.
    """

    ids: Set[int] | None
    max_norm: float | Tensor

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether it is for all of an optimizer's parameters, or for none."""
        if self.ids is None:
            return True
        stepped = {id(p) for p in owned((optimizer,))}
        return stepped <= self.ids or stepped.isdisjoint(self.ids)


def limits(max_norm: Any, store: Store) -> list[Limit]:
    """Read the argument `max_norm` of `step`: None, a number, or a list of (parameters, number).

    Raises:
        TypeError, ValueError: names what is wrong with it.
    """
    if max_norm is None:
        return []
    if not isinstance(max_norm, list | tuple):
        return [Limit(None, _number(max_norm, "max_norm", store))]
    found: list[Limit] = []
    taken: set[int] = set()
    for index, entry in enumerate(max_norm):
        name = f"max_norm[{index}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise wrong_type(name, "a pair (parameters, max_norm)", entry)
        ids = select(entry[0], name, store)
        for named in store.named if taken & ids else ():
            if id(named.param) in taken & ids:
                raise ValueError(f"{name}: {named.name!r} is in an entry before it; a gradient is clipped once")
        taken |= ids
        found.append(Limit(ids, _number(entry[1], name, store)))
    return found


def _number(value: object, name: str, store: Store) -> float | Tensor:
    return as_scalar(value, name, store.device, allow_inf=True)


def select(params: Tensor | Iterable[Tensor], name: str, store: Store) -> Set[int]:
    """`id`s of parameters and of their masters; either may be given.

    Args:
        params: One, or any number.
        name: Of the argument, for messages.
        store: That of the accumulator.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not of this accumulator.
    """
    known = {id(t): entry.param for entry in store.named for t in (entry.param, store.target(entry.param))}
    found: set[int] = set()
    for p in [params] if isinstance(params, Tensor) else params:
        if not isinstance(p, Tensor):
            raise wrong_type(f"{name}: a parameter", "a tensor", p)
        if id(p) not in known:
            raise ValueError(f"{name}: a tensor of shape {tuple(p.shape)} is not one of the accumulator's parameters")
        param = known[id(p)]
        found |= {id(param), id(store.target(param))}
    return found
