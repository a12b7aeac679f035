"""Reports where the memory of a training step goes, measured in a run or predicted without the device; draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...accumulator import FusedAccumulator
from ...batch_statistics import uses_batch_statistics
from ...errors import expect_iterable, wrong_type
from ...splitting.live_bytes import CUDA_BLOCK, LiveBytes, LiveCudaBytes, format_bytes
from ..batches import made_batches, training_loss
from ..checks import amp_dtype_or_none, as_device, check_unsharded, is_callable, is_module, no_accumulator, positive_int
from ..snapshot import Snapshot
from .fakes import FakeDevice, LiveFakeBytes

PARTS = ("parameters", "gradients", "accumulators", "optimizer", "activations", "workspace")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes at the peak of a training step; the parts add up to `total`. `str()` of it is a table.

    Attributes:
        batch_size: Samples of a micro-batch.
        parameters: Parameters and buffers of the model.
        gradients: Every `.grad`; all are alive, with parameters, accumulators and state, when the optimizer steps.
        accumulators: Flat buffers of a FusedAccumulator.
        optimizer: The optimizer's state, after its first step.
        activations: The batch, and what the forward pass leaves for backward; only the part that the peak has on top of
            the parts above, since gradients reuse the memory of activations that backward has freed.
        workspace: The rest of the peak: temporaries of backward and of the optimizer's step.
        per_sample: The growth of the peak of forward and backward per sample.
        training_peak: The most in use in forward and backward; `total` is larger if the optimizer's step needs more.
        predicted: Whether it was traced with fake tensors.
    """

    batch_size: int
    parameters: int
    gradients: int
    accumulators: int
    optimizer: int
    activations: int
    workspace: int
    per_sample: float
    training_peak: int
    predicted: bool

    @property
    def total(self) -> int:
        """The most bytes of tensors in use at a time."""
        return sum(getattr(self, part) for part in PARTS)

    def predict(self, batch_size: int) -> int:
        """Extrapolate `total` to another batch size, along the slope `per_sample`."""
        grown = self.training_peak + self.per_sample * (positive_int(batch_size, "batch_size") - self.batch_size)
        step = self.total if self.total > self.training_peak else 0
        fixed = self.parameters + self.gradients + self.accumulators + self.optimizer
        return max(round(grown), step, fixed)

    def fits(self, nbytes: int, batch_size: int | None = None) -> bool:
        """Whether a batch (this one, or another size along the slope) fits in a memory of `nbytes`.

        Not all of a device's memory is available: leave room for its context (some 0.5 GB under CUDA), library
        workspaces and fragmentation; 10 % of its memory is a good margin.
        """
        total = self.total if batch_size is None else self.predict(batch_size)
        return total <= positive_int(nbytes, "nbytes")

    def __str__(self) -> str:
        rows = [(part, getattr(self, part)) for part in PARTS] + [("total", self.total)]
        width = max(len(f"{nbytes:,}") for _, nbytes in rows)
        share = max(self.total, 1)
        lines = [f"{name:<13} {n:>{width},}  {format_bytes(n):>10}  {n / share:>4.0%}" for name, n in rows]
        origin = "predicted with fake tensors" if self.predicted else "measured"
        head = f"memory in bytes at batch size {self.batch_size}, {origin}"
        return "\n".join([head, *lines, f"per sample    {round(self.per_sample):>{width},}"])


class _Peaks(NamedTuple):
    """Bytes that one batch size used."""

    parameters: int
    gradients: int
    accumulators: int
    optimizer: int
    forward: int  # bytes that the forward pass left on top of the fixed parts
    training: int  # peak of forward and backward
    total: int  # peak of the whole step


