"""The learning rate for another batch size."""

from __future__ import annotations

import math

from .checks import one_of, positive_float, positive_int


def suggest_learning_rate(base_lr: float, base_batch_size: int, batch_size: int, rule: str = "linear") -> float:
    """Scale a learning rate that works at one batch size to another. A place to start a search, not an answer.

    With `k = batch_size / base_batch_size`:

    * "linear": `base_lr * k`. For SGD with momentum: k small steps along nearly the same gradient are one step k times
      as long (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677). They warm the rate up over the
      first epochs; the rule ends where the batch exceeds the critical batch size (`FusedAccumulator.noise_scale`).
    * "sqrt": `base_lr * sqrt(k)`. For Adam and its relatives, whose step divides by the gradient's noise (Malladi et
      al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv:2205.10287, who scale
      `1 - beta` by k too). Also proposed for SGD, as it keeps the variance of the weights' change (Krizhevsky 2014,
      "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997).

    Args:
        base_lr: The learning rate that works.
        base_batch_size: At this batch size, in samples per optimizer step over all micro-batches and ranks.
        batch_size: The new batch size, in the same unit: the effective one, not the micro-batch's.
        rule: "linear" or "sqrt".

    Raises:
        TypeError, ValueError: names the argument that is wrong, and its value.
    """
    base_lr = positive_float(base_lr, "base_lr")
    ratio = positive_int(batch_size, "batch_size") / positive_int(base_batch_size, "base_batch_size")
    one_of(rule, "rule", ("linear", "sqrt"))
    return base_lr * (ratio if rule == "linear" else math.sqrt(ratio))
