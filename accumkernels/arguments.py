"""Checks of what users pass: options, and weights, divisors and limits that may be scalars on a device."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from .buffers.parameters import move
from .errors import expect, one_of, short, wrong_type

Overflow = Literal["window", "microbatch", "raise"]
Release = Literal["auto", "microbatch", "backward"]
Fusion = Literal["auto", "deferred"]

OVERFLOW: tuple[str | None, ...] = (None, *get_args(Overflow))
RELEASE: tuple[str, ...] = get_args(Release)
COMM_DTYPES = (torch.float32, torch.bfloat16, "auto")

_BY_WINDOWS = (
    "a window ends where acc.step(optimizer) is called; "
    "write `for window in acc.windows(loader, {value})`, and in it `for x, y in window`"
)
_BY_STEP = "write acc.step(optimizer, max_norm={value})"
_ELSEWHERE = {  # what other libraries' constructors take, and what ours took, by name
    **dict.fromkeys(
        (
            "accumulation_steps",
            "gradient_accumulation_steps",
            "grad_accumulation_steps",
            "accumulate_grad_batches",
            "num_accumulation_steps",
            "steps",
            "num_steps",
        ),
        _BY_WINDOWS,
    ),
    **dict.fromkeys(("max_norm", "max_grad_norm", "clip_grad_norm", "gradient_clip_val"), _BY_STEP),
    **dict.fromkeys(("optimizer", "optimizers"), "pass optimizers to acc.step(optimizer)"),
    "weight": "write acc.backward(loss, weight={value})",
    "divisor": "write acc.step(optimizer, divisor={value})",
    "autocast_route": "acc.backward takes 16-bit gradients from the graph of each backward, and leaves the model alone",
}


def refuse_unknown(given: Mapping[str, object], known: Iterable[str]) -> NoReturn:
    """Refuse options that FusedAccumulator does not have, and say where theirs is.

    Raises:
        TypeError: names the first, its value, and what to write instead.
    """
    name, value = next(iter(given.items()))
    said = short(value)
    near = difflib.get_close_matches(name, list(known), 1)
    meant = f"; is it {near[0]!r}?" if near else "; help(accumkernels.FusedAccumulator) lists them"
    instead = f": {_ELSEWHERE[name].format(value=said)}" if name in _ELSEWHERE else meant
    raise TypeError(f"FusedAccumulator() has no option {name}={said}{instead}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """FusedAccumulator's options that do not depend on the parameters themselves, checked.

    Attributes:
        in_trainer: Whether a trainer runs the loop: with `release="backward"`, gradients of the user's own backwards
            stay in `.grad` then, since nobody knows by that time what the trainer divides its losses by.
        make_notes: See `Window.notes`.

    Raises:
        TypeError, ValueError: Names the argument, its value and what is accepted.
    """

    scaler: torch.amp.GradScaler | None = None
    overflow: Overflow | None = "window"
    release: Release = "auto"
    bucket_bytes: Any = None  # an int, once checked
    master_weights: bool = False
    noise_scale: bool | float = False
    cache_casts: bool = False
    cpu_offload: bool = False
    fuse_weight_gradients: Fusion | bool = "auto"
    backend: str = "auto"
    comm_dtype: torch.dtype | Literal["auto"] = torch.float32
    memory_limit: Any = None  # an int, once checked
    in_trainer: bool = False
    make_notes: Callable[[], Any] = type(None)

    def __post_init__(self) -> None:
        scaler = expect(self.scaler, torch.amp.GradScaler | None, "scaler", "a torch.amp.GradScaler or None")
        if scaler is not None and not scaler.is_enabled():
            object.__setattr__(self, "scaler", None)
        one_of(self.overflow, "overflow", OVERFLOW)
        one_of(self.release, "release", RELEASE)
        if self.bucket_bytes is not None:
            object.__setattr__(self, "bucket_bytes", as_bytes(self.bucket_bytes, "bucket_bytes"))
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", as_bytes(self.memory_limit, "memory_limit", of_a_device=True))

        noise_scale = expect(self.noise_scale, Real, "noise_scale", "a bool or a number of windows")
        if not (isinstance(noise_scale, bool) or 0 < noise_scale < math.inf):
            raise ValueError(f"noise_scale must be True, False or a positive half-life in windows, got {noise_scale!r}")

        if self.release == "backward" and self.overflow in ("microbatch", "raise"):
            raise ValueError(
                f"overflow={self.overflow!r} needs release='microbatch' or 'auto': whether a micro-batch is used is "
                "known only when all of its gradients are there"
            )
        for name in ("master_weights", "cache_casts", "cpu_offload"):
            expect(getattr(self, name), bool, name, "a bool")
        if self.fuse_weight_gradients not in ("auto", "deferred") and not isinstance(self.fuse_weight_gradients, bool):
            raise ValueError(
                f"fuse_weight_gradients must be 'auto', 'deferred', True or False, got {self.fuse_weight_gradients!r}"
            )
        if self.cpu_offload and self.fuse_weight_gradients in (True, "deferred"):
            raise ValueError(
                f"fuse_weight_gradients={self.fuse_weight_gradients!r} with cpu_offload=True: products would be made "
                "where the sums are, on the CPU, while each gradient has to cross the bus in any case; leave it out"
            )
        if self.comm_dtype not in COMM_DTYPES:
            raise ValueError(f"comm_dtype must be one of {', '.join(map(str, COMM_DTYPES))}, got {self.comm_dtype!r}")

    @property
    def resolved_release(self) -> str:
        """How gradients are released: where a micro-batch may be dropped, all of it has to be there first.

        With `cpu_offload` all of it is there, in host memory, before any of it is added.
        """
        whole = self.overflow in ("microbatch", "raise") and not self.cpu_offload
        return "microbatch" if whole else self.release


@dataclass(frozen=True, kw_only=True)
class Split:
    """How `FusedAccumulator.backward_batch` splits a batch, which says what each argument is; checked.

    Raises:
        TypeError, ValueError: Names the argument, its value and what is accepted.
    """

    micro_batch: int | Literal["auto"] = "auto"
    cost: Any = None
    budget: float | None = None
    collate: Callable[[list[Any]], Any] | None = None
    weight: Callable[[Any], float | Tensor] | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        for name, expected in (("micro_batch", "'auto' or a number of samples"), ("multiple_of", "an int")):
            value = getattr(self, name)
            if name == "multiple_of" or value != "auto":
                object.__setattr__(self, name, number := as_int(value, name, expected))
                if number < 1:
                    raise ValueError(f"{name} must be positive, got {number}")
        budget = expect(self.budget, Real | None, "budget", "a number or None", but=bool)
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError(f"budget must be positive and finite, got {budget}")

    @property
    def most(self) -> int | None:
        """The most samples of a micro-batch, if there is such a limit."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    @property
    def is_automatic(self) -> bool:
        """Whether only memory limits micro-batches."""
        return self.most is None and self.budget is None