@dataclass
class _Run:
    """The training that a report measures, on fake or on real tensors."""

    model: nn.Module
    optimizer: Optimizer
    make_batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Tensor] | None
    amp: tuple[str, torch.dtype | None]
    accumulate: int | None
    device: torch.device

    def measure(self, size: int, live: LiveBytes) -> _Peaks:
        """Train two steps and measure the second; `live` counts."""
        parameters = live.add([*self.model.parameters(), *self.model.buffers()])
        live.add(_state(self.optimizer))
        batches = made_batches(self.make_batch)(size, self.device)
        if self.accumulate is None:
            return self._steps(batches, live, parameters, None)
        # Gradients are counted in full.
        with FusedAccumulator(self.model, overflow=None, process_group=False, fuse_weight_gradients=False) as acc:
            return self._steps(batches, live, parameters, acc)

    def _steps(self, batches: Any, live: LiveBytes, parameters: int, acc: Any) -> _Peaks:
        accumulators = 0 if acc is None else live.nbytes(acc.flat_buffers)
        forward = gradients = training = total = 0
        for step in range(2):
            for _ in range(self.accumulate or 1):
                live.reset_peak()
                before = live.live
                batch = next(batches)
                loss = self._loss(batch)
                forward = live.live - before
                loss.backward()
                gradients = live.nbytes(p.grad for p in self.model.parameters() if p.grad is not None)
                training = max(training, live.peak) if step else 0
                total = max(total, live.peak) if step else 0
                del loss, batch
                if acc is not None:
                    acc.accumulate(weight=1.0)
            live.reset_peak()
            if acc is None:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            else:
                acc.step(self.optimizer)
            total = max(total, live.peak) if step else 0
        optimizer = live.nbytes(_state(self.optimizer))
        return _Peaks(parameters, gradients, accumulators, optimizer, forward, training, total)

    def _loss(self, batch: Any) -> Tensor:
        device_type, dtype = self.amp
        with torch.autocast(device_type, dtype=dtype, enabled=dtype is not None):
            return training_loss(self.model, batch, self.loss_fn)


def _state(optimizer: Optimizer) -> list[Tensor]:
    """List every tensor in an optimizer's state."""
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)
    ]


