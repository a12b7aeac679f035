"""The learning rate and Adam's beta2 for another batch size."""

from __future__ import annotations

import math

from ..checks import fraction, one_of, positive_float, positive_int


def suggest_learning_rate(base_lr: float, base_batch_size: int, batch_size: int, rule: str = "linear") -> float:
    """Scale a learning rate from one batch size to another: where a search begins, not where it ends.

    With `k = batch_size / base_batch_size`:

    * "linear": `base_lr * k`. For SGD with momentum: k small steps along nearly the same gradient are one step k times
      as long (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677, who warm the rate up over the first
      epochs). It assumes that the gradient hardly changes along the k small steps, which no longer holds for batches
      above the critical batch size (`FusedAccumulator.noise_scale`).
    * "sqrt": `base_lr * sqrt(k)`. For Adam and its relatives, whose step divides by the gradient's noise (Malladi et
      al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287, who scale
      `1 - beta` by k too: see `suggest_betas`). It assumes that noise dominates the gradient, that is, a batch below
      the critical one. Also proposed for SGD, as it keeps the variance of the weights' change (Krizhevsky 2014,
      "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997).

    Args:
        base_lr: The learning rate that works at `base_batch_size`.
        base_batch_size: In samples per optimizer step over all micro-batches and ranks.
        batch_size: The new batch size, in the same unit: the effective one, not the micro-batch's.
        rule: "linear" or "sqrt".

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
    """
    base_lr = positive_float(base_lr, "base_lr")
    ratio = positive_int(batch_size, "batch_size") / positive_int(base_batch_size, "base_batch_size")
    one_of(rule, "rule", ("linear", "sqrt"))
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))


def suggest_betas(beta2: float, base_batch_size: int, batch_size: int) -> float:
    """Scale Adam's `beta2` from one batch size to another: `beta2 ** (batch_size / base_batch_size)`.

    A squared gradient counts half in Adam's average after `log(1/2) / log(beta2)` steps. The rule keeps this half-life
    fixed in samples, or tokens, instead of in steps (Marek et al. 2025, "Small Batch Size Training for Language
    Models", arXiv:2507.07101, who trained with batches of 1 to 4096 sequences that way): 0.999 at 32 samples is 0.992
    at 256, and 0.99997 at 1.

    It assumes that how fast squared gradients change depends on the samples seen, not on the steps taken. As in that
    paper, `beta1`, the average of the gradient itself, does not change. The rule of Malladi et al. 2022
    (arXiv:2205.10287), which scales `1 - beta` by `batch_size / base_batch_size` for both betas, is the same to first
    order for `beta2`. Change the learning rate as well (`suggest_learning_rate`).

    Args:
        beta2: The value that works at `base_batch_size`, in [0, 1).
        base_batch_size: In samples per optimizer step over all micro-batches and ranks.
        batch_size: The new batch size, in the same unit.

    Returns:
        `beta2` for the new batch size; `betas=(beta1, suggest_betas(...))`.

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
    """
    beta2 = fraction(beta2, "beta2")
    return beta2 ** (positive_int(batch_size, "batch_size") / positive_int(base_batch_size, "base_batch_size"))
