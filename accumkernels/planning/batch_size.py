"""Finds the largest batch size that fits by training with it, so that the answer has really run."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..batch_statistics import uses_batch_statistics
from ..errors import one_of
from ..ranks.base import is_distributed
from ..ranks.choice import check_kind
from ..ranks.group import Group
from .training import DataEnd, positive_int, source_of, training_for
from .trial import Outcome, Trial, Trials, describe_peak

Mode = Literal["power", "binsearch"]
MODES: tuple[str, ...] = get_args(Mode)
LARGEST = 2**16  # samples, where nothing else bounds a batch


class BatchSize(int):
    """A batch size that ran and fitted: an int that knows how it was found.

    With several ranks the int and its `reason` are the same on all of them; the rest is what this rank measured.

    Attributes:
        tried: Every size tried, in order: (size, ok, peak_bytes, samples_per_second).
        reason: Why it is not larger: "oom" (a larger size did not fit), "max" (`max_batch_size`) or "dataset"
            (`dataset_size`, or the data of `make_loader` end); with several ranks, on the one with the smallest answer.
        optimizer_seconds: Time of an optimizer step; None if it was not measured.
        accumulate: Micro-batches per optimizer step in the trials; None if they ran without an accumulator.
    """

    tried: list[Trial]
    reason: str
    optimizer_seconds: float | None
    accumulate: int | None

    def __new__(
        cls,
        value: int,
        tried: Sequence[Trial] = (),
        reason: str = "",
        optimizer_seconds: float | None = None,
        accumulate: int | None = None,
    ) -> BatchSize:
        """Make a BatchSize; `find_batch_size` calls this."""
        self = super().__new__(cls, value)
        self.tried = list(tried)
        self.reason = reason
        self.optimizer_seconds = optimizer_seconds
        self.accumulate = accumulate
        return self

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory in use at a time with this size; 0 if only another rank tried it."""
        return next((trial.peak_bytes for trial in self.tried if trial.size == int(self)), 0)

    @property
    def fastest(self) -> int:
        """The size with the most samples per second among those that fit; it is not always the largest."""
        fitting = [trial for trial in self.tried if trial.ok and trial.size <= int(self)]
        return max(fitting, key=lambda trial: trial.samples_per_second).size if fitting else int(self)

    def __repr__(self) -> str:
        return f"BatchSize({int(self)}, reason={self.reason!r}, {len(self.tried)} sizes tried)"

    def __str__(self) -> str:
        return str(int(self))


