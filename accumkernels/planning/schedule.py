"""Batch sizes that grow while training goes on, for `AccumulationPlan.windows(loader, schedule)`.

Decaying the learning rate and growing the batch reduce the noise of SGD alike, but a growing batch takes fewer steps
(Smith, Kindermans, Ying and Le 2018, "Don't Decay the Learning Rate, Increase the Batch Size", arXiv:1711.00489).
Accumulation grows the batch without extra memory. A schedule is any function from the optimizer step to samples per
step over all ranks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from ..arguments import as_int
from ..errors import expect, one_of
from .training import fraction, positive_float, positive_int


class Milestones:
    """Batch sizes that hold from given steps on.

    Args:
        sizes: Maps the first step of a size to samples per optimizer step; step 0 is required.

    Raises:
        TypeError, ValueError: a step is negative or not an int, step 0 is missing, or a size is less than 1.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        expect(sizes, Mapping, "sizes", "a mapping from steps to batch sizes")
        for step in sizes:
            if as_int(step, "every step in sizes") < 0:
                raise ValueError(f"sizes: steps must not be negative, got {step}")
        if 0 not in sizes:
            raise ValueError("sizes must say the batch size of step 0")
        self._steps = sorted(sizes)
        self._sizes = [positive_int(sizes[step], f"the batch size of step {step}") for step in self._steps]

    @classmethod
    def instead_of_decay(
        cls, batch_size: int, milestones: Iterable[int], gamma: float = 0.1, maximum: int | None = None
    ) -> Milestones:
        """Grow by `1 / gamma` where `torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma)` would decay.

        Args:
            batch_size: Samples per optimizer step up to the first milestone.
            milestones: The steps at which the batch grows.
            gamma: The factor that the decay would multiply the learning rate by, in (0, 1).
            maximum: The largest batch; once it is reached, decay the learning rate.

        Raises:
            TypeError, ValueError: names the wrong argument, and its value; `maximum` is less than `batch_size`.
        """
        size = positive_int(batch_size, "batch_size")
        expect(milestones, Iterable, "milestones", "steps", but=str)
        gamma = fraction(gamma, "gamma", zero=False)
        limit = None if maximum is None else positive_int(maximum, "maximum")
        if limit is not None and limit < size:
            raise ValueError(f"maximum must be at least batch_size {size}, got {limit}")
        sizes = {0: size}
        for power, step in enumerate(sorted(milestones), 1):
            grown = round(size / gamma**power)
            sizes[step] = grown if limit is None else min(grown, limit)
        return cls(sizes)

    def __call__(self, step: int) -> int:
        """Return the samples per optimizer step at `step`."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        return self._sizes[bisect.bisect_right(self._steps, step) - 1]


# ---- The learning rate and Adam's beta2 for another batch size


def suggest_learning_rate(
    base_lr: float, base_batch_size: int, batch_size: int, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
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
