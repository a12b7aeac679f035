"""Trains without memory, on copies of model and optimizer made of fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from ...snapshots import RandomState
from ...splitting.live_bytes import LiveBytes


class FakeDevice:
    """A device that holds only shapes.

    Args:
        device: The device to stand in for. If torch has no CUDA, autograd of fake CUDA tensors crashes the process, so
            the fakes are then CPU tensors, as they are for any other missing device.

    Attributes:
        device: The device of the fakes.
        mode: The FakeTensorMode to run them in.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device = device if cuda and torch.cuda.is_available() else torch.device("cpu")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._foreach = cuda  # torch.optim's own choice for real CUDA parameters

    def copy(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Copy both with fake parameters, buffers and states. Ties are kept, and no value is read."""
        memo: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = self._fake(tensor)
        states = torch.utils._pytree.tree_leaves(list(optimizer.state.values()))
        groups = torch.utils._pytree.tree_leaves(optimizer.param_groups)
        for tensor in (leaf for leaf in (*states, *groups) if isinstance(leaf, Tensor) and id(leaf) not in memo):
            memo[id(tensor)] = self._fake(tensor)
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Generator):  # deepcopy cannot copy it
                    memo[id(value)] = value.clone_state()
        model, optimizer = copy.deepcopy((model, optimizer), memo)
        for group in optimizer.param_groups:
            if self._foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        return model, optimizer

    def _fake(self, tensor: Tensor) -> Tensor:
        # A step counter is a 0-d CPU tensor wherever its parameter is.
        device = tensor.device if tensor.dim() == 0 and tensor.device.type == "cpu" else self.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake

    @contextmanager
    def unchanged_random_state(self) -> Iterator[None]:
        """Restore the random generators afterwards: batches may be made with real ones."""
        state = RandomState()
        try:
            yield
        finally:
            state.restore()


class LiveFakeBytes(LiveBytes):
    """Counts fake tensors, and supplies what only real tensors know.

    A number read from a fake tensor is 1; a missing device is replaced by the fakes'.
    """

    def __init__(self, device: torch.device, granularity: int) -> None:
        super().__init__(granularity=granularity)
        self._device = device

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op on fakes."""
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta", self._device.type):
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **kwargs)