def as_int(value: Any, name: str, expected: str = "an int") -> int:
    """Return `value` as an int. It may be anything with `__index__`, as NumPy's, except a bool or a tensor of one.

    Raises:
        TypeError: names the argument and its value.
    """
    try:
        is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)
        number = None if is_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise wrong_type(name, expected, value)
    return int(number)  # not a subclass of int


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SMALLEST = 2**20  # bytes of a device that a number without a unit may mean; 12 is rather meant as GiB


def as_bytes(value: object, name: str, *, of_a_device: bool = False) -> int:
    """Check a number of bytes given by the user.

    Args:
        value: An int, or a string with a unit, all of which are powers of 1024: "10GiB", "512 MiB", "1.5 GB", "800 B".
        name: The argument's name in an error.
        of_a_device: Whether it is a device's memory: below 1 MiB, a number must have its unit.

    Raises:
        TypeError: `value` is neither.
        ValueError: `value` is not positive, has no known unit, or lacks one.
    """
    number, unit = value, ""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(|B|[KMGT]i?B?)", value.strip(), re.IGNORECASE)
        if found is None:
            raise ValueError(f"{name} is not a number of bytes: {value!r} (write '8GiB', '512 MiB' or '800 B')")
        unit = found[2].upper()
        number = int(float(found[1]) * _UNITS[unit.rstrip("IB")])
    nbytes = as_int(number, name)
    if nbytes <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    if of_a_device and not unit and nbytes < _SMALLEST:
        raise ValueError(
            f"{name}={value!r} is less than a mebibyte: add the unit that is meant, such as '{nbytes} GiB', "
            f"'{nbytes} MiB' or, for bytes, '{nbytes} B'"
        )
    return nbytes


def as_scalar(
    value: object, name: str, device: torch.device, *, allow_zero: bool = True, allow_inf: bool = False
) -> float | Tensor:
    """Check a number given by the user.

    Args:
        value: int, float or 0-d tensor. A tensor on the CPU is read; one on another device never is.
        name: The argument's name in an error.
        device: The device of the result, if it is a tensor.
        allow_zero: Whether 0 is allowed.
        allow_inf: Whether positive infinity is allowed.

    Returns:
        A Python float that passed the check, or an fp64 0-d tensor on `device` that has yet to be checked there.

    Raises:
        TypeError: `value` is not a real number.
        ValueError: `value` is a vector, or on the host and negative, not finite, or zero without `allow_zero`.
    """
    if type(value) is float and 0 < value < math.inf:  # nearly always
        return value
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        if value.is_complex() or value.dtype is torch.bool:
            raise wrong_type(name, "a real number", value)
        if value.requires_grad:
            raise ValueError(f"{name} must not require a gradient, got a tensor that does; is it the loss?")
        if value.is_meta and device.type != "meta":
            raise ValueError(f"{name} must have a value, got a tensor on the meta device")
        if value.device.type != "cpu":
            return move(value.detach(), device, torch.float64)
        value = value.item()
    if not isinstance(value, Real):
        raise wrong_type(name, "a number or a 0-d tensor", value)
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {len(str(value))} digits") from None
    in_range = number >= 0 if allow_zero else number > 0  # false for nan
    if not in_range or (math.isinf(number) and not allow_inf):
        kind = "non-negative" if allow_zero else "positive"
        raise ValueError(f"{name} must be {kind}{'' if allow_inf else ' and finite'}, got {number}")
    return number
