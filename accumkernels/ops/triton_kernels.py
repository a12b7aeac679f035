"""The Triton kernels. `triton.py` launches them, and `reference.py` specifies what they compute.

One program works on one block of `BLOCK` elements of one tensor. `blocks[program]` is the tensor's index in the list,
`rows[index]` has its values that do not change between calls (see the constants), and `table`, int64 `[3 * n + 1]`,
those that do: n addresses, n second addresses (scaled_copy) or zeros, n overwrite flags, and the bits of the weight.

All blocks of a tensor except its last are full and take a path without masks. With `ALIGNED`, the host guarantees
16-byte alignment of every address, so that full blocks are written, and read where nothing is, 128 bits at a time.

bfloat16 values are handled as int16 words: widening is a shift and rounding an addition, both in the compiled kernel
and in Triton's interpreter (whose own conversions truncate and lose subnormal numbers).

Kernels are launched with enable_fp_fusion=False: a product is rounded before it is added, as in the other backends.
"""

# A kernel's branches are not Python's, and only arguments known at compile time have annotations.
# ruff: noqa: SIM102, SIM108, SIM300
# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

# Columns of rows, int64 [n, COLUMNS].
NUMEL = tl.constexpr(0)
OFFSET = tl.constexpr(1)  # of the segment in the flat buffer, in elements
SEGMENT = tl.constexpr(2)
FIRST_BLOCK = tl.constexpr(3)  # the program that has the tensor's first block
COLUMNS = tl.constexpr(4)

# Indices into state: schema.State.
STATE_WEIGHT = tl.constexpr(0)
STATE_FOUND_INF = tl.constexpr(1)
STATE_USED = tl.constexpr(2)
STATE_POISONED = tl.constexpr(3)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def is_bad_weight(weight):
    return (weight < 0) | (tl.abs(weight) == float("inf")) | (weight != weight)


