"""Measures the time of training steps, and predicts the time of windows from it.

A step without accumulation takes s seconds on one rank: forward, backward and the optimizer's step. With several ranks
it takes R longer, a number that users know of their network. A window of K >= 2 micro-batches pays R and O once::

    T(1) = s + R
    T(K) = K (s - O + A) + O + R

s - O + A is a micro-batch inside a window, which adds its gradients to the flat buffers; A is negative if weight
gradients are added without being written first. O + R is what a window takes on top of its micro-batches, so O is the
optimizer's step with the averaging.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .training import positive_float, positive_int, source_of, training_for
from .trial import Trials

_WINDOW = 4  # micro-batches: the first is written to the buffers, the others are added
_LEAST_TRIALS = 3


class StepCosts(NamedTuple):
    """The costs of training steps, named like the arguments of `plan`: `plan(512, 12, **costs._asdict())`.

    Attributes:
        samples_per_second: Rate of one rank in training without accumulation, by micro-batch size.
        optimizer_seconds: Time of a window beyond its micro-batches and `reduction_seconds`: averaging, and the
            optimizer's step.
        reduction_seconds: Extra time of a step or window with several ranks; not measured, and 0.0 for one.
        accumulate_seconds: Extra time of a micro-batch in a window over a step of its own; may be negative.
    """

    samples_per_second: Mapping[int, float]
    optimizer_seconds: float
    reduction_seconds: float = 0.0
    accumulate_seconds: float = 0.0

    def step_seconds(self, size: float) -> float:
        """Seconds of a step without accumulation on so many samples, without its reduction.

        Between two measured sizes the time is interpolated linearly; outside their range, a sample takes as long as at
        the nearest size.
        """
        known = sorted((n, n / rate) for n, rate in self.samples_per_second.items())
        for (n, low), (m, high) in zip(known, known[1:], strict=False):
            if n <= size <= m:
                return low + (high - low) * (size - n) / (m - n)
        n, nearest = known[0] if size < known[0][0] else known[-1]
        return nearest * size / n

    def micro_batch_seconds(self, size: float) -> float:
        """Seconds of a micro-batch of so many samples in a window."""
        return self.step_seconds(size) - self.optimizer_seconds + self.accumulate_seconds

    def window_seconds(self, steps: int, size: float) -> float:
        """Seconds of a window of `steps` micro-batches of `size` samples; a single one is not accumulated."""
        if steps == 1:
            return self.step_seconds(size) + self.reduction_seconds
        return steps * self.micro_batch_seconds(size) + self.optimizer_seconds + self.reduction_seconds


def measure_step_costs(
    model: nn.Module,
    device: torch.device | str,
    micro_batch_size: int,
    *,
    input_shape: Sequence[int] | int | None = None,
    output_shape: Sequence[int] | int | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    make_batch: Callable[[int], Any] | None = None,
    make_loader: Callable[[int], Iterable[Any]] | None = None,
    amp_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
    num_iterations: int = 5,
    duration: float = 10.0,
) -> StepCosts:
    """Measure the costs that `plan` needs to say whether accumulating is worth it.

    Trains on trial at one micro-batch size, without accumulation and in windows of 4 micro-batches, in turns. Each part
    of a step is timed by itself, and its fastest run counts, since other load on the machine only adds time. On a GPU
    the time includes a wait after each part. Afterwards everything is as it was, as with `find_batch_size`.

    Nothing is communicated: the trials are those of one rank (for a DistributedDataParallel model, with its inner
    module), and `reduction_seconds` is 0.0. For several ranks, pass your own number to `plan`.

    Args:
        model: As for `find_batch_size`, like every argument without an explanation of its own.
        device: Where to train.
        micro_batch_size: Samples of a micro-batch; it must fit.
        input_shape: Shape of one sample, for random inputs.
        output_shape: Shape of one sample's target.
        loss_fn: By default the mean squared error.
        optimizer_fn: By default `torch.optim.Adam`.
        make_batch: Instead of the shapes.
        make_loader: Instead of the shapes.
        amp_dtype: Run under autocast to this dtype.
        cpu_offload: Keep sums, masters and optimizer state in host memory; a step without accumulation is a window of
            one micro-batch then.
        num_iterations: Steps or windows per trial.
        duration: Seconds of measuring, with at least three trials of each kind: the longer, the less noise.

    Raises:
        TypeError, ValueError: names the wrong argument, with its value.
        RuntimeError: the micro-batch does not fit, or the model has a FusedAccumulator.
    """
    size = positive_int(micro_batch_size, "micro_batch_size")
    training = training_for(
        "measure_step_costs",
        model,
        device,
        source_of(input_shape, output_shape, make_batch, make_loader),
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        amp_dtype=amp_dtype,
        cpu_offload=cpu_offload,
    )
    end = time.perf_counter() + positive_float(duration, "duration")
    single: list[tuple[float, ...]] = []
    window: list[tuple[float, ...]] = []
    with Trials(training, num_iterations, times_parts=True) as trials:
        while time.perf_counter() < end or len(single) < _LEAST_TRIALS:
            for length, times in ((None, single), (_WINDOW, window)):
                trial, failure, parts = trials.try_size(size, length)
                if not trial.ok:
                    where = f"a micro-batch of {size} does not fit on {training.device}"
                    raise RuntimeError(f"measure_step_costs: {where}: {failure}")
                times.append(parts)

    # A window's first micro-batch differs from the others: the window pays its extra time, or saving, once.
    first, *others, update = map(min, zip(*window, strict=True))  # the fewest seconds of each part, over all trials
    micro_batch, step = sum(others) / len(others), sum(map(min, zip(*single, strict=True)))
    once = max(0.0, update + first - micro_batch)
    return StepCosts({size: size / step}, once, 0.0, micro_batch - (step - once))
