"""What a batch size is worth: plans that reach a target, and the comparison of several."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from ..arguments import as_int
from ..errors import expect, expect_iterable
from ..splitting.batches import TreeSamples
from ..splitting.memory import format_bytes
from ..window.noise_scale import NoiseScale
from .batch_size import BatchSize
from .costs import StepCosts
from .training import as_float, is_callable, positive_float, positive_int, seconds

# ---- Compares numbers of micro-batches: which trains fastest, and why, down to not accumulating at all.
#
# If the noise scale B_noise is known, the time to a given loss counts: the time of a sample, which falls with the batch
# B because a step is paid for less often, times the samples needed, which grow as `1 + B / B_noise` (McCandlish et al.
# 2018, arXiv:1812.06162). Otherwise only the time of a sample counts. Since a smaller batch needs no more samples (the
# same source; Marek et al. 2025, arXiv:2507.07101), the smallest batch wins whose samples take hardly longer than the
# fastest.

WORTH_IT = 0.05  # a smaller gain in time is not worth more micro-batches, and measurements are no more precise


class Recommendation(NamedTuple):
    """How many micro-batches to accumulate.

    Attributes:
        accumulation_steps: K; 1 for not accumulating.
        text: "K = 1", "K up to 4", or "K = 8 for the batch 512".
        why: The reason, in a sentence or more.
    """

    accumulation_steps: int
    text: str
    why: str


def _size(plan: AccumulationPlan) -> float:
    """Samples of a micro-batch, or their mean if they differ."""
    return plan.target_batch_size / plan.world_size / plan.accumulation_steps


def _batch(plan: AccumulationPlan, steps: int) -> float:
    """Samples over all ranks in so many of the plan's micro-batches."""
    return plan.target_batch_size * steps / plan.accumulation_steps


def _seconds_per_sample(plan: AccumulationPlan, steps: int) -> float:
    """Seconds of a window over its samples on all ranks."""
    assert plan.costs is not None
    return plan.costs.window_seconds(steps, _size(plan)) / _batch(plan, steps)


def _samples_needed(plan: AccumulationPlan, steps: int) -> float:
    """Samples to a given loss, relative to the fewest possible; 1 if the noise scale is not known."""
    return 1.0 if plan.noise_scale is None else 1 + _batch(plan, steps) / plan.noise_scale


def _seconds_to_loss(plan: AccumulationPlan, steps: int) -> float:
    """Seconds of a sample, times the samples needed if their number is known; smaller is better."""
    return _seconds_per_sample(plan, steps) * _samples_needed(plan, steps)


def recommend(plan: AccumulationPlan) -> Recommendation:
    """Recommend a number of micro-batches, by comparing all up to the plan's by their known costs."""
    steps, target = plan.accumulation_steps, plan.target_batch_size
    if steps == 1:
        ranks = " on each rank" if plan.world_size > 1 else ""
        why = f"the batch of {target} is one micro-batch{ranks}: there is nothing to accumulate"
        return Recommendation(1, "K = 1", why + _faster_size(plan))
    if plan.costs is None:
        why = (
            f"a micro-batch has at most {plan.max_micro_batch_size} samples{plan._limit}; whether a smaller batch "
            f"trains as fast is not known without {', '.join(plan._missing)}"
        )
        if plan.noise_scale is not None:
            needed = _samples_needed(plan, steps) / _samples_needed(plan, 1)
            why += (
                f". At a noise scale of {plan.noise_scale:.4g} it takes {needed:.3g} times the samples to a loss that "
                "K = 1 takes"
            )
        return Recommendation(steps, f"K = {steps} for the batch {target}", why)
    times = [_seconds_to_loss(plan, number) for number in range(1, steps + 1)]
    enough = (1 + WORTH_IT) * min(times)
    best = next(number for number, seconds in enumerate(times, 1) if seconds <= enough)
    text = "K = 1" if best == 1 else f"K up to {best}" if best < steps else f"K = {best} for the batch {target}"
    limit = plan._limit if best == steps else ""
    return Recommendation(best, text, _why(plan, best) + limit + _faster_size(plan))


