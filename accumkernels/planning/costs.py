"""Measure what training steps cost in time, and predict the time of windows from it.

A step without accumulation takes s seconds: forward, backward and the optimizer's step, which takes O of them. With
several ranks it also waits R seconds for the reduction. A window of K >= 2 micro-batches pays for both once::

    T(1) = s + R
    T(K) = K (s - O + A) + O + R

A is what a micro-batch takes longer inside a window, where its gradients are added to the flat buffers. It is
negative where weight gradients are added without being written first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .agreement import Agreement, check_ranks
from .checks import no_accumulator, positive_float, positive_int
from .snapshot import Snapshot
from .trial import Training
from .trial_setup import check_trainable, training_for

_WINDOW = 4  # micro-batches: the first is written to the buffers, the others are added
_LEAST_TRIALS = 3
_REDUCTIONS = 10


class StepCosts(NamedTuple):
    """The costs of training steps. They are arguments of `plan` by name: `plan(512, 12, **costs._asdict())`.

    Attributes:
        samples_per_second: Rate of one rank in training without accumulation, by micro-batch size.
        optimizer_seconds: Time that a window takes on top of its micro-batches: averaging and the optimizer's step.
        reduction_seconds: Time to reduce the gradients over ranks; 0.0 for one rank.
        accumulate_seconds: Time that a micro-batch takes longer in a window than in a step of its own; may be negative.
    """

    samples_per_second: Mapping[int, float]
    optimizer_seconds: float
    reduction_seconds: float = 0.0
    accumulate_seconds: float = 0.0

    def step_seconds(self, size: float) -> float:
        """Seconds of a step without accumulation on so many samples, without its reduction.

        Between two sizes that were measured the time is on the line between theirs; beyond them all, samples take as
        long as at the nearest.
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
    of a step is timed alone, and its fastest run counts, since whatever else the machine does only adds time. On a GPU
    a wait after each part is in the measure. Afterwards everything is as it was, as with `find_batch_size`.

    With torch.distributed every rank must call this; the slowest rank counts. The reduction of fp32 gradients is timed
    alone: where DistributedDataParallel hides a part of it behind backward, a step without accumulation takes less than
    predicted.

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
        num_iterations: Steps or windows per trial.
        duration: Seconds to go on for, with three trials of each kind at least: the longer, the less noise.
        process_group: The ranks that reduce; None for all, False for this one alone.

    Raises:
        TypeError, ValueError: an argument is wrong: named with its value.
        RuntimeError: the micro-batch does not fit, or the model has a FusedAccumulator.
    """
    agreement = Agreement(process_group)
    try:
        if isinstance(model, DistributedDataParallel):
            model = model.module
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
        single, window = _Fastest(), _Fastest()
        with training.garbage:
            while single.runs < _LEAST_TRIALS or time.perf_counter() < end:
                single.add(_parts(training, snapshot, size, None))
                window.add(_parts(training, snapshot, size, _WINDOW))
    except BaseException:
        agreement.gather(None)  # the others wait for an answer
        raise
    # The first micro-batch of a window is not like the others: what it takes more, or less, is paid for once.
    first, *others, update = window.parts
    micro_batch = sum(others) / len(others)
    everyones = agreement.gather((sum(single.parts), micro_batch, max(0.0, update + first - micro_batch)))
    check_ranks(everyones, "measure_step_costs", "its trials")
    step, micro_batch, once = (max(times) for times in zip(*everyones, strict=True))
    reduction = _reduction_seconds(model, training, agreement, process_group)
    return StepCosts({size: size / step}, once, reduction, micro_batch - (step - once))


class _Fastest:
    """The least seconds of each part of a step, over all trials so far."""

    def __init__(self) -> None:
        self.runs = 0
        self.parts: tuple[float, ...] = ()

    def add(self, parts: tuple[float, ...]) -> None:
        self.parts = tuple(map(min, self.parts, parts)) if self.runs else parts
        self.runs += 1


def _parts(training: Training, snapshot: Snapshot, size: int, length: int | None) -> tuple[float, ...]:
    """Seconds of the parts of a window of `length` micro-batches, or of a step without accumulation."""
    training.accumulate = length
    outcome = training.try_size(size, snapshot)
    if not outcome.trial.ok:
        raise RuntimeError(
            f"measure_step_costs: a micro-batch of {size} does not fit on {training.device}: {outcome.failure}"
        )
    return outcome.parts


def _reduction_seconds(model: nn.Module, training: Training, agreement: Agreement, group: Any) -> float:
    """Seconds to sum the gradients, in fp32, over ranks; of the slowest one."""
    if agreement.size == 1:
        return 0.0
    numel = sum(param.numel() for param in model.parameters() if param.requires_grad)
    flat = torch.zeros(numel, device=training.device)
    times = []
    for _ in range(1 + _REDUCTIONS):
        torch.distributed.barrier(group)
        training.meter.synchronize()
        begin = time.perf_counter()
        torch.distributed.all_reduce(flat, group=group)
        training.meter.synchronize()
        times.append(time.perf_counter() - begin)
    return max(agreement.gather(min(times[1:])))  # without the first, which sets up connections
