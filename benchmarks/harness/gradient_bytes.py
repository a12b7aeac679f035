"""Bytes of whatever holds gradients while a training loop runs that is not ours to look into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .live_storages import LiveStorages


class GradientBytes(LiveStorages):
    """Counts `.grad`s, the gradients that an accumulating op takes, and the flat buffers that it adds to.

    Looked at when a module's backward ends, before and after each call of `torch.ops.accumkernels.accumulate_`, whose
    arguments are gradients and the buffer, and before the optimizer steps. A gradient that waits to be added, wherever
    that may be, counts from its birth: what it was is known when it is added.

    Args:
        model: What is trained.
        counts: Whether what is seen now counts.
    """

    def __init__(self, model: nn.Module, counts: Callable[[], bool]) -> None:
        super().__init__()
        self._model = model
        self._counts = counts
        self._handles: list[Any] = []
        self._born = 0
        self._serials: dict[int, int] = {}  # of the storages alive, by key
        self._gradients: set[int] = set()  # serials
        self._looks: list[dict[int, int]] = []  # at each look, bytes of what was alive, by serial

    @property
    def gradient_peak(self) -> int:
        """The most bytes seen at once, each storage counted once."""
        held = (sum(nbytes for serial, nbytes in look.items() if serial in self._gradients) for look in self._looks)
        return max(held, default=0)

    def __enter__(self) -> GradientBytes:
        # Hooks on modules, since hooks on parameters would keep their gradients from being taken in 16 bit.
        parts = [part for part in self._model.modules() if part is not self._model]
        self._handles = [part.register_full_backward_hook(lambda *_: self._look()) for part in parts]
        self._handles.append(register_optimizer_step_pre_hook(lambda *_: self._look()))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)

    def follow(self, tensor: Tensor) -> int:
        """Give each new storage a number, since addresses are used again."""
        key = super().follow(tensor)
        if key not in self._serials:
            self._serials[key] = self._born
            self._born += 1
        return key

    def forget(self, key: int) -> None:
        """The next one there gets a number of its own."""
        del self._serials[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.accumkernels.accumulate_.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        taken = [given["buffer"], *given["grads"]]
        self._look(taken)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._look(taken)
        return result

    def _look(self, taken: Iterable[Tensor] = ()) -> None:
        if not self._counts():
            return
        for tensor in (*taken, *(p.grad for p in self._model.parameters() if p.grad is not None)):
            self._gradients.add(self._serials[self.follow(tensor)])
        self._looks.append({serial: self.nbytes[key] for key, serial in self._serials.items()})
