"""Finds the largest batch size that fits by training with it, so that the answer has really run."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...batch_statistics import uses_batch_statistics
from ..checks import no_accumulator, one_of, positive_int
from ..snapshot import Snapshot
from .agreement import Agreement, check_ranks
from .meters import describe_peak
from .trial import Trial
from .trial_setup import check_trainable, training_for

MODES = ("power", "binsearch")


class BatchSize(int):
    """A batch size that ran and fitted: an int that knows how it was found.

    Attributes:
        tried: Every size tried, in order: (size, ok, peak_bytes, samples_per_second).
        reason: Why it is not larger: "oom" (a larger size did not fit), "max" (`max_batch_size`) or
            "dataset" (`dataset_size`).
        optimizer_seconds: Time of an optimizer step on the slowest rank; None if it was not measured.
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
        """The most bytes of memory in use at a time with this size."""
        return next((trial.peak_bytes for trial in self.tried if trial.size == int(self)), 0)

    @property
    def fastest(self) -> int:
        """The size with the most samples per second among those that fit; it is not always the largest."""
        fitting = [trial for trial in self.tried if trial.ok]
        return max(fitting, key=lambda trial: trial.samples_per_second).size if fitting else int(self)

    def __repr__(self) -> str:
        return f"BatchSize({int(self)}, reason={self.reason!r}, {len(self.tried)} sizes tried)"

    def __str__(self) -> str:
        return str(int(self))


