"""Measures the time of training steps, and predicts the time of windows from it.

A step without accumulation takes s seconds on one rank: forward, backward and the optimizer's step. With several ranks
it takes R longer: the part of its reduction that backward does not hide. A window of K >= 2 micro-batches pays R and O
once::

    T(1) = s + R
    T(K) = K (s - O + A) + O + R

s - O + A is a micro-batch inside a window, which adds its gradients to the flat buffers; A is negative if weight
gradients are added without being written first. O + R is what a window takes on top of its micro-batches. So O is the
optimizer's step with the averaging and, with several ranks, the time by which the reduction at a window's end exceeds
R.

With several ranks, a step of s + R averages gradients in buckets while backward runs, as DistributedDataParallel does,
and windows are reduced over the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..splitting.oom import is_oom_error
from .checks import no_accumulator, positive_float, positive_int
from .fit.agreement import Agreement, check_ranks
from .fit.rank_trial import RankTrials
from .fit.trial import Training, first_line
from .fit.trial_setup import check_trainable, training_for
from .snapshot import Snapshot

_WINDOW = 4  # micro-batches: the first is written to the buffers, the others are added
_LEAST_TRIALS = 3


class StepCosts(NamedTuple):
    """The costs of training steps, named like the arguments of `plan`: `plan(512, 12, **costs._asdict())`.

    Attributes:
        samples_per_second: Rate of one rank in training without accumulation, by micro-batch size.
        optimizer_seconds: Time of a window beyond its micro-batches and `reduction_seconds`: averaging, the optimizer's
            step and, over ranks, the part of the reduction at the window's end that no backward hides.
        reduction_seconds: Extra time of a step without accumulation with several ranks; 0.0 for one.
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
    num_iterations: int = 5,
    duration: float = 10.0,
    process_group: Any = None,
) -> StepCosts:
    """Measure the costs that `plan` needs to say whether accumulating is worth it.

    Trains on trial at one micro-batch size, without accumulation and in windows of 4 micro-batches, in turns. Each part
    of a step is timed by itself, and its fastest run counts, since other load on the machine only adds time. On a GPU
    the time includes a wait after each part. Afterwards everything is as it was, as with `find_batch_size`.

    With torch.distributed every rank must call this, with the same model; the slowest rank counts. The ranks then
    reduce steps and windows: steps without accumulation while backward runs, as DistributedDataParallel does (whose
    broadcast of module buffers is not measured), windows when they end, of which `acc.window` hides a part. A rank that
    fails raises its exception when the trial is over on all ranks; the others raise a RuntimeError that names it.

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
        num_iterations: Steps or windows per trial; with several ranks, the least number of windows.
        duration: Seconds of measuring, with at least three trials of each kind: the longer, the less noise.
        process_group: The ranks that reduce; None for the group of a DistributedDataParallel module, else all ranks;
            False for this one alone.

    Raises:
        TypeError, ValueError: names the wrong argument, with its value.
        RuntimeError: the micro-batch does not fit, the model has a FusedAccumulator, or another rank failed.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if ddp is not None:
        model = ddp.module
        process_group = ddp.process_group if process_group is None else process_group
    agreement = Agreement(process_group)
    try:
        size = positive_int(micro_batch_size, "micro_batch_size")
        check_trainable(model)
        no_accumulator(model, "measure_step_costs")
        training = training_for(
            model,
            device,
            input_shape,
            output_shape,
            make_batch=make_batch,
            make_loader=make_loader,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            amp_dtype=amp_dtype,
            num_iterations=num_iterations,
            accumulate=None,
            memory_limit=None,
            margin=0.0,
        )
        training.steps_in_parts = training.iterations
        end = time.perf_counter() + positive_float(duration, "duration")
        snapshot = Snapshot(model)
    except BaseException:
        agreement.gather(None)  # the others wait for an answer
        raise
    check_ranks(agreement.gather(True), "measure_step_costs", "its arguments")
    group = None if agreement.size == 1 else process_group or torch.distributed.group.WORLD

    single, window, reduced = _Fastest(), _Fastest(), _Fastest()
    trials: list[tuple[_Fastest, Callable[[], tuple[float, ...]]]]
    trials = [(single, lambda: _alone(training, snapshot, size, None))]
    if group is None:
        trials.append((window, lambda: _alone(training, snapshot, size, _WINDOW)))
    else:
        ranks = RankTrials(training, snapshot, size, group, agreement, end, ddp)
        trials += [(window, lambda: ranks.window(_WINDOW)), (reduced, ranks.step)]
    go_on = True
    with training.garbage:
        while go_on or single.runs < _LEAST_TRIALS:
            for fastest, trial in trials:
                parts, go_on = _agreed(agreement, training, size, trial, end)
                fastest.add(parts)

    # A window's first micro-batch differs from the others: the window pays its extra time, or saving, once.
    first, *others, update = window.parts
    micro_batch = sum(others) / len(others)
    found = (sum(single.parts), micro_batch, max(0.0, update + first - micro_batch), sum(reduced.parts))
    step, micro_batch, once, reduced_step = (max(times) for times in zip(*agreement.gather(found), strict=True))
    reduction = 0.0 if group is None else max(0.0, reduced_step - step)
    once = max(0.0, once - reduction)
    return StepCosts({size: size / step}, once, reduction, micro_batch - (step - once))


class _Fastest:
    """The fewest seconds of each part of a step, over all trials so far."""

    def __init__(self) -> None:
        self.runs = 0
        self.parts: tuple[float, ...] = ()

    def add(self, parts: tuple[float, ...]) -> None:
        self.parts = tuple(map(min, self.parts, parts)) if self.runs else parts
        self.runs += 1


def _alone(training: Training, snapshot: Snapshot, size: int, length: int | None) -> tuple[float, ...]:
    """Time the parts of a window of `length` micro-batches, or of a step without accumulation, on one rank."""
    training.accumulate = length
    outcome = training.try_size(size, snapshot)
    if not outcome.trial.ok:
        raise torch.OutOfMemoryError(outcome.failure)
    return outcome.parts


def _agreed(
    agreement: Agreement, training: Training, size: int, trial: Callable[[], tuple[float, ...]], end: float
) -> tuple[tuple[float, ...], bool]:
    """Run a trial on all ranks; returns its result on this one, and whether all of them have time for more.

    Raises:
        RuntimeError: memory ran out, or the trial failed on another rank.
        Exception: whatever else the trial raises here.
    """
    failure = ""
    try:
        parts = trial()
    except BaseException as error:
        agreement.gather(None)  # the others wait for an answer
        if not is_oom_error(error):
            raise
        failure = first_line(error)
    if failure:
        raise RuntimeError(f"measure_step_costs: a micro-batch of {size} does not fit on {training.device}: {failure}")
    everyones = agreement.gather(time.perf_counter() < end)
    check_ranks(everyones, "measure_step_costs", "its trials")
    return parts, all(everyones)
