"""Measures the time that a loop spends on gradients, between the layers and the optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Nodes that a gradient may pass between a layer's own backward and its sum: autocast's cast back to the parameter's
# dtype, or FusedAccumulator's replacement for it.
WIDENING = ("ToCopyBackward0", "_TakeBackward")


def _handling_nodes(loss: Tensor) -> list[Node]:
    """The nodes in the graph of `loss` that only bring gradients from layers into sums."""
    found: dict[Node, None] = {}
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting.extend(following for following, _ in node.next_functions)

    def handles(node: Node) -> bool:
        if node.name() not in WIDENING:
            return node.name() == ACCUMULATE_GRAD
        return all(following is None or following.name() == ACCUMULATE_GRAD for following, _ in node.next_functions)

    return list(filter(handles, found))


class Clock:
    """Adds up the seconds spent inside `with clock:`, device included. Off unless `running` is set."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.running = False
        self.seconds = 0.0

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __enter__(self) -> None:
        if self.running:
            self.seconds -= self._now()

    def __exit__(self, *exception: object) -> None:
        if self.running:
            self.seconds += self._now()

    @contextmanager
    def during_backward(self, loss: Tensor) -> Iterator[None]:
        """Count the time that a backward of `loss` spends on gradients once layers have computed them.

        That is the time of the nodes that bring them into sums, and of what follows autograd until the call inside
        returns.
        """
        if not self.running:
            yield
            return

        def start(*_: Any) -> None:
            self.__enter__()

        def stop(*_: Any) -> None:
            self.__exit__()

        def start_after_autograd(_: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(start)

        with ExitStack() as hooks:
            for node in _handling_nodes(loss):
                hooks.callback(node.register_prehook(start).remove)
                hooks.callback(node.register_hook(stop).remove)
            hooks.callback(loss.register_hook(start_after_autograd).remove)
            yield
            stop()
