"""Records op by op how a module's forward uses its parameters, which the autocast route learns from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_to_copy = torch.ops.aten._to_copy.default


class CastRecorder(TorchDispatchMode):
    """Records which parameters a forward reads, and which it reads only through a cast to 16 bits.

    Args:
        own: ids of the running module's parameters.
        others: ids of parameters to note in `elsewhere` if they are used outside of their own modules.
        at_home: ids of the parameters of every running module.
        casts: (address, shape) of a cast that autocast may serve again from its cache: id of the parameter.
        dtype: Autocast's dtype.
    """

    def __init__(
        self,
        own: set[int],
        others: set[int],
        at_home: list[set[int]],
        casts: dict[tuple[int, torch.Size], int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.cast: set[int] = set()
        self.direct: set[int] = set()
        self.elsewhere: set[int] = set()
        self.own = own
        self.dtype = dtype
        self._others = others
        self._at_home = at_home
        self._casts = casts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, Tensor):
                continue
            param = id(tensor)
            casts = func is _to_copy and result.dtype == self.dtype
            if casts and (param in self.own or param in self._others):
                self._casts[result.data_ptr(), result.shape] = param
            elif not casts and tensor.dtype == self.dtype and tensor.numel():
                param = self._casts.get((tensor.data_ptr(), tensor.shape), 0)
                casts = True
            if param in self.own:
                (self.cast if casts else self.direct).add(param)
            if param in self._others and not any(param in own for own in self._at_home):
                self.elsewhere.add(param)
        return result
