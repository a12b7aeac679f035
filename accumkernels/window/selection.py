"""A user's selection of an accumulator's parameters, to clip together or to exempt from ownership."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor

from ..arguments import as_scalar
from ..buffers.store import Store
from ..errors import wrong_type


class Part(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        ids: `id`s of the parameters and of their masters.
        max_norm: Largest 2-norm of their averaged gradient.
    """

    ids: Set[int]
    max_norm: float | Tensor


def read_parts(max_norm: Sequence[Any], store: Store) -> list[Part]:
    """Read `step`'s `max_norm` given as a list of (parameters, number).

    Raises:
        TypeError, ValueError: names the wrong entry.
    """
    parts: list[Part] = []
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
        parts.append(Part(ids, as_scalar(entry[1], name, store.device, allow_inf=True)))
    return parts


def select(params: Tensor | Iterable[Tensor], name: str, store: Store) -> Set[int]:
    """Return the `id`s of parameters and of their masters; the user may pass either.

    Args:
        params: One or more tensors.
        name: The argument's name, for messages.
        store: The accumulator's store.

    Raises:
        TypeError: `params` is neither, or holds something else.
        ValueError: a tensor does not belong to this accumulator.
    """
    if not isinstance(params, Iterable):
        raise wrong_type(name, "an iterable of parameters", params)
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
