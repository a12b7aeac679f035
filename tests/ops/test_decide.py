"""decide_ on every backend: the bits of plain torch, and what the verdict means, worked out by hand."""

import itertools
import math

import pytest
import torch

from accumkernels.ops import reference
from accumkernels.ops.schema import State, VerdictField
from tests.support.backends import assert_same_bits, compared, on_every_backend, scalar

VALUES = (0.0, 3.0, 0.1, 1e-50, 1e300, math.inf, math.nan, -1.0)
LIMITS = (None, math.inf, 0.0, 0.1, 1e-9)


def decided(backend, state, **kwargs):
    """The verdict in fp64, and in fp32."""
    verdict = torch.full((len(VerdictField),), math.nan, dtype=torch.float64, device=backend.device)
    single = torch.full((len(VerdictField),), math.nan, device=backend.device)
    moved = {name: v.to(backend.device) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    state = torch.tensor([float(state.get(key, 0)) for key in State], dtype=torch.float64, device=backend.device)
    backend.module.decide_(verdict, single, state, **moved)
    return verdict.cpu(), single.cpu()


class Reference:
    """Plain torch on the CPU."""

    module = reference
    device = torch.device("cpu")


@compared
def test_same_bits_as_plain_torch(backend):
    """Every combination of weight, flags, divisor, norm, limit and overflow."""
    flags = [{}, {State.FOUND_INF: 1}, {State.FOUND_INF: 1, State.POISONED: 1}]
    for weight, flag in itertools.product(VALUES, flags):
        state = {State.WEIGHT: weight, State.USED: 2, **flag}
        for divisor, norm, limit in itertools.product((None, *VALUES), (None, 7.0, math.nan), LIMITS):
            for overflow in (None, 0.0, 1.0):
                given = {"divisor": divisor, "norm": norm, "max_norm": limit, "overflow": overflow}
                kwargs = {name: None if value is None else scalar(value) for name, value in given.items()}
                actual, expected = decided(backend, state, **kwargs), decided(Reference, state, **kwargs)
                assert_same_bits(actual[0], expected[0], f"{state} {given}")
                assert_same_bits(actual[1], expected[1], f"{state} {given}")
        if getattr(backend, "slow", False):
            break  # one weight: an interpreter runs the kernel


@on_every_backend
@pytest.mark.parametrize(
    ("state", "kwargs", "expected"),
    [
        ({State.WEIGHT: 4}, {}, {"SKIP": 0, "FOUND_INF": 0, "EMPTY": 0, "DIVISOR": 4, "NORM": 0, "DIVIDE_BY": 4}),
        ({}, {}, {"SKIP": 1, "FOUND_INF": 0, "EMPTY": 1, "DIVISOR": 1}),
        ({State.FOUND_INF: 1}, {}, {"SKIP": 1, "FOUND_INF": 1, "EMPTY": 0, "DIVISOR": 1}),
        ({State.WEIGHT: 4, State.FOUND_INF: 1}, {}, {"SKIP": 0, "FOUND_INF": 1, "DIVISOR": 4}),
        ({State.WEIGHT: 4, State.FOUND_INF: 1, State.POISONED: 1}, {}, {"SKIP": 1, "FOUND_INF": 1, "DIVISOR": 1}),
        ({State.WEIGHT: 4}, {"divisor": 8.0}, {"SKIP": 0, "DIVISOR": 8}),
        ({State.WEIGHT: 4}, {"divisor": 0.0}, {"SKIP": 1, "FOUND_INF": 1, "DIVISOR": 1}),
        ({State.WEIGHT: 4}, {"divisor": 1e-50}, {"SKIP": 1, "FOUND_INF": 1, "DIVISOR": 1}),
        ({State.WEIGHT: 0}, {"divisor": 8.0}, {"SKIP": 1, "FOUND_INF": 0, "EMPTY": 1}),
        ({State.WEIGHT: 4}, {"overflow": 1.0}, {"SKIP": 1, "FOUND_INF": 1, "DIVISOR": 4}),
        ({}, {"overflow": 1.0}, {"SKIP": 1, "FOUND_INF": 0, "EMPTY": 1}),
        ({State.WEIGHT: 4}, {"norm": 12.0, "max_norm": 1.0}, {"NORM": 3, "COEFFICIENT": 1 / (3 + 1e-6)}),
        ({State.WEIGHT: 4}, {"norm": 12.0, "max_norm": 5.0}, {"NORM": 3, "COEFFICIENT": 1, "DIVIDE_BY": 4}),
        ({State.WEIGHT: 4}, {"norm": 12.0, "max_norm": 0.0}, {"COEFFICIENT": 0, "DIVIDE_BY": math.inf}),
        ({State.WEIGHT: 4, State.USED: 3}, {}, {"ENDED": 1, "WEIGHT": 4, "USED": 3}),
    ],
    ids=str,
)
def test_meaning(backend, state, kwargs, expected):
    """A skipped window is divided by 1; an empty one leaves the scale; a bad divisor overflows; clipping is torch's."""
    verdict, single = decided(backend, state, **{name: scalar(value) for name, value in kwargs.items()})
    for name, value in expected.items():
        assert verdict[VerdictField[name]].item() == value
        assert single[VerdictField[name]].item() == torch.tensor(value, dtype=torch.float32).item()
