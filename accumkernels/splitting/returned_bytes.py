"""How many bytes an op will return, before it runs, so that a limit is kept by ops that are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MOST_KNOWN = 10_000
_known: dict[Any, int] = {}  # bytes by op and arguments; a run on the meta device takes longer than most ops


def returned_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """The bytes of what an op will return and allocate, from a run on the meta device; 0 if that cannot be known."""
    schema = func._schema
    if all(one.alias_info is not None for one in schema.returns):
        return 0
    try:
        key = func, _form(args), *((name, _form(value)) for name, value in kwargs.items())
        known = _known.get(key)
    except (RuntimeError, TypeError):  # a tensor of another class or without strides, or what has no hash
        return 0
    if known is not None:
        return known
    given: set[int] = set()

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        given.add(meta.untyped_storage()._cdata)
        return meta

    try:
        with torch._C._DisableTorchDispatch():
            args, kwargs = torch.utils._pytree.tree_map(on_meta, (args, kwargs))
            if any(one.name == "device" for one in schema.arguments):
                kwargs["device"] = torch.device("meta")
            result = func(*args, **kwargs)
            found = {s._cdata: s.nbytes() for s in map(storage_of, tensors_of(result)) if s is not None}
    except Exception:  # it depends on values, or has no such kernel
        found = {}
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = sum(nbytes for storage, nbytes in found.items() if storage not in given)
    return _known[key]


def _form(value: Any) -> Any:
    """What decides about the size of an op's result."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
            raise NotImplementedError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    return type(value), value  # 1 and 1.0 make other dtypes


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that an op returned."""
    leaves = (result,) if isinstance(result, Tensor) else torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return its storage; None for tensors without one of their own: sparse ones, and wrappers around others."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # the last: of a lazy module
        return None