def find_batch_size(
    model: nn.Module,
    device: torch.device | str,
    input_shape: Sequence[int] | int | None = None,
    output_shape: Sequence[int] | int | None = None,
    dataset_size: int | None = None,
    max_batch_size: int | None = None,
    num_iterations: int = 5,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    make_batch: Callable[[int], Any] | None = None,
    mode: Mode = "power",
    amp_dtype: torch.dtype | None = None,
    margin: float = 0.0,
    multiple_of: int = 1,
    accumulate: int | None = None,
    cpu_offload: bool = False,
    memory_limit: int | str | None = None,
    make_loader: Callable[[int], Iterable[Any]] | None = None,
    process_group: Any = None,
    progress: bool | None = None,
) -> BatchSize:
    """Find the largest batch size that trains on a device without running out of memory.

    Sizes are tried with whole training steps, in the model's current modes: doubling from 1 (2 if BatchNorm trains)
    until memory runs out or the cap is reached, then, with "binsearch", between the last two. Only out of memory
    (`is_oom_error`) makes a size smaller; every other exception is raised unchanged. Afterwards, even after an error or
    a Ctrl-C, the model (parameters, buffers, `.grad`s, hooks, attributes, mode, device), a loss function that is a
    module, every other parameter that gets a gradient, the optimizer and the random generators of torch, CUDA, Python
    and numpy are as before, bit for bit. Existing `.grad`s stay in memory meanwhile.

    With torch.distributed every rank must call this. Each finds its own answer without communicating (for a
    DistributedDataParallel model, with its inner module), and all return the smallest of these.

    Args:
        model: Moved to `device` for the trials if it is elsewhere; a model spread over several devices is not moved.
        device: Where to train.
        input_shape: Shape of one sample without the batch dimension, for random fp32 inputs; left out with `make_batch`
            or `make_loader`.
        output_shape: Shape of one sample's target, likewise.
        dataset_size: Number of samples; no larger batch is tried. None: 65,536, and `reason` is "max".
        max_batch_size: Another limit: no larger batch is tried.
        num_iterations: Training steps per size; at least 2 are run, since optimizers make their state in the first.
        loss_fn: `loss_fn(output, target)`, by default the mean squared error; for a dict batch, by default
            `output.loss`, else `loss_fn(output, batch)`. It may return (loss, weight), as for `acc.backward_batch`.
        optimizer_fn: Makes an optimizer from the list of trainable parameters; by default `torch.optim.Adam`.
        make_batch: `make_batch(n)` returns `(input, target)`, or a dict for models that are called with keywords.
            Called for every micro-batch and timed with it.
        mode: "power" finds `multiple_of` times the largest power of two that fits, "binsearch" the largest size.
        amp_dtype: Run under autocast to this dtype.
        margin: Fraction of the device's memory that must stay free at the peak, in [0, 1).
        multiple_of: Try only multiples of this; 8 suits matrix units in 16 bit.
        accumulate: Train with a FusedAccumulator and this many micro-batches per step, so that its buffers are measured
            too.
        cpu_offload: Keep sums, masters and optimizer state in host memory: see FusedAccumulator. Then every trial has
            an accumulator, of one micro-batch per step if `accumulate` is None.
        memory_limit: Bytes of memory of a smaller device to find the answer for, as in "10GiB" or as a number of at
            least 2**20. A CPU's memory runs out far too late for a trial; there the limit applies to the tensors alive
            after each op.
        make_loader: `make_loader(n)` returns a DataLoader, or any iterable, of batches as `make_batch` makes them;
            samples per second then include loading. Sizes that it cannot fill are not tried.
        process_group: The ranks whose smallest answer counts; None for all, False for this one alone.
        progress: Show a progress bar; by default on a terminal, where rich is installed.

    Raises:
        TypeError, ValueError: an argument is wrong (the message repeats its value), or the cap is 1 and BatchNorm is in
            training.
        RuntimeError: nothing fits (the message has the bytes of each size tried), the model has a FusedAccumulator, or
            another rank failed.
    """
    gather = _gather_over(process_group)
    try:
        cap, bound = _cap(dataset_size, max_batch_size)
        step = positive_int(multiple_of, "multiple_of")
        one_of(mode, "mode", MODES)
        training = training_for(
            "find_batch_size",
            model,
            device,
            source_of(input_shape, output_shape, make_batch, make_loader),
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            amp_dtype=amp_dtype,
            accumulate=accumulate,
            cpu_offload=cpu_offload,
        )
        start = _start(training.model, cap, step)
        trials = Trials(training, num_iterations, memory_limit, margin)
        outcomes: list[Outcome] = []
        larger: list[tuple[int, str]] = []  # sizes that cannot be, and why

        def fits(size: int) -> bool:
            try:
                outcome = trials.try_size(size, training.accumulate)
            except DataEnd:
                if not any(before.trial.ok for before in outcomes):
                    raise
                larger.append((size, "dataset"))
                return False
            outcomes.append(outcome)
            if not outcome.trial.ok:
                larger.append((size, "oom"))
            return outcome.trial.ok

        with trials, trial_progress(progress) as trials.on_step:
            largest = largest_that_fits(fits, start, cap, step, mode)
        tried = [outcome.trial for outcome in outcomes]
        if largest is None:
            sizes = "; ".join(f"batch size {t.size} ran out after {describe_peak(t.peak_bytes)}" for t in tried)
            raise RuntimeError(
                f"find_batch_size: not even the smallest batch fits on {training.device}: {sizes}: "
                f"{outcomes[0].failure}"
            )
    except BaseException:
        gather(None)  # the other ranks wait for an answer
        raise
    everyones = gather((largest, min(larger)[1] if larger else bound))
    for rank, found in enumerate(everyones):
        if found is None:
            raise RuntimeError(f"find_batch_size: rank {rank} failed; its own error says why")
    largest, reason = min(everyones)
    # An optimizer step's time does not depend on the batch: the median of all sizes is less noisy than any one.
    update = statistics.median(outcome.parts[-1] for outcome in outcomes if outcome.trial.ok)
    return BatchSize(largest, tried, reason, update, training.accumulate)