def memory_report(
    model: nn.Module,
    optimizer: Optimizer,
    make_batch: Callable[[int], Any],
    batch_size: int,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    amp_dtype: torch.dtype | None = None,
    accumulate: int | None = None,
    device: torch.device | str | None = None,
    fake: bool = False,
) -> MemoryReport:
    """Report where the memory of a training step goes at one batch size.

    Runs two training steps at `batch_size`, and two at half of it for the slope; afterwards model, optimizer and random
    generators are as before, bit for bit. Tensors are counted as ops return them, once per storage, which works on
    every device but does not see what an op, a library or compiled code allocates inside. On CUDA the allocator's own
    peak is used instead, and its surplus counts as workspace.

    With `fake=True` nothing is allocated or computed: copies of model and optimizer, made of fake tensors, take the
    steps as if on `device`, so a laptop can plan for a card that it does not have. If torch has no CUDA, CPU kernels
    stand in for the card's (autocast and attention differ a little), sizes are rounded as its allocator rounds them,
    and optimizers choose the implementation that they would choose there.

    Args:
        model: On any device, the meta device too with `fake=True`.
        optimizer: Over the model's parameters, with or without state.
        make_batch: As for `find_batch_size`.
        batch_size: Samples of a micro-batch.
        loss_fn: As for `find_batch_size`.
        amp_dtype: Run under autocast to this dtype.
        accumulate: Micro-batches per step of a FusedAccumulator, whose buffers are then counted too.
        device: With `fake=True`: the device to predict for; None for the model's.
        fake: Predict instead of measuring.

    Raises:
        TypeError, ValueError: an argument is wrong, the model is sharded (call it before `fully_shard`), or `device` is
            not the model's and `fake` is not set.
        RuntimeError: the model has a FusedAccumulator, and `fake` is not set.
        torch.OutOfMemoryError: the run does not fit.
    """
    size = positive_int(batch_size, "batch_size")
    steps = None if accumulate is None else positive_int(accumulate, "accumulate")
    check_unsharded(is_module(model))
    if not isinstance(optimizer, Optimizer):
        raise wrong_type("optimizer", "a torch.optim.Optimizer", optimizer)
    is_callable(make_batch, "make_batch")
    if loss_fn is not None:
        is_callable(loss_fn, "loss_fn")
    amp_dtype_or_none(amp_dtype)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise ValueError("model has no trainable parameter")
    if not any(id(p) in owned for p in params):
        raise ValueError("optimizer owns none of the model's trainable parameters")
    own = params[0].device
    target = own if device is None else as_device(device)
    if not fake and target.type != own.type:
        raise ValueError(f"the model is on {own}: a report for {target} needs fake=True, or model.to({str(target)!r})")
    if not fake and own.type == "meta":
        raise ValueError("the model is on the meta device: a report on it needs fake=True")
    if not fake:
        no_accumulator(model, "memory_report")
    smallest = 2 if uses_batch_statistics(model) else 1  # one sample has no variance
    sizes = [size, size // 2] if size // 2 >= smallest else [size, 2 * size] if fake else [size]
    run = _Run(model, optimizer, make_batch, loss_fn, (target.type, amp_dtype), steps, target)
    measure = _predict if fake else _measure
    peaks = [measure(run, n) for n in sizes]
    return _report(size, peaks[0], _slope(sizes, peaks), fake)


def _slope(sizes: list[int], peaks: list[_Peaks]) -> float:
    if len(sizes) == 1:  # this is the smallest size, and there may be no room for more
        return peaks[0].forward / sizes[0]
    return max(0.0, (peaks[0].training - peaks[1].training) / (sizes[0] - sizes[1]))


def _report(size: int, peaks: _Peaks, slope: float, predicted: bool) -> MemoryReport:
    fixed = peaks.parameters + peaks.gradients + peaks.accumulators + peaks.optimizer
    total = max(peaks.total, fixed)
    activations = min(peaks.forward, total - fixed)
    return MemoryReport(
        batch_size=size,
        parameters=peaks.parameters,
        gradients=peaks.gradients,
        accumulators=peaks.accumulators,
        optimizer=peaks.optimizer,
        activations=activations,
        workspace=total - fixed - activations,
        per_sample=slope,
        training_peak=peaks.training,
        predicted=predicted,
    )


def _measure(run: _Run, size: int) -> _Peaks:
    snapshot = Snapshot(run.model)
    snapshot.include(run.optimizer)
    cuda = run.device.type == "cuda"
    live = LiveCudaBytes(run.device) if cuda else LiveBytes()
    try:
        for param in run.model.parameters():
            param.grad = None
        with torch.inference_mode(False), torch.enable_grad(), live:
            return run.measure(size, live)
    finally:
        snapshot.restore()


def _predict(run: _Run, size: int) -> _Peaks:
    fakes = FakeDevice(run.device)
    model, optimizer = fakes.copy(run.model, run.optimizer)
    faked = _Run(
        model, optimizer, run.make_batch, run.loss_fn, (fakes.device.type, run.amp[1]), run.accumulate, fakes.device
    )
    live = LiveFakeBytes(fakes.device, CUDA_BLOCK if run.device.type == "cuda" else 1)
    with fakes.mode, torch.inference_mode(False), torch.enable_grad(), fakes.unchanged_random_state(), live:
        return faked.measure(size, live)


def draw_memory(path: Path | str, reports: Iterable[MemoryReport], limit: int | None = None) -> None:
    """Draw reports as stacked bars over batch sizes, with a device's limit as a line; a PNG of 1080 x 600 pixels.

    Args:
        path: Where to write it.
        reports: One for each bar.
        limit: Bytes of the device; None for no line.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: `reports` is no iterable, or empty.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "accumkernels[demo]"') from error
    bars = sorted(
        expect_iterable(reports, "reports", "an iterable of MemoryReports"), key=lambda report: report.batch_size
    )
    if not bars:
        raise ValueError("reports is empty: there is nothing to draw")
    colours = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#999999")  # Okabe and Ito
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels = [str(report.batch_size) for report in bars]
    bottom = [0.0] * len(bars)
    for part, colour in zip(PARTS, colours, strict=True):
        heights = [getattr(report, part) / 1e6 for report in bars]
        if any(heights):
            axes.bar(labels, heights, bottom=bottom, color=colour, label=part, width=0.7)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    if limit is not None:
        axes.axhline(limit / 1e6, color="#D55E00", linestyle="--", label=f"limit: {limit / 1e6:,.0f} MB")
    axes.set_title("Memory of a training step")
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel("MB")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left")
    figure.savefig(path, format="png")