def find_batch_size(
    model: nn.Module,
    device: torch.device | str,
    input_shape: Sequence[int] | int | None,
    output_shape: Sequence[int] | int | None,
    dataset_size: int,
    max_batch_size: int | None = None,
    num_iterations: int = 5,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer_fn: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    make_batch: Callable[[int], Any] | None = None,
    mode: str = "power",
    amp_dtype: torch.dtype | None = None,
    margin: float = 0.0,
    multiple_of: int = 1,
    accumulate: int | None = None,
    memory_limit: int | None = None,
    make_loader: Callable[[int], Iterable[Any]] | None = None,
    process_group: Any = None,
    progress: bool | None = None,
) -> BatchSize:
    """Find the largest batch size that trains on a device without running out of memory.

    Sizes are tried with whole training steps, in the model's current modes: doubling from 1 (2 if BatchNorm trains)
    until memory runs out or the cap is reached, then, with "binsearch", between the last two. Only out of memory
    (`is_oom_error`) makes a size smaller; every other exception is raised unchanged. Afterwards, even after an error or
    a Ctrl-C, the model (parameters, buffers, `.grad`s, hooks, attributes, mode, device), the optimizer and the random
    generators of torch, CUDA, Python and numpy are as before, bit for bit. Existing `.grad`s stay in memory meanwhile.

    With torch.distributed every rank must call this; all try the same sizes and return the same answer, the largest
    that fits on every rank. The trials themselves do not communicate: for a DistributedDataParallel model they run its
    inner module.

    Args:
        model: Moved to `device` for the trials if it is elsewhere; a model spread over several devices is not moved.
        device: Where to train.
        input_shape: Shape of one sample without the batch dimension, for random fp32 inputs; None with `make_batch` or
            `make_loader`.
        output_shape: Shape of one sample's target, likewise.
        dataset_size: Number of samples; no larger batch is tried.
        max_batch_size: Another limit: no larger batch is tried.
        num_iterations: Training steps per size; at least 2 are run, since optimizers make their state in the first.
        loss_fn: `loss_fn(output, target)`, by default the mean squared error; for a dict batch, by default
            `output.loss`, else `loss_fn(output, batch)`.
        optimizer_fn: Makes an optimizer from the list of trainable parameters; by default `torch.optim.Adam`.
        make_batch: `make_batch(n)` returns `(input, target)`, or a dict for models that are called with keywords.
            Called for every micro-batch and timed with it.
        mode: "power" finds `multiple_of` times the largest power of two that fits, "binsearch" the largest size.
        amp_dtype: Run under autocast to this dtype.
        margin: Fraction of the device's memory that must stay free at the peak, in [0, 1).
        multiple_of: Try only multiples of this; 8 suits matrix units in 16 bit.
        accumulate: Train with a FusedAccumulator and this many micro-batches per step, so that its buffers are measured
            too.
        memory_limit: Bytes of memory of a smaller device to find the answer for. A CPU's memory runs out far too late
            for a trial; there the limit applies to the tensors alive after each op.
        make_loader: `make_loader(n)` returns a DataLoader, or any iterable, of batches as `make_batch` makes them;
            samples per second then include loading.
        process_group: The ranks that agree; None for all, False for this one alone.
        progress: Show a progress bar; by default on a terminal, where rich is installed.

    Raises:
        TypeError, ValueError: an argument is wrong (the message repeats its value), or the cap is 1 and BatchNorm is in
            training.
        RuntimeError: nothing fits (the message has the bytes of each size tried), the model has a FusedAccumulator, or
            another rank failed.
    """
    agreement = Agreement(process_group)
    try:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        cap, bound = _cap(dataset_size, max_batch_size)
        step = positive_int(multiple_of, "multiple_of")
        start = _start(model, cap, step)
        no_accumulator(model, "find_batch_size")
        one_of(mode, "mode", MODES)
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
            accumulate=accumulate,
            memory_limit=memory_limit,
            margin=margin,
        )
        snapshot = Snapshot(model)
    except BaseException:
        agreement.gather(None)
        raise
    everyones = agreement.gather((cap, bound, start))
    check_ranks(everyones, "find_batch_size", "its arguments")
    cap, bound, start = min((c, b) for c, b, _ in everyones) + (max(s for _, _, s in everyones),)
    tried: list[Trial] = []
    failures: list[str] = []
    updates: list[float] = []  # seconds of an optimizer step, one measurement per size that fits

    def fits(size: int) -> bool:
        try:
            found = training.try_size(size, snapshot)
        except BaseException:
            agreement.gather(None)  # the others wait for an answer
            raise
        everyones = agreement.gather(found)
        check_ranks(everyones, "find_batch_size", f"batch size {size}")
        trials = [outcome.trial for outcome in everyones]
        ok = all(trial.ok for trial in trials)
        rate = min(trial.samples_per_second for trial in trials) if ok else 0.0
        tried.append(Trial(size, ok, max(trial.peak_bytes for trial in trials), rate))
        failures.extend(outcome.failure for outcome in everyones if outcome.failure)
        if ok:
            updates.append(max(outcome.parts[-1] for outcome in everyones))
        return ok

    with training.garbage, trial_progress(progress) as training.on_step:
        if training.device.type != "cpu":
            training.garbage.collect()
        largest = largest_that_fits(fits, start, cap, step, mode)
    if largest is None:
        sizes = "; ".join(f"batch size {t.size} ran out after {describe_peak(t.peak_bytes)}" for t in tried)
        raise RuntimeError(
            f"find_batch_size: not even the smallest batch fits on {training.device}: {sizes}: {failures[0]}"
        )
    # An optimizer step's time does not depend on the batch: the median of all sizes is less noisy than any one.
    return BatchSize(largest, tried, "oom" if failures else bound, statistics.median(updates), training.accumulate)


def _cap(dataset_size: Any, max_batch_size: Any) -> tuple[int, str]:
    """Return the largest size to try, and the argument that set it."""
    cap, bound = positive_int(dataset_size, "dataset_size"), "dataset"
    if max_batch_size is not None and positive_int(max_batch_size, "max_batch_size") <= cap:
        return positive_int(max_batch_size, "max_batch_size"), "max"
    return cap, bound


def _start(model: Any, cap: int, step: int) -> int:
    """Return the smallest size to try."""
    check_trainable(model)
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
    if mode == "binsearch" and good < top < bad:  # nothing failed, so the cap may well fit
        if fits(top):
            good = top
        else:
            bad = top
    while mode == "binsearch" and good and bad - good > step:
        middle = (good + bad) // (2 * step) * step
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