def _gather_over(process_group: Any) -> Callable[[Any], list[Any]]:
    """Return a function that collects every rank's result, in the order of ranks; collective.

    Raises:
        TypeError, ValueError: `process_group` is neither None nor False, nor a group that this rank is in.
    """
    if process_group is not None and process_group is not False:
        check_kind(process_group)
    if process_group is False or not is_distributed():
        return lambda found: [found]
    return Group(process_group or torch.distributed.group.WORLD).gather


def _cap(dataset_size: Any, max_batch_size: Any) -> tuple[int, str]:
    """Return the largest size to try, and the argument that set it."""
    samples = None if dataset_size is None else positive_int(dataset_size, "dataset_size")
    most = LARGEST if max_batch_size is None else positive_int(max_batch_size, "max_batch_size")
    if samples is None or (max_batch_size is not None and most <= samples):
        return most, "max"
    return samples, "dataset"


def _start(model: nn.Module, cap: int, step: int) -> int:
    """Return the smallest size to try."""
    batchnorm = uses_batch_statistics(model)
    start = max(2, step) if batchnorm and step == 1 else step
    if start > cap:
        if step > 1:
            raise ValueError(f"multiple_of {step} is larger than the largest batch size allowed, {cap}")
        raise ValueError(
            f"a batch of 1 cannot train BatchNorm ({batchnorm[0]!r} is in training): allow at least 2 samples "
            "(max_batch_size, dataset_size)"
        )
    return start


def largest_that_fits(fits: Callable[[int], bool], start: int, cap: int, step: int, mode: str) -> int | None:
    """Double from `start` until a size does not fit or exceeds `cap`; with "binsearch", close in on the limit.

    Args:
        fits: Tries a size; it is called at most once per size.
        start: The first size; a multiple of `step`, at most `cap`.
        cap: The largest size to try.
        step: "binsearch" tries multiples of it only.
        mode: "power" or "binsearch".

    Returns:
        The largest size that was tried and fitted, or None. With "power" it is the largest `start * 2**k`, with
        "binsearch" the largest multiple of `step`, provided that everything fits up to some limit.
    """
    top = cap // step * step
    good, bad = 0, top + step  # multiples of step; sizes of bad and more are not tried
    size = start
    while size <= top:
        if not fits(size):
            bad = size
            break
        good, size = size, 2 * size
    while mode == "binsearch" and good and bad - good > step:
        # While nothing has failed, the cap may well fit.
        middle = top if bad > top else (good + bad) // (2 * step) * step
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good or None


@contextmanager
def trial_progress(show: bool | None) -> Iterator[Callable[[int, int, int], None]]:
    """Show the progress of the size being tried.

    Args:
        show: Whether to show it; None: on a terminal, if rich is installed.

    Yields:
        A function to call after each step with the size, the steps done and the steps in all.

    Raises:
        ImportError: `show` is True and rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        if show:
            raise ImportError('progress needs rich: pip install "accumkernels[demo]"') from error
        show = False
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda size, done, steps: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("trying batch sizes", total=None)

    def on_step(size: int, done: int, steps: int) -> None:
        bar.update(task, description=f"trying batch size {size}", completed=done, total=steps)

    with bar:
        yield on_step
