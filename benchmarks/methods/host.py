"""The host's time per call: what a training loop's Python thread pays before the device has anything to do."""

from __future__ import annotations

from collections.abc import Callable

import torch

import accumkernels as ak

from ..harness.case import Case
from ..harness.measure import Call
from ..harness.shapes import Shapes
from . import peers

TENSORS = (300, 3000)
ELEMENTS = 64  # of each tensor: few, so that the device never holds up the host
READING = "reading .grad"
ACCUMULATE = "FusedAccumulator.accumulate"
OP = "accumkernels, the op"


def shapes(tensors: int) -> Shapes:
    """So many small tensors."""
    return [(ELEMENTS,)] * tensors


def _with_grads(case: Case) -> tuple[list[torch.nn.Parameter], Call]:
    """Parameters, and what gives them their gradients."""
    params = case.parameters(case.dtype)

    def give() -> None:
        for param, grad in zip(params, case.grads, strict=True):
            param.grad = grad

    return params, give


def reading(case: Case) -> tuple[Call, Call]:
    """Torch's own cost of `param.grad`, which no accumulator of `.grad`s gets around."""
    params, give = _with_grads(case)
    return lambda: [param.grad for param in params], give


def accumulate(case: Case) -> tuple[Call, Call]:
    """The public call: takes `.grad`s, checks, launches, frees."""
    params, give = _with_grads(case)
    return ak.FusedAccumulator(params).accumulate, give


def _peer(name: str) -> Callable[[Case], tuple[Call, Call]]:
    return lambda case: (peers.PEERS[name](case).whole, lambda: None)


# How to set a method up: the call, and what has to happen before each.
METHODS: dict[str, Callable[[Case], tuple[Call, Call]]] = {
    ACCUMULATE: accumulate,
    READING: reading,
    OP: _peer(peers.OURS),
    peers.MIXED: _peer(peers.MIXED),
    peers.FOREACH: _peer(peers.FOREACH),
    peers.KEPT: _peer(peers.KEPT),
    peers.FLAT_GRAD: _peer(peers.FLAT_GRAD),
    peers.MEGATRON: _peer(peers.MEGATRON),
}
