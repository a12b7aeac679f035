"""Batch sizes that grow while training goes on, for `AccumulationPlan.windows(loader, schedule)`.

Decaying the learning rate and growing the batch reduce the noise of SGD alike, but a growing batch takes fewer steps
(Smith, Kindermans, Ying and Le 2018, "Don't Decay the Learning Rate, Increase the Batch Size", arXiv:1711.00489).
Accumulation grows the batch without extra memory. A schedule is any function from the optimizer step to samples per
step over all ranks; here are two.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import wrong_type
from .checks import fraction, positive_float, positive_int


class Milestones:
    """Batch sizes that hold from given steps on.

    Args:
        sizes: Maps the first step of a size to samples per optimizer step; step 0 is required.

    Raises:
        TypeError, ValueError: a step is negative or not an int, step 0 is missing, or a size is less than 1.
    """

    def __init__(self, sizes: Mapping[int, int]) -> None:
        if not isinstance(sizes, Mapping):
            raise wrong_type("sizes", "a mapping from steps to batch sizes", sizes)
        for step in sizes:
            if isinstance(step, bool) or not isinstance(step, int):
                raise wrong_type("every step in sizes", "an int", step)
            if step < 0:
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
        """
        size = positive_int(batch_size, "batch_size")
        if isinstance(milestones, str) or not isinstance(milestones, Iterable):
            raise wrong_type("milestones", "steps", milestones)
        gamma = fraction(gamma, "gamma", zero=False)
        limit = None if maximum is None else positive_int(maximum, "maximum")
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


class FollowNoiseScale:
    """Follows the measured noise scale, up to which a larger batch pays and which grows as the loss falls.

    McCandlish et al. 2018 (arXiv:1812.06162): at a batch of the noise scale, training takes twice the least number of
    steps and twice the least number of samples. The batch never shrinks and grows by at most `growth` at a time, since
    the measurement is noisy; build the accumulator with `noise_scale=half_life` so that it forgets the past.

    With torch.distributed every rank uses rank 0's measurement, so calling it is collective.

    Args:
        accumulator: A FusedAccumulator whose weights are numbers of samples.
        batch_size: The first batch: two micro-batches or more, since a single one says nothing about the noise.
        maximum: The largest batch.
        every: Steps between readings; each reading synchronises with the device.
        growth: Largest factor from one reading to the next.

    Raises:
        TypeError, ValueError: names the wrong argument, and its value.
    """

    def __init__(
        self, accumulator: Any, batch_size: int, maximum: int, *, every: int = 50, growth: float = 2.0
    ) -> None:
        if not callable(getattr(accumulator, "noise_scale", None)):
            raise wrong_type("accumulator", "a FusedAccumulator", accumulator)
        self._accumulator = accumulator
        self._size = positive_int(batch_size, "batch_size")
        self._maximum = positive_int(maximum, "maximum")
        if self._maximum < self._size:
            raise ValueError(f"maximum must be at least batch_size {self._size}, got {self._maximum}")
        self._every = positive_int(every, "every")
        self._growth = positive_float(growth, "growth")
        if self._growth <= 1:
            raise ValueError(f"growth must be larger than 1, got {growth!r}")
        self._last = 0

    def __call__(self, step: int) -> int:
        """Return the samples per optimizer step at `step`; ask for steps in order."""
        if step - self._last >= self._every:
            self._last = step
            wanted = self._measured()
            if wanted > self._size:  # False for nan
                self._size = int(min(wanted, self._size * self._growth, self._maximum))
        return self._size

    def _measured(self) -> float:
        measured = [float(self._accumulator.noise_scale())]
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            distributed.broadcast_object_list(measured, src=0)
        return measured[0]
