"""Whether parameters are what they were: all of them in a few passes, a tenth of the time of one after another."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor
from torch.nn import Parameter

from .layout import Segment
from .parameters import NamedParameter


class AsBuilt:
    """Identity, dtype, device, shape and strides of parameters that are no DTensors, at construction.

    It only says whether anything changed: `NamedParameter.check_identity` and `Segment.drift` say what.

    Args:
        named: All parameters.
        segments: Of those that have a place.
    """

    def __init__(self, named: Sequence[NamedParameter], segments: Sequence[Segment]) -> None:
        places = [(owner, key, entry.param) for entry in named for owner, key in entry.owners]
        self._owners = [owner for owner, _, _ in places]
        self._keys = [key for _, key, _ in places]
        self._owned = [param for _, _, param in places]
        self._params = [s.param for s in segments]
        # Not of subclasses, which need not have an address.
        plain = all(type(p) in (Tensor, Parameter) for p in self._params)
        self._addresses = list(map(Tensor.data_ptr, self._params)) if plain else None
        self._dtypes = [s.dtype for s in segments]
        self._devices = [s.device for s in segments]
        self._shapes = [s.shape for s in segments]
        self._strides = [s.param_stride for s in segments]

    def holds(self) -> bool:
        """Whether nothing changed."""
        params = self._params
        if not all(map(is_, map(dict.get, self._owners, self._keys), self._owned)):
            return False
        addresses = None if self._addresses is None else list(map(Tensor.data_ptr, params))
        if addresses is not None and addresses == self._addresses:
            return True  # what changes a parameter gives it other memory: one pass instead of four
        same = (
            [p.dtype for p in params] == self._dtypes
            and [p.device for p in params] == self._devices
            and [p.shape for p in params] == self._shapes
            and list(map(Tensor.stride, params)) == self._strides
        )
        if same:
            self._addresses = addresses
        return same