@triton.jit
def widen(x, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Convert values loaded as DTYPE (bfloat16: int16 words) to WIDE, float32 or float64."""
    if DTYPE == tl.bfloat16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(WIDE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round to DTYPE, ties to even. float64 is rounded to 16 bits through float32, as in torch."""
    if DTYPE == tl.float64:
        return x.to(tl.float64)
    elif DTYPE == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def pointer_to(address, start, DTYPE: tl.constexpr, STORED: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to element `start` (a multiple of the block) of the tensor at `address`.

    With ALIGNED, a thread loads as many elements at a time as it stores of STORED in 128 bits, but at most 128 bits: 64
    bits of 16-bit gradients for an fp32 buffer. If loads and stores disagreed, threads would exchange the sums through
    8 KB of shared memory. STORED is DTYPE where nothing is stored.
    """
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16)) + start
    else:
        pointer = address.to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        # Triton takes as many elements at a time as it is told are aligned; the addresses are multiples of 16 bytes.
        loaded: tl.constexpr = DTYPE.primitive_bitwidth
        stored: tl.constexpr = STORED.primitive_bitwidth
        pointer = tl.multiple_of(pointer, 16 * loaded // stored if loaded < stored else 16)
    return pointer


@triton.jit
def locate(blocks, rows, BLOCK: tl.constexpr):
    """The tensor of this program's block, the block's first element and the number of elements from there on."""
    program = tl.program_id(0)
    index = tl.load(blocks + program)
    row = rows + index.to(tl.int64) * COLUMNS
    start = (program - tl.load(row + FIRST_BLOCK)) * BLOCK
    return index, row, start, tl.load(row + NUMEL) - start


@triton.jit
def load_block(pointer, left, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    if MASKED:
        return tl.load(pointer + lanes, mask=lanes < left, other=0)
    return tl.load(pointer + lanes)


@triton.jit
def load_unless(skipped, pointer, left, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The block; if skipped, zeros, without reading it."""
    lanes = tl.arange(0, BLOCK)
    wanted = tl.full((BLOCK,), True, tl.int1) & (skipped == 0)
    if MASKED:
        wanted = wanted & (lanes < left)
    return tl.load(pointer + lanes, mask=wanted, other=0)


@triton.jit
def store_block(pointer, value, left, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    if MASKED:
        tl.store(pointer + lanes, value, mask=lanes < left)
    else:
        tl.store(pointer + lanes, value)


@triton.jit
def any_not_finite(x, left, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    bad = is_finite(x) == 0
    if MASKED:
        bad = bad & (tl.arange(0, BLOCK) < left)
    return tl.max(bad.to(tl.int32), axis=0) != 0


@triton.jit
def accumulate_block(
    main_grad, grad, left, first, weight, scale, state, flags, row, tag, partial, num_partials,
    DTYPE: tl.constexpr, SQ_NORM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = main_grad.dtype.element_ty
    # Both operands are loaded before either is used, or their latencies would add up.
    before = load_unless(first, main_grad, left, BLOCK, MASKED)
    value = load_block(grad, left, BLOCK, MASKED)
    multiplier = weight
    if scale is not None:
        multiplier = weight / scale.to(tl.float64)
    product = widen(value, DTYPE, WIDE) * multiplier.to(WIDE)
    # Not by a -0 to add to, which keeps the sign of zeros: compiled for a GPU, `other=-0.0` of a load becomes 0.
    total = tl.where(first, product, before + product)
    store_block(main_grad, total, left, BLOCK, MASKED)
    if flags is not None:
        if any_not_finite(total, left, BLOCK, MASKED):
            tl.store(state + STATE_FOUND_INF, 1.0)
            tl.store(state + STATE_POISONED, 1.0)
            if any_not_finite(product, left, BLOCK, MASKED):
                tl.store(flags + tl.load(row + SEGMENT), tag)
    if SQ_NORM:
        exact = widen(value, DTYPE, tl.float64)
        tl.store(partial, tl.sum(exact * exact, axis=0))
        total, before = total.to(tl.float64), before.to(tl.float64)
        tl.store(partial + num_partials, tl.sum(total * total - before * before, axis=0))


@triton.jit(do_not_specialize=["n", "partial_base", "num_partials", "tag"])
def accumulate_kernel(
    buffer,  # fp32 or fp64
    state,  # fp64 [4]
    table, blocks, rows, n,
    flags,  # int32 [segments] or None
    tag,
    weight,  # fp64 [1], or None: the weight is in the table
    loss_scale,  # fp32 [1] or None
    drop,  # fp64 [1] or None
    partials,  # fp64 [2, num_partials], two sums per program from partial_base on (see Squares in args.h); or None
    partial_base, num_partials,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program issues all reads from tables before it waits for any of them.
    w = load_weight(table, n, weight)
    scale = None
    if loss_scale is not None:
        scale = tl.load(loss_scale)
    dropped = False
    if drop is not None:
        dropped = tl.load(drop) != 0
    index, row, start, left = locate(blocks, rows, BLOCK)
    address = tl.load(table + index)
    first = tl.load(table + 2 * n + index) != 0
    main_grad = buffer + (tl.load(row + OFFSET) + start)
    if ALIGNED:
        main_grad = tl.multiple_of(main_grad, 16)

    if dropped:
        if first:
            zeros = tl.zeros((BLOCK,), buffer.dtype.element_ty)
            store_block(main_grad, zeros, left, BLOCK, True)
    else:
        grad = pointer_to(address, start, DTYPE, buffer.dtype.element_ty, ALIGNED)
        partial = partials
        if partials is not None:
            partial = partials + partial_base + tl.program_id(0)
        if left >= BLOCK:
            accumulate_block(main_grad, grad, left, first, w, scale, state, flags, row, tag, partial, num_partials,
                             DTYPE, partials is not None, BLOCK, False)  # fmt: skip
        else:
            accumulate_block(main_grad, grad, left, first, w, scale, state, flags, row, tag, partial, num_partials,
                             DTYPE, partials is not None, BLOCK, True)  # fmt: skip


@triton.jit
def load_weight(table, n, weight):
    if weight is None:
        return tl.load(table + 3 * n).to(tl.float64, bitcast=True)
    else:
        return tl.load(weight)


@triton.jit(do_not_specialize=["n", "num_partials"])
def account_kernel(
    state, table, n, weight, loss_scale, drop, sq_norm, partials, num_partials, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the micro-batch's weight to state, and the partial sums, in a fixed order, to sq_norm. One program."""
    w = load_weight(table, n, weight)
    dropped = False
    if drop is not None:
        dropped = tl.load(drop) != 0
    if COUNT:
        bad = is_bad_weight(w)
        if dropped | bad:
            tl.store(state + STATE_FOUND_INF, 1.0)
        if dropped == 0:
            if bad:
                tl.store(state + STATE_POISONED, 1.0)
            else:
                tl.store(state + STATE_WEIGHT, tl.load(state + STATE_WEIGHT) + w)
                tl.store(state + STATE_USED, tl.load(state + STATE_USED) + (w > 0).to(tl.float64))
    if sq_norm is not None:
        if dropped == 0:
            factor = w
            if loss_scale is not None:
                scale = tl.load(loss_scale).to(tl.float64)
                factor = w / (scale * scale)
            tl.store(sq_norm, tl.load(sq_norm) + factor * sum_partials(partials, num_partials, BLOCK))
            growth = sum_partials(partials + num_partials, num_partials, BLOCK)
            tl.store(sq_norm + 1, tl.load(sq_norm + 1) + growth)


@triton.jit
def sum_partials(partials, num_partials, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    start = num_partials * 0  # a loop over range() fails in the interpreter of Triton 3.6 with numpy 2.4
    while start < num_partials:
        sums += tl.load(partials + start + lanes, mask=start + lanes < num_partials, other=0)
        start += BLOCK
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["tag"])
def check_finite_kernel(
    table, blocks, rows, found_inf, flags, tag, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    index, row, start, left = locate(blocks, rows, BLOCK)
    grad = pointer_to(tl.load(table + index), start, DTYPE, DTYPE, ALIGNED)
    if left >= BLOCK:
        bad = any_not_finite(widen_any(load_block(grad, left, BLOCK, False), DTYPE), left, BLOCK, False)
    else:
        bad = any_not_finite(widen_any(load_block(grad, left, BLOCK, True), DTYPE), left, BLOCK, True)
    if bad:
        tl.store(found_inf, 1.0)
        tl.store(flags + tl.load(row + SEGMENT), tag)


@triton.jit
def widen_any(x, DTYPE: tl.constexpr):
    """Keep float64, convert everything else to float32."""
    if DTYPE == tl.float64:
        return x
    else:
        return widen(x, DTYPE, tl.float32)


@triton.jit
def check_weight_kernel(weight, found_inf):
    if is_bad_weight(tl.load(weight)):
        tl.store(found_inf, 1.0)


@triton.jit
def magnitude_bits(x, DTYPE: tl.constexpr):
    """|x| in float64, as an integer; these order as magnitudes do, with NaN the largest."""
    return tl.abs(widen(x, DTYPE, tl.float64)).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["partial_base"])
def norm_kernel(
    table, blocks, rows, partials, partial_base,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, _, start, left = locate(blocks, rows, BLOCK)
    pointer = pointer_to(tl.load(table + index), start, DTYPE, DTYPE, ALIGNED)
    if left >= BLOCK:
        x = load_block(pointer, left, BLOCK, False)
    else:
        x = load_block(pointer, left, BLOCK, True)
    if INF:
        partial = tl.max(magnitude_bits(x, DTYPE), axis=0).to(tl.float64, bitcast=True)
    else:
        exact = widen(x, DTYPE, tl.float64)
        partial = tl.sum(exact * exact, axis=0)
    tl.store(partials + partial_base + tl.program_id(0), partial)


@triton.jit(do_not_specialize=["num_partials"])
def norm_total_kernel(out, partials, num_partials, INF: tl.constexpr, BLOCK: tl.constexpr):
    """Reduces the partial norms, in a fixed order, into out. One program."""
    if INF:
        lanes = tl.arange(0, BLOCK)
        bits = tl.zeros((BLOCK,), tl.int64)
        start = num_partials * 0
        while start < num_partials:
            partial = tl.load(partials + start + lanes, mask=start + lanes < num_partials, other=0)
            bits = tl.maximum(bits, partial.to(tl.int64, bitcast=True))
            start += BLOCK
        largest = tl.max(bits, axis=0).to(tl.float64, bitcast=True)
        before = tl.load(out)
        # Not tl.maximum: its NaN-propagating form is not one instruction for float64.
        if (largest > before) | (largest != largest):
            tl.store(out, largest)
    else:
        tl.store(out, tl.load(out) + sum_partials(partials, num_partials, BLOCK))


@triton.jit
def scaled_copy_block(
    output, input, left, divisor, found_inf,
    OUTPUT: tl.constexpr, INPUT: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if (OUTPUT == tl.float64) | (INPUT == tl.float64):
        value = widen(load_block(input, left, BLOCK, MASKED), INPUT, tl.float64)
        if divisor is not None:
            value = value / divisor
    else:
        value = widen(load_block(input, left, BLOCK, MASKED), INPUT, tl.float32)
        if divisor is not None:
            value = tl.div_rn(value, divisor.to(tl.float32))
    value = narrow(value, OUTPUT)
    store_block(output, value, left, BLOCK, MASKED)
    if found_inf is not None:
        if any_not_finite(widen_any(value, OUTPUT), left, BLOCK, MASKED):
            tl.store(found_inf, 1.0)


@triton.jit(do_not_specialize=["n"])
def scaled_copy_kernel(
    table, blocks, rows, n,
    divisor,  # fp64 [1] or None
    found_inf,  # fp64 [1] or None
    OUTPUT: tl.constexpr, INPUT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = None
    if divisor is not None:
        d = tl.load(divisor)
    index, _, start, left = locate(blocks, rows, BLOCK)
    input = pointer_to(tl.load(table + index), start, INPUT, OUTPUT, ALIGNED)
    output = pointer_to(tl.load(table + n + index), start, OUTPUT, OUTPUT, ALIGNED)
    if left >= BLOCK:
        scaled_copy_block(output, input, left, d, found_inf, OUTPUT, INPUT, BLOCK, False)
    else:
        scaled_copy_block(output, input, left, d, found_inf, OUTPUT, INPUT, BLOCK, True)


@triton.jit
def decide_kernel(verdict, single, state, divisor, norm, max_norm, overflow):
    """The stored values, and the state, are in the order of `VerdictField` and `State` in schema.py."""
    weight = tl.load(state)
    no_weight = weight == 0.0
    divide_by = weight if divisor is None else tl.load(divisor)
    in_fp32 = divide_by.to(tl.float32)
    bad = (in_fp32 > 0.0) & is_finite(in_fp32)
    bad = bad == 0
    if divisor is None:
        bad = bad & (weight != 0.0)
    skip = (tl.load(state + 3) > 0.0) | bad | no_weight
    found_inf = (tl.load(state + 1) > 0.0) | bad
    empty = no_weight & (found_inf == 0)
    divide_by = tl.where(skip, 1.0, divide_by)
    if overflow is not None:
        late = (tl.load(overflow) != 0.0) & (empty == 0)
        skip = skip | late
        found_inf = found_inf | late

    mean_norm = divide_by * 0.0 if norm is None else tl.load(norm) / divide_by
    limit = divide_by * 0.0 + float("inf") if max_norm is None else tl.load(max_norm)
    coefficient = limit / (mean_norm + 1e-6)
    coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)
    store_both(verdict, single, 0, divide_by * 0.0 + 1.0)
    store_both(verdict, single, 1, skip.to(tl.float64))
    store_both(verdict, single, 2, found_inf.to(tl.float64))
    store_both(verdict, single, 3, empty.to(tl.float64))
    store_both(verdict, single, 4, divide_by)
    store_both(verdict, single, 5, mean_norm)
    store_both(verdict, single, 6, coefficient)
    store_both(verdict, single, 7, divide_by / coefficient)
    store_both(verdict, single, 8, weight)
    store_both(verdict, single, 9, tl.load(state + 2))


@triton.jit
def store_both(exact, single, index, value):
    tl.store(exact + index, value)
    tl.store(single + index, value.to(tl.float32))