def _why(plan: AccumulationPlan, best: int) -> str:
    """Compare with not accumulating, and with accumulating up to the target."""
    steps = plan.accumulation_steps
    compared = steps if best == 1 else best
    samples = _change(_seconds_per_sample(plan, compared) / _seconds_per_sample(plan, 1))
    why = f"with K = {compared} a sample takes {samples} time than with K = 1"
    costs = _costs(plan)
    if plan.noise_scale is None:
        if best == 1:
            slower = _seconds_per_sample(plan, compared) > _seconds_per_sample(plan, 1)
            return f"{why}{'' if slower else f', too little for {compared} times fewer steps'}; {costs}"
        if best == steps:
            return f"{why}: {costs}"
        rest = _change(_seconds_per_sample(plan, steps) / _seconds_per_sample(plan, best))
        return f"{why}: {costs}; from there to K = {steps} it takes only {rest}"
    needed = _samples_needed(plan, compared) / _samples_needed(plan, 1)
    total = _change(_seconds_to_loss(plan, compared) / _seconds_to_loss(plan, 1))
    why += (
        f" ({costs}) and, at a noise scale of {plan.noise_scale:.4g}, a loss takes {needed:.3g} times the samples: "
        f"{total} time in all"
    )
    if best in (1, steps):
        return why
    rest = _change(_seconds_to_loss(plan, steps) / _seconds_to_loss(plan, best))
    return f"{why}; K = {steps} takes {rest} than that"


def _costs(plan: AccumulationPlan) -> str:
    """Say what a window pays for once, and what it pays for in each micro-batch."""
    assert plan.costs is not None
    once = plan.costs.optimizer_seconds + plan.costs.reduction_seconds
    what = "optimizer step and reduction take" if plan.costs.reduction_seconds else "the optimizer step takes"
    return f"{what} {_time(once)}, a micro-batch {_time(plan.costs.micro_batch_seconds(_size(plan)))}"


