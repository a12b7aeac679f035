"""The backends that work on this machine, and what tests of ops share: arguments of a call, and bitwise comparison.

`BACKENDS` are parameters for `pytest.mark.parametrize("backend", ...)`; those of a GPU carry the marker `gpu`.
`COMPARED` leaves out plain torch on the CPU, to which the others are compared, `VALIDATING` plain torch, which checks
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from accumkernels.ops import native, reference, triton

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BUFFERS = (torch.float32, torch.float64)
# Around the widths of vectors (4 to 64 elements), of chunks per thread and of Triton's blocks (4096).
SIZES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 8191, 8195]
BAD = [math.inf, -math.inf, math.nan]
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_id(dtype: torch.dtype) -> str:
    """A short name for a test's id."""
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Backend:
    """A module of ops and the device it is tested on."""

    name: str
    module: ModuleType
    device: torch.device

    @property
    def slow(self) -> bool:
        """Whether an interpreter runs the kernels, so that large inputs take too long."""
        return self.name == "triton" and self.device.type == "cpu"


def _available() -> list[Backend]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found = []
    for device in devices:
        found.append(Backend("reference", reference, device))
        found += [
            Backend(name, module, device)
            for name, module in (("native", native), ("triton", triton))
            if module.unavailable(device) is None
        ]
    return found


def _parameter(backend: Backend) -> Any:
    marks = [pytest.mark.gpu] if backend.device.type == "cuda" else []
    return pytest.param(backend, id=f"{backend.name}-{backend.device.type}", marks=marks)


_ALL = _available()
BACKENDS = [_parameter(b) for b in _ALL]
COMPARED = [_parameter(b) for b in _ALL if (b.name, b.device.type) != ("reference", "cpu")]
VALIDATING = [_parameter(b) for b in _ALL if b.name != "reference"]

on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
compared = pytest.mark.parametrize("backend", COMPARED)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
every_bad_value = pytest.mark.parametrize("bad", BAD, ids=str)


def place(tensor: Tensor, device: torch.device | str = "cpu", shift: int = 0) -> Tensor:
    """A copy of a dense tensor with the same strides, `shift` elements behind an aligned address."""
    storage = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=device)
    return storage.as_strided(tensor.shape, tensor.stride(), shift).copy_(tensor)


def random(shape: int | Sequence[int], dtype: torch.dtype, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Normally distributed values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * magnitude).to(dtype)


def one_bad(dtype: torch.dtype, bad: float, position: int) -> list[Tensor]:
    """Three gradients, the second one with a value that is not finite; 4096 is the edge of a block, 5000 in a tail."""
    grads = [random(n, dtype) for n in (5, 5001, 6)]
    grads[1][position] = bad
    return grads


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns of a 16-bit format."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A one-element tensor, as ops take their device scalars."""
    return torch.tensor([value], dtype=dtype)


def squares(value: float = 0.0) -> Tensor:
    """An `sq_norm` that holds something already."""
    return torch.tensor([value, 2 * value], dtype=torch.float64)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether all bits agree; one NaN is as good as another."""
    actual = actual.cpu()
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.dtype.is_floating_point:
        nan = expected.isnan()
        if not torch.equal(actual.isnan(), nan):
            return False
        integer = INTEGER_OF_SIZE[actual.element_size()]
        actual, expected = (t.contiguous().masked_fill(nan, 0).view(integer) for t in (actual, expected))
    return torch.equal(actual, expected)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Fail with the places that differ."""
    if not same_bits(actual, expected):
        actual = actual.cpu()
        differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
        where = differs.nonzero()[:5].tolist()
        pytest.fail(f"{what}: {int(differs.sum())} of {expected.numel()} differ, at {where}:\n{actual}\n{expected}")


@dataclasses.dataclass
class Accumulate:
    """The arguments of one `accumulate_`, on the CPU.

    Segments lie in the order of their numbers, with gaps between them; the buffer is full of values, which must not
    change where no gradient goes.
    """

    grads: list[Tensor]
    buffer_dtype: torch.dtype = torch.float32
    segments: list[int] | None = None
    overwrite: list[bool] | None = None
    alignment: int = 32
    shift: int = 0  # elements by which each gradient is off its alignment
    buffer: Tensor | None = None
    state: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    checked: bool = True
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay out the segments."""
        count = len(self.grads)
        self.segments = list(range(count)) if self.segments is None else self.segments
        self.overwrite = [False] * count if self.overwrite is None else self.overwrite
        numels = dict(zip(self.segments, (grad.numel() for grad in self.grads), strict=True))
        rows, end = [], self.alignment
        for segment in range(max(self.segments, default=-1) + 1):
            rows.append((end, numels.get(segment, 5)))
            end += -(-rows[-1][1] // self.alignment) * self.alignment + self.alignment
        self.layout = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        if self.buffer is None:
            self.buffer = random(end, self.buffer_dtype, seed=99)

    def segment(self, buffer: Tensor, index: int) -> Tensor:
        """The part of `buffer` that belongs to segment `index`."""
        offset, numel = self.layout[index].tolist()
        return buffer[offset : offset + numel]

    def run(self, module: ModuleType, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Call the op on copies. Returns what it may have changed."""
        assert self.buffer is not None
        kwargs = {k: v.to(device).clone() if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        if self.checked:
            kwargs["flags"] = torch.zeros(len(self.layout), dtype=torch.int32, device=device)
        result = {
            "buffer": place(self.buffer, device),
            "state": torch.tensor(self.state, dtype=torch.float64, device=device),
            **{name: kwargs[name] for name in ("flags", "sq_norm") if name in kwargs},
        }
        grads = [place(grad, device, self.shift) for grad in self.grads]
        module.accumulate_(
            result["buffer"],
            result["state"],
            grads,
            self.segments,
            self.overwrite,
            self.layout.to(device),
            self.layout,
            **kwargs,
        )
        return {name: tensor.cpu() for name, tensor in result.items()}

    def check(self, backend: Backend) -> dict[str, Tensor]:
        """Assert that `backend` does to the last bit what the reference does. Returns what it did."""
        expected = self.run(reference)
        actual = self.run(backend.module, backend.device)
        for name, tensor in expected.items():
            if name == "sq_norm":
                assert_close_sum(actual[name][0], tensor[0])
                assert_close_growth(actual[name][1], tensor[1], [self.buffer, expected["buffer"]])
            else:
                assert_same_bits(actual[name], tensor, name)
        return actual


# Backends add the same fp64 terms in different orders: for the up to 1e5 non-negative terms of these tests the error is
# below 1e5 * 2**-53 = 1.1e-11 in the worst case, and some sqrt(1e5) * 2**-53 = 3.5e-14 as rounding errors cancel.
SUM_RTOL = 1e-12


def assert_close_sum(actual: Tensor, expected: Tensor) -> None:
    """Compare fp64 sums of squares."""
    torch.testing.assert_close(actual.cpu(), expected, rtol=SUM_RTOL, atol=0, equal_nan=True)


def assert_close_growth(actual: Tensor, expected: Tensor, buffers: Sequence[Tensor]) -> None:
    """Compare fp64 sums of differences of squares: the error is relative to the squares, which may cancel.

    What is not finite may be an infinity or NaN: a multiplier that is not finite makes NaN of padding.
    """
    assert bool(actual.isfinite()) == bool(expected.isfinite())
    if expected.isfinite():
        terms = sum(float(buffer.double().square().nansum()) for buffer in buffers)
        torch.testing.assert_close(actual.cpu(), expected, rtol=SUM_RTOL, atol=SUM_RTOL * terms)
