"""Compares the native CPU kernels with plain torch, bit for bit, on the instruction set that ACCUMKERNELS_CPU allows.

A program of its own because the instruction set is chosen once per process; test_native_cpu.py runs it.
"""

from __future__ import annotations

import random as python_random

import torch

from accumkernels.ops import native, reference
from tests.support.backends import (
    BAD,
    BUFFERS,
    FLOATS,
    SIZES,
    Accumulate,
    Backend,
    assert_close_sum,
    assert_same_bits,
    every_pattern,
    place,
    random,
    scalar,
    squares,
)

NATIVE = Backend("native", native, torch.device("cpu"))


def check_random_accumulates(count: int) -> None:
    """Every dtype mixed, odd sizes, unaligned data, values that are not finite, all options."""
    for seed in range(count):
        rng = python_random.Random(seed)
        grads = []
        for i in range(rng.randrange(1, 9)):
            grad = random(rng.choice([0, 70_001, *SIZES]), rng.choice(FLOATS), seed + i, 10.0 ** rng.randrange(-6, 5))
            if grad.numel() and rng.random() < 0.3:
                grad[rng.randrange(grad.numel())] = rng.choice([*BAD, 60000.0])
            grads.append(grad)
        loss_scale = scalar(rng.choice([65536.0, 3.0]), torch.float32)
        kwargs = {"weight": rng.choice([1.0, 0.0, 3.7, 1e30]), "loss_scale": loss_scale}
        if rng.random() < 0.5:
            kwargs["sq_norm"] = squares(1.0)
        if rng.random() < 0.2:
            kwargs["drop"] = scalar(1.0)
        Accumulate(
            grads,
            buffer_dtype=rng.choice(BUFFERS),
            overwrite=[rng.random() < 0.4 for _ in grads],
            alignment=rng.choice([1, 3, 32]),
            shift=rng.randrange(4),
            checked=rng.random() < 0.7,
            kwargs=kwargs,
        ).check(NATIVE)


def check_sums_that_overflow() -> None:
    """Finite gradients onto a buffer near the largest number: FOUND_INF, but no gradient is flagged."""
    for buffer_dtype in BUFFERS:
        largest = torch.finfo(buffer_dtype).max
        call = Accumulate([torch.full((n,), largest, dtype=buffer_dtype) for n in (1, 64, 101)], buffer_dtype)
        call.buffer = torch.full_like(call.buffer, largest)
        assert call.check(NATIVE)["flags"].tolist() == [0, 0, 0]


def check_every_pattern() -> None:
    """All 16-bit inputs through accumulate and scaled_copy, and fp32 values around every 16-bit rounding boundary."""
    for dtype in (torch.float16, torch.bfloat16):
        patterns = every_pattern(dtype)
        for buffer_dtype in BUFFERS:
            Accumulate([patterns], buffer_dtype=buffer_dtype, kwargs={"weight": 0.3}).check(NATIVE)
        finite = patterns.float()
        finite = finite[finite.isfinite()].sort().values
        middle = (finite[1:].double() + finite[:-1].double()) / 2
        boundaries = torch.cat([middle, middle.nextafter(scalar(torch.inf)), middle.nextafter(scalar(-torch.inf))])
        around = boundaries.float()
        inputs = [
            *(patterns, around, around.nextafter(torch.tensor(torch.inf)), around.nextafter(torch.tensor(-torch.inf))),
            *(boundaries, torch.tensor([*BAD, 65519.0, 65520.0, 3.4e38, 1e-45, -0.0])),
        ]
        for out in FLOATS:
            for divisor in (None, scalar(7.0)):
                check_scaled_copy(inputs, [out] * len(inputs), divisor)


def check_scaled_copy(inputs: list[torch.Tensor], dtypes: list[torch.dtype], divisor: torch.Tensor | None) -> None:
    """Outputs unaligned, their neighbours untouched."""
    results = []
    for module in (native, reference):
        storages = [torch.full((x.numel() + 2,), 9.0, dtype=dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
        found_inf = scalar(0.0)
        module.scaled_copy_([s[1:-1] for s in storages], inputs, divisor=divisor, found_inf=found_inf)
        results.append([*storages, found_inf])
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected, "scaled_copy_")


def check_norms_and_copies(count: int) -> None:
    """Random lists through the other ops."""
    for seed in range(count):
        rng = python_random.Random(seed)
        tensors = [
            place(random(rng.choice([0, 70_001, *SIZES]), rng.choice(FLOATS), seed + i), shift=rng.randrange(3))
            for i in range(rng.randrange(6))
        ]
        if tensors and tensors[-1].numel() and seed % 3 == 0:
            tensors[-1][-1] = rng.choice(BAD)
        for order, compare in ((2.0, assert_close_sum), (float("inf"), assert_same_bits)):
            actual, expected = scalar(0.5), scalar(0.5)
            native.norm_(actual, tensors, ord=order)
            reference.norm_(expected, tensors, ord=order)
            compare(actual, expected)
        check_scaled_copy(tensors, [rng.choice(FLOATS) for _ in tensors], scalar(rng.choice([3.0, 0.0, 1e-5])))


def check_products() -> None:
    """Weights' gradients of whole numbers, exact in fp32 in whatever order; the view's neighbours untouched."""
    vectors = native.cpu_instruction_set() != "portable"
    assert native.multiplies(torch.float32) == vectors
    generator = torch.Generator().manual_seed(0)
    few = (1, 1, 1), (6, 64, 2), (7, 65, 3), (49, 15, 129), (5, 24, 0)
    for rows, columns, tokens in (*few, (97, 1040, 260), (384, 70, 5), (1000, 33, 130)):  # over many blocks and chunks
        for dtype in filter(native.multiplies, (torch.float32, torch.bfloat16)):
            grad, input, start = (
                torch.randint(-8, 9, size, generator=generator).double()
                for size in ((tokens, rows), (tokens, columns), (rows, columns))
            )
            for add in (False, True):
                memory = torch.full((rows * columns + 200,), 7.0)
                view = memory[100:-100].view(rows, columns)
                view.copy_(start if add else torch.nan)  # what is overwritten is never read
                native.add_product_(view, grad.to(dtype), input.to(dtype), 0.5, float(add))
                expected = 0.5 * grad.t() @ input + (start if add else 0)
                torch.testing.assert_close(view.double(), expected, rtol=0, atol=0)
                assert (memory[:100] == 7).all() and (memory[-100:] == 7).all()


if __name__ == "__main__":
    check_random_accumulates(60)
    check_sums_that_overflow()
    check_every_pattern()
    check_norms_and_copies(30)
    check_products()
    print(native.cpu_instruction_set())