def _faster_size(plan: AccumulationPlan) -> str:
    """Point to a smaller micro-batch size that computes samples faster."""
    costs, own = plan.costs, _size(plan)
    if costs is None:
        return ""

    def rate(size: float) -> float:
        return size / max(costs.micro_batch_seconds(size), 1e-12)

    smaller = [size for size in costs.samples_per_second if size < own]
    fastest = max(smaller, key=rate, default=None)
    if fastest is None or rate(fastest) <= (1 + WORTH_IT) * rate(own):
        return ""
    return (
        f". Micro-batches of {fastest} compute {rate(fastest) / rate(own):.2g} times as many samples per second: try "
        f"max_micro_batch_size={fastest}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _change(ratio: float) -> str:
    """Describe a ratio for people: 0.75 is "25 % less"."""
    return f"{100 * abs(ratio - 1):.0f} % {'less' if ratio <= 1 else 'more'}"


# ---- Plans how to reach a batch with micro-batches that fit: micro-batches x steps x ranks

T = TypeVar("T")


def _balanced(total: int, most: int) -> tuple[int, ...]:
    """Split `total` into the fewest sizes of at most `most`, differing by at most one, larger ones first."""
    pieces = -(-total // most)
    size, larger = divmod(total, pieces)
    return (size + 1,) * larger + (size,) * (pieces - larger)


@dataclass(frozen=True)
class AccumulationPlan:
    """The way to reach a batch, and whether it is worth it. `plan()` makes one; `str()` of it is a table.

    Attributes:
        target_batch_size: Samples per optimizer step, over all ranks.
        max_micro_batch_size: The largest micro-batch that fits.
        world_size: Ranks of data parallelism.
        micro_batch_sizes: Samples of each micro-batch of a window, on every rank; larger ones first, so that a lack of
            memory shows at once.
        costs: The costs of a step, or None if `plan` did not get all of them.
        noise_scale: In samples, or None.
    """

    target_batch_size: int
    max_micro_batch_size: int
    world_size: int
    micro_batch_sizes: tuple[int, ...]
    costs: StepCosts | None = field(default=None, compare=False)
    noise_scale: float | None = field(default=None, compare=False)
    # The names of the unknown costs; and why no larger micro-batch fits, as the end of a sentence, or nothing.
    _missing: tuple[str, ...] = field(default=("samples_per_second", "optimizer_seconds"), compare=False, repr=False)
    _limit: str = field(default="", compare=False, repr=False)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return len(self.micro_batch_sizes)

    @property
    def rank_batch_size(self) -> int:
        """Samples per optimizer step on one rank."""
        return sum(self.micro_batch_sizes)

    @property
    def verdict(self) -> str:
        """Whether to accumulate: "K = 1" (do not), "K up to 4" (no more than that), or "K = 8 for the batch 512".

        If samples take hardly longer with a smaller K (5 % at most), the smaller K wins; with a noise scale, the same
        rule applies to training to a given loss.
        """
        return recommend(self).text

    @property
    def why(self) -> str:
        """The reason for the verdict, with its numbers; it says so if costs are unknown."""
        return recommend(self).why

    @property
    def best_steps(self) -> int:
        """The verdict's K: the number of micro-batches to accumulate, at most `accumulation_steps`."""
        return recommend(self).accumulation_steps

    def seconds_per_sample(self, accumulation_steps: int) -> float:
        """Predict the time of a window of so many micro-batches, divided by its samples on all ranks.

        Raises:
            TypeError, ValueError: `accumulation_steps` is not a positive int.
            RuntimeError: `costs` are not known.
        """
        steps = positive_int(accumulation_steps, "accumulation_steps")
        if self.costs is None:
            raise RuntimeError(f"nothing to predict a time from: give plan() {', '.join(self._missing)}")
        return _seconds_per_sample(self, steps)

    def split(self, batch: T) -> list[T]:
        """Cut one rank's batch into the plan's micro-batches, without copying.

        Args:
            batch: A tree of tensors and lists, as for `FusedAccumulator.backward_batch`. A smaller batch (the last of
                an epoch) is cut into the fewest equal pieces that fit.

        Returns:
            Micro-batches of the same structure; their tensors are views.

        Raises:
            TypeError, ValueError: the batch is empty, larger than `rank_batch_size` or no tree of tensors, or a tensor
                or list has another number of samples.
        """
        samples = TreeSamples(batch)
        count = len(samples)
        if not 0 < count <= self.rank_batch_size:
            raise ValueError(f"batch has {count} samples; this plan splits batches of 1 to {self.rank_batch_size}")
        full = count == self.rank_batch_size
        sizes = self.micro_batch_sizes if full else _balanced(count, self.max_micro_batch_size)
        ends = itertools.accumulate(sizes)
        return [samples.part(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def windows(
        self, loader: Iterable[T], schedule: Callable[[int], int] | None = None, first_step: int = 0
    ) -> Iterator[list[T]]:
        """Group a loader's micro-batches into windows, one per optimizer step; the last one may be shorter.

        Args:
            loader: An iterable of micro-batches. `DataLoader(dataset, batch_sampler=plan.batch_sampler(sampler))`
                returns exactly the plan's sizes. It is read at most one window ahead of the caller.
            schedule: A function from the optimizer step to the target batch size (`planning.schedule`), which replaces
                `target_batch_size` and is called as a window begins. The window has the number of micro-batches that
                comes nearest, by their mean size. It must return the same on every rank.
            first_step: The optimizer step of the first window, if training is resumed.

        Raises:
            TypeError, ValueError: `loader` is no iterable; `first_step` is not an int or is negative; `schedule` cannot
                be called, or returns anything but a positive int.
        """
        first_step = as_int(first_step, "first_step")
        if first_step < 0:
            raise ValueError(f"first_step must not be negative, got {first_step}")
        if schedule is not None:
            is_callable(schedule, "schedule")
        return self._windows(expect_iterable(loader, "loader", "an iterable of micro-batches"), schedule, first_step)

    def _windows(self, loader: Iterable[T], schedule: Callable[[int], int] | None, step: int) -> Iterator[list[T]]:
        window: list[T] = []
        wanted = 0
        for micro_batch in loader:
            if not window:
                wanted = self.accumulation_steps if schedule is None else self._steps_for(schedule(step))
            window.append(micro_batch)
            if len(window) == wanted:
                yield window
                window, step = [], step + 1
        if window:
            yield window

    def _steps_for(self, target: int) -> int:
        target = positive_int(target, "the schedule's batch size")
        return max(1, (2 * target * self.accumulation_steps + self.target_batch_size) // (2 * self.target_batch_size))

    def batch_sampler(self, sampler: Iterable[int]) -> BatchSampler:
        """Make batches of indices in the plan's micro-batch sizes, for `DataLoader(dataset, batch_sampler=...)`.

        Args:
            sampler: Yields one rank's indices: `torch.utils.data.RandomSampler(dataset)`,
                `DistributedSampler(dataset)`, or a range.

        Raises:
            TypeError: `sampler` is no iterable.
        """
        return BatchSampler(expect(sampler, Iterable, "sampler", "an iterable of indices"), self.micro_batch_sizes)

    def __str__(self) -> str:
        counts = Counter(self.micro_batch_sizes)
        sizes = " + ".join(f"{count} x {size}" for size, count in counts.items())
        rows = (
            ("target batch size", self.target_batch_size, ""),
            ("ranks", self.world_size, ""),
            ("batch per rank", self.rank_batch_size, ""),
            ("accumulation steps", self.accumulation_steps, sizes),
            ("largest micro-batch", self.micro_batch_sizes[0], f"at most {self.max_micro_batch_size}"),
        )
        width = max(len(str(value)) for _, value, _ in rows)
        lines = [f"{name:<20} {value:>{width}}  {note}".rstrip() for name, value, note in rows]
        total = f"({sizes}) x {self.world_size} ranks" if self.world_size > 1 else sizes
        lines += [f"{total} = {self.target_batch_size}", *self._times()]
        advice = recommend(self)
        return "\n".join([*lines, f"verdict: {advice.text}, since {advice.why}"])

    def _times(self) -> list[str]:
        """Format the predicted times, for powers of two and for the K that matter."""
        if self.costs is None:
            return []
        noise = self.noise_scale is not None
        powers = {2**power for power in range(self.accumulation_steps.bit_length())}
        lines = ["", f"{'K':>6}  {'batch':>8}  {'ms per sample':>13}" + ("  time to a loss" if noise else "")]
        for steps in sorted(powers | {self.best_steps, self.accumulation_steps}):
            row = f"{steps:>6}  {_batch(self, steps):>8.0f}  {1e3 * _seconds_per_sample(self, steps):>13.4g}"
            relative = _seconds_to_loss(self, steps) / _seconds_to_loss(self, 1)
            lines.append(row + (f"  {relative:>14.0%}" if noise else "").replace("%", " %"))
        return lines


class BatchSampler:
    """Cuts a stream of indices into batches whose sizes repeat; the last one may be smaller."""

    def __init__(self, sampler: Iterable[int], sizes: tuple[int, ...]) -> None:
        self.sampler = sampler
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        for size in itertools.cycle(self.sizes):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch

    def __len__(self) -> int:
        windows, left = divmod(len(self.sampler), sum(self.sizes))  # type: ignore[arg-type]
        starts = itertools.accumulate(self.sizes, initial=0)
        return windows * len(self.sizes) + sum(start < left for start in starts)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler if it has the method (DistributedSampler)."""
        getattr(self.sampler, "set_epoch", lambda epoch: None)(epoch)


def plan(
    target_batch_size: int,
    max_micro_batch_size: int,
    *,
    world_size: int = 1,
    samples_per_second: float | Mapping[int, float] | None = None,
    optimizer_seconds: float | None = None,
    reduction_seconds: float | None = None,
    accumulate_seconds: float = 0.0,
    noise_scale: float | NoiseScale | None = None,
) -> AccumulationPlan:
    """Reach a batch size exactly with micro-batches that fit, and say whether to accumulate at all.

    Uses as few micro-batches as possible, differing by at most one sample: 100 with at most 33 is 25 + 25 + 25 + 25.
    With `weight=` the number of samples of each, `FusedAccumulator` computes exactly the big batch's gradient.

    With the costs of a step, the answer's `.verdict` and `.why` say whether fewer micro-batches, down to one, would
    train as fast. A BatchSize from `find_batch_size` as `max_micro_batch_size` includes samples per second and the time
    of an optimizer step; `planning.costs.measure_step_costs` measures all costs:
    `plan(512, 12, **costs._asdict())`.

    Args:
        target_batch_size: Samples per optimizer step, over all ranks.
        max_micro_batch_size: Largest micro-batch that fits one device, as from `find_batch_size`.
        world_size: Ranks of data parallelism; each takes the same share.
        samples_per_second: Rate of one rank in training without accumulation, with the optimizer and without the
            reduction: a number for the plan's micro-batches, or a mapping from micro-batch sizes to numbers.
        optimizer_seconds: Time of one optimizer step.
        reduction_seconds: Time that a step waits for the reduction of the gradients over ranks; with several ranks
            there is no verdict without it.
        accumulate_seconds: Extra time of a micro-batch inside a window; may be negative.
        noise_scale: The critical batch size in samples, `acc.noise_scale()`; it grows while the loss falls.

    Raises:
        TypeError: an argument is of the wrong type; the message repeats its value.
        ValueError: an argument is less than 1, not finite or, for seconds, negative; the target is no multiple of
            `world_size` (names the nearest ones); optimizer step and accumulation leave no time for the rest of a step.
    """
    target = positive_int(target_batch_size, "target_batch_size")
    most = positive_int(max_micro_batch_size, "max_micro_batch_size")
    ranks = positive_int(world_size, "world_size")
    share, rest = divmod(target, ranks)
    if rest:
        nearest = f"{share * ranks} and {(share + 1) * ranks}" if share else f"{ranks}"
        raise ValueError(
            f"target_batch_size {target} cannot be shared equally by world_size {ranks} ranks; "
            f"the nearest possible: {nearest}"
        )
    sizes = _balanced(share, most)

    # Take missing costs from the measurements of a BatchSize, if there is one.
    rates = _rates(samples_per_second, sizes[0])
    update = None if optimizer_seconds is None else seconds(optimizer_seconds, "optimizer_seconds")
    if isinstance(max_micro_batch_size, BatchSize):
        measured = max_micro_batch_size
        rates = rates or _measured_rates(measured, measured.optimizer_seconds if update is None else update)
        if update is None and rates is not None and measured.optimizer_seconds is not None:
            # If a step takes hardly longer than its optimizer, either time may be the longer one by chance.
            update = min(measured.optimizer_seconds, StepCosts(rates, 0.0).step_seconds(share / len(sizes)))
    reduction = 0.0 if ranks == 1 else None
    if reduction_seconds is not None:
        reduction = seconds(reduction_seconds, "reduction_seconds")
    found = {"samples_per_second": rates, "optimizer_seconds": update, "reduction_seconds": reduction}
    missing = tuple(name for name, value in found.items() if value is None)
    costs = None
    if rates is not None and update is not None and reduction is not None:
        extra = as_float(accumulate_seconds, "accumulate_seconds", math.isfinite, "finite")
        costs = StepCosts(rates, update, reduction, extra)
        _check_times(costs, share / len(sizes))
    noise = None if noise_scale is None else _noise(noise_scale)
    return AccumulationPlan(target, most, ranks, sizes, costs, noise, missing, _limit(max_micro_batch_size))


def _rates(samples_per_second: Any, size: int) -> Mapping[int, float] | None:
    """Return the checked samples per second by size."""
    if samples_per_second is None:
        return None
    if not isinstance(samples_per_second, Mapping):
        return {size: positive_float(samples_per_second, "samples_per_second")}
    if not samples_per_second:
        raise ValueError("samples_per_second must have at least one micro-batch size, got {}")
    return {
        positive_int(n, "every size in samples_per_second"): positive_float(rate, f"samples_per_second[{n}]")
        for n, rate in samples_per_second.items()
    }


def _measured_rates(found: BatchSize, update: float | None) -> Mapping[int, float] | None:
    """Compute rates without accumulation from trials, whose windows may have shared an optimizer step."""
    saved = 0.0 if found.accumulate is None or update is None else update * (1 - 1 / found.accumulate)
    return {n: n / (n / rate + saved) for n, ok, _, rate in found.tried if ok} or None


def _limit(found: int) -> str:
    """Name the smallest size that ran out of memory."""
    failed = [trial for trial in found.tried if not trial.ok] if isinstance(found, BatchSize) else []
    if not failed:
        return ""
    smallest = min(failed)
    return f" (a micro-batch of {smallest.size} ran out of memory at {format_bytes(smallest.peak_bytes)})"


def _noise(noise_scale: Any) -> float:
    value = float(noise_scale) if isinstance(noise_scale, NoiseScale) else noise_scale
    if isinstance(value, Real) and not isinstance(value, bool) and not 0 < float(value) < math.inf:
        raise ValueError(f"noise_scale must be positive and finite, got {value!r}; a measurement needs more windows")
    return positive_float(value, "noise_scale")


def _check_times(costs: StepCosts, size: float) -> None:
    step = costs.step_seconds(size)
    if costs.micro_batch_seconds(size) < -1e-9 * step:  # beyond rounding
        raise ValueError(
            f"optimizer_seconds {costs.optimizer_seconds:.4g} leaves no time for a micro-batch: a whole training step "
            f"takes {step:.4g} s with {size:.4g} samples, by samples_per_second (accumulate_seconds: "
            f"{costs.accumulate_seconds:.4g})"
        )
