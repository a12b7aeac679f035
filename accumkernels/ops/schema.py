"""Schemas of `torch.ops.accumkernels.*`, the only place where their arguments are declared.

Shared by all ops:

* lists of tensors may be empty, hold zero-element tensors and mix fp16, bf16, fp32 and fp64; every tensor is non-
  overlapping and dense, and its elements are taken in memory order;
* scalars that live on the device are one-element tensors: `loss_scale` fp32 (as in `torch.amp.GradScaler`), all
  others fp64; a flag is exactly 0.0 or 1.0;
* an op returns nothing and reads nothing back, so it never waits for the device.

`accumulate_` adds `gradient * (weight / loss_scale)` into the flat `buffer` (fp32 or fp64). `layout` is int64
`[segments, 2]` on the buffer's device, a row is (offset, numel) in elements; `layout_host` is the same on the CPU.
`segments[i]` is the row of `grads[i]`, distinct within a call; without `segments`, gradients take rows 0, 1, 2, ...
`overwrite[i]`, or its only element for all, says that this is the segment's first gradient in the window, which is
stored instead of added. With `contiguous`, a gradient whose memory order is not its index order is an error, raised
before anything is done. The multiplier is computed in fp64 and rounded once to the buffer's dtype; the gradient is
converted to the buffer's dtype, multiplied, and added, each rounded by itself (no fused multiply-add), so that all
backends agree bit for bit. `state` is fp64 `[4]`, see `State`. With `flags` (int32 `[segments]`) values are checked. If
a product is not finite, `flags[segment] = tag`, and FOUND_INF and POISONED become 1. If only the sum is not finite
(because finite terms overflowed, or an earlier micro-batch was not finite), only FOUND_INF and POISONED become 1.
`weight_tensor` replaces `weight`. If `drop` is not 0, the micro-batch only sets FOUND_INF, except that a dropped first
touch stores zeros. `sq_norm` (fp64 `[2]`) receives in [0] `+= weight * sum((gradient / loss_scale)**2)` over the list,
and in [1] `+= sum(after**2 - before**2)` over the elements touched (`before` is 0 at a first touch), which is the
growth of the squared norm of the window's sum. Both are summed in fp64 in a fixed order. With `count`, the weight is
added to `state`, once per micro-batch and device. A weight that is negative or not finite is not added: it sets
FOUND_INF and POISONED.

`check_finite_` sets `found_inf` to 1 and `flags[segments[i]] = tag` if `grads[i]` holds a value that is not finite
(`segments` as in `accumulate_`), and `found_inf` to 1 if `weight_tensor` is negative or not finite.

`norm_` adds the sum of squares of all elements to `out` (`ord=2`), or raises `out` to their largest magnitude
(`ord=inf`; NaN wins). It is deterministic: the order of summation depends on the sizes alone.

`scaled_copy_` stores `inputs[i] / divisor` in `outputs[i]`, computed in fp32 (fp64 if either is fp64) and rounded to
the output's dtype (fp64 is rounded to 16 bits through fp32, as in torch); `found_inf` becomes 1 if an output is not
finite.

`decide_` decides how a window with this `state` ends, and writes that into `verdict` (fp64 `[10]`, see `VerdictField`)
and, rounded to fp32, into `single`. `divisor` replaces the sum of weights; a divisor that is not positive and finite in
fp32 counts as overflow. `norm` is the norm of the sums, and `max_norm` clips their average, by the formula of
`torch.nn.utils.clip_grad_norm_`. If `overflow` is not 0, a sum is not finite, which the state does not show; it is
ignored in a window without weight.
"""

import enum

import torch


class State(enum.IntEnum):
    """Indices into the state tensor (fp64 `[4]`) of an accumulator; csrc/core/args.h has the same."""

    WEIGHT = 0  # sum of the weights of the micro-batches used
    FOUND_INF = 1  # 1.0 once any gradient or weight was not finite
    USED = 2  # micro-batches used: not dropped, weight > 0
    POISONED = 3  # 1.0 once a buffer may hold a value that is not finite: the step must be skipped


class VerdictField(enum.IntEnum):
    """Indices into what `decide_` writes; csrc/core/args.h has the same."""

    ENDED = 0  # 1.0: the number of windows that this verdict is for
    SKIP = 1  # 1.0 if the step must not happen
    FOUND_INF = 2  # 1.0 if the loss scale must back off
    EMPTY = 3  # 1.0 if nothing was accumulated and nothing overflowed: the scale stays as it is
    DIVISOR = 4  # of the sums; 1 in a skipped window, since fused optimizers still compute with it
    NORM = 5  # of the average, before clipping; 0 if no norm is given
    COEFFICIENT = 6  # the factor that clips the average
    DIVIDE_BY = 7  # divisor / coefficient
    WEIGHT = 8  # the state's
    USED = 9  # the state's


SCHEMAS = {
    "accumulate_": (
        "(Tensor(a!) buffer, Tensor(b!) state, Tensor[] grads, int[] segments, bool[] overwrite, "
        "Tensor layout, Tensor layout_host, Tensor(c!)? flags=None, int tag=1, float weight=1.0, "
        "Tensor? weight_tensor=None, Tensor? loss_scale=None, Tensor? drop=None, Tensor(d!)? sq_norm=None, "
        "bool count=True, bool contiguous=False) -> ()"
    ),
    "check_finite_": (
        "(Tensor[] grads, int[] segments, Tensor(a!) found_inf, Tensor(b!) flags, *, int tag=1, "
        "Tensor? weight_tensor=None) -> ()"
    ),
    "norm_": "(Tensor(a!) out, Tensor[] tensors, *, float ord=2.0) -> ()",
    "scaled_copy_": (
        "(Tensor(a!)[] outputs, Tensor[] inputs, *, Tensor? divisor=None, Tensor(b!)? found_inf=None) -> ()"
    ),
    "decide_": (
        "(Tensor(a!) verdict, Tensor(b!) single, Tensor state, *, Tensor? divisor=None, Tensor? norm=None, "
        "Tensor? max_norm=None, Tensor? overflow=None) -> ()"
    ),
}

LIBRARY = torch.library.Library("accumkernels", "DEF")
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
