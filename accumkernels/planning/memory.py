"""Reports where the memory of a training step goes, measured in a run or predicted without the device; draws it."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from .. import devices
from ..arguments import as_bytes
from ..buffers.flat import buffer_dtype
from ..capture.inbox import default_bucket_bytes
from ..errors import expect, expect_iterable, is_oom_error, wrong_type
from ..offload.host import host_bytes
from ..snapshots import Snapshot
from ..splitting.memory import BLOCK, LiveBytes, Memory, format_bytes, let_go, memory_of, tensors_of
from .training import Training, as_device, is_callable, is_module, positive_int, source_of, training_for

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
        per_sample: The growth of the peak per sample, where the batch is large.
        training_peak: The most in use in forward and backward; `total` is larger if the optimizer's step needs more.
        predicted: Whether it was traced with fake tensors.
        lines: Pairs (bytes, bytes per sample), one for each moment of the step that is the peak at some batch size.
        host: Bytes of host memory that `cpu_offload` takes: sums, masters, pinned slots and the optimizer's state.
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
    lines: tuple[tuple[float, float], ...] = field(repr=False)
    host: int = 0

    @property
    def total(self) -> int:
        """The most bytes of tensors in use at a time."""
        return sum(getattr(self, part) for part in PARTS)

    def predict(self, batch_size: int) -> int:
        """Predict `total` at another batch size, where another moment of the step may be the peak.

        It is what a report at that size says, if the same ops run there and what they return grows evenly, to within
        the blocks of 512 bytes that an accelerator's allocator gives. Where ops depend on the size (loops over chunks
        of the batch), or one sample was measured and two do not fit, larger batches are predicted as if gradients grew
        with them: too large.
        """
        if positive_int(batch_size, "batch_size") == self.batch_size:
            return self.total
        fixed = self.parameters + self.gradients + self.accumulators + self.optimizer
        return max(fixed, *(math.ceil(nbytes + growth * batch_size) for nbytes, growth in self.lines))

    def fits(self, nbytes: int | str, batch_size: int | None = None) -> bool:
        """Whether a batch (of this size, or of another by `predict`) fits in a memory of `nbytes`, as in "24GiB".

        Not all of a device's memory is available: leave room for its context (some 0.5 GB under CUDA), library
        workspaces and fragmentation; 10 % of its memory is a good margin. A number below 2**20 must have its unit.
        """
        total = self.total if batch_size is None else self.predict(batch_size)
        return total <= as_bytes(nbytes, "nbytes", of_a_device=True)

    def __str__(self) -> str:
        rows = [(part, getattr(self, part)) for part in PARTS] + [("total", self.total)]
        width = max(len(f"{nbytes:,}") for _, nbytes in rows)
        share = max(self.total, 1)
        lines = [f"{name:<13} {n:>{width},}  {format_bytes(n):>10}  {n / share:>4.0%}" for name, n in rows]
        origin = "predicted with fake tensors" if self.predicted else "measured"
        head = f"memory in bytes at batch size {self.batch_size}, {origin}"
        lines.append(f"per sample    {round(self.per_sample):>{width},}")
        if self.host:
            lines.append(f"host memory   {self.host:>{width},}  {format_bytes(self.host):>10}")
        return "\n".join([head, *lines])


class _Peaks(NamedTuple):
    """Bytes that one batch size used."""

    parameters: int
    gradients: int
    accumulators: int
    optimizer: int
    forward: int  # bytes that the forward pass left on top of the fixed parts
    training: int  # peak of forward and backward
    update: int  # peak of the optimizer's step
    moments: list[int]  # bytes alive after each op of the step
    host: int = 0  # of host memory

    @property
    def total(self) -> int:
        """The peak of the whole step."""
        return max(self.training, self.update)


class Meter(LiveBytes):
    """Counts tensors by kind, and takes peaks from the allocator where it knows them.

    Args:
        memory: Of the device.
        snapshot: Puts back what the parts change; an attribute too.
        granularity: As for `LiveBytes`.
        device: As for `LiveBytes`.

    Attributes:
        moments: Bytes alive after each op of the parts, not rounded, so that they grow evenly with the batch.
    """

    def __init__(
        self, memory: Memory, snapshot: Snapshot, granularity: int, device: torch.device | None = None
    ) -> None:
        super().__init__(granularity=granularity, device=device)
        self.snapshot = snapshot
        self.moments: list[int] = []
        self._memory = memory
        self._foreign = 0  # bytes on the device that do not belong to the training
        self._records = False  # whether a part runs

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op, and record."""
        result = super().call(func, args, kwargs)
        self.add(tensors_of(result))
        if self._records:
            self.moments.append(self.exact)
        return result

    def begin(self, training: Training, optimizer: Optimizer) -> int:
        """Count what exists, everything else on the device being foreign; return the bytes of the model."""
        parameters = self.add([*training.model.parameters(), *training.model.buffers()])
        if not training.cpu_offload:
            self.add(_state(optimizer))
        self._foreign = (self._memory.alive() or 0) - self.live
        return parameters

    def peak_of(self, part: Callable[[], object]) -> int:
        """Run a part of a step; return the most bytes alive meanwhile."""
        self.reset_peak()
        self._records = True
        with self._memory.measured():
            part()
        self._records = False
        return self.peak if self._memory.peak is None else self._memory.peak - self._foreign


def _train(training: Training, optimizer: Optimizer, size: int, meter: Meter, predicts: bool) -> _Peaks:
    """Train two steps and measure the second, on fake or on real tensors."""
    parameters = meter.begin(training, optimizer)
    if training.cpu_offload:
        return _train_offloaded(training, optimizer, size, meter, predicts)._replace(parameters=parameters)
    if training.accumulate is None:

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        peaks = _steps(training, size, meter, Tensor.backward, update)
        return peaks._replace(parameters=parameters, optimizer=meter.nbytes(_state(optimizer)))
    with training.accumulator(fuse_weight_gradients=False) as acc:  # gradients are counted in full
        peaks = _steps(training, size, meter, Tensor.backward, lambda: acc.step(optimizer), acc.accumulate)
        sums, state = meter.nbytes(acc.flat_buffers), meter.nbytes(_state(optimizer))
        return peaks._replace(parameters=parameters, accumulators=sums, optimizer=state)


def _steps(
    training: Training,
    size: int,
    meter: Meter,
    backward: Callable[[Tensor], None],
    update: Callable[[], object],
    accumulate: Callable[[], None] = lambda: None,
) -> _Peaks:
    batches = training.source(size, training.device)
    forward = gradients = peak = 0

    def micro_batch() -> None:
        nonlocal forward, gradients
        before = meter.live
        batch = next(batches)
        loss = training.loss(batch)
        forward = meter.live - before
        meter.snapshot.include_leaves(loss)
        backward(loss)
        gradients = meter.nbytes(p.grad for p in training.model.parameters() if p.grad is not None)

    for step in range(2):
        meter.moments.clear()
        for _ in range(training.accumulate or 1):
            found = meter.peak_of(micro_batch)
            peak = max(peak, found) if step else 0
            accumulate()
        found = meter.peak_of(update)
    return _Peaks(0, gradients, 0, 0, forward, peak, found, meter.moments)


# ---- with sums, masters and optimizer state in host memory


def _train_offloaded(training: Training, optimizer: Optimizer, size: int, meter: Meter, predicts: bool) -> _Peaks:
    """Train with an accumulator that offloads, or predict what one does to the memory of the device."""
    trained = [p for p in training.model.parameters() if p.requires_grad]
    largest = max(p.nbytes for p in trained)
    bucket = default_bucket_bytes(torch.device("cuda"), largest)
    if predicts:
        with _Buckets(trained, bucket) as buckets:
            peaks = _steps(training, size, meter, Tensor.backward, buckets.clear)
        state = _host_state(optimizer, trained, meter.snapshot)
    else:
        with training.accumulator() as acc:
            for group in optimizer.param_groups:
                group["params"][:] = acc.param_groups([{"params": group["params"]}])[0]["params"]
            peaks = _steps(training, size, meter, acc.backward, lambda: acc.step(optimizer))
            masters = set(acc.parameters())
            state = _nbytes(tensors_of([values for p, values in optimizer.state.items() if p in masters]))
    gradients = min(sum(p.nbytes for p in trained), 2 * bucket + largest)
    return peaks._replace(gradients=gradients, host=host_bytes(trained) + state)


class _Buckets:
    """Lets go of gradients as an accumulator that offloads does: two buckets and one gradient are alive at most."""

    def __init__(self, params: Sequence[Tensor], nbytes: int) -> None:
        self._nbytes = nbytes
        self._pending: list[Tensor] = []
        self._copied: list[Tensor] = []
        self._handles = [p.register_post_accumulate_grad_hook(self._take) for p in params]

    def _take(self, param: Tensor) -> None:
        assert param.grad is not None
        self._pending.append(param.grad)
        param.grad = None
        if sum(grad.nbytes for grad in self._pending) >= self._nbytes:
            self._copied, self._pending = self._pending, []

    def clear(self) -> None:
        """Let go of the last ones."""
        self._copied, self._pending = [], []

    def __enter__(self) -> _Buckets:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()
        for handle in self._handles:
            handle.remove()


def _host_state(optimizer: Optimizer, params: Sequence[Tensor], snapshot: Snapshot) -> int:
    """Bytes of the state that a fake optimizer makes for masters of fake parameters."""
    device = torch.device("cpu")
    masters = {p: nn.Parameter(torch.empty_like(p, dtype=buffer_dtype(p.dtype), device=device)) for p in params}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [masters[p] for p in group["params"] if p in masters]
    for master in masters.values():
        master.grad = torch.empty_like(master)
    with FakeMeter(device, snapshot, 1):
        optimizer.step()
    return _nbytes(_state(optimizer))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _state(optimizer: Optimizer) -> list[Tensor]:
    """List every tensor in an optimizer's state."""
    return tensors_of(list(optimizer.state.values()))


def memory_report(
    model: nn.Module,
    optimizer: Optimizer,
    make_batch: Callable[[int], Any],
    batch_size: int,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    amp_dtype: torch.dtype | None = None,
    accumulate: int | None = None,
    cpu_offload: bool = False,
    device: torch.device | str | None = None,
    fake: bool = False,
) -> MemoryReport:
    """Report where the memory of a training step goes at one batch size.

    Runs two training steps at `batch_size`, and two at half of it (below 4 samples at twice, if that fits) to see what
    grows; afterwards model, optimizer and random generators are as before, bit for bit. Tensors are counted as ops
    return them, once per storage, which works on every device but does not see what an op, a library or compiled code
    allocates inside. On CUDA the allocator's own peak is used instead, and its surplus counts as workspace.

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
        cpu_offload: Keep sums, masters and optimizer state in host memory, as FusedAccumulator does; their bytes are
            `host`. The device has neither sums nor state then, and of gradients two buckets and one at most.
        device: With `fake=True`: the device to predict for; None for the model's.
        fake: Predict instead of measuring.

    Raises:
        TypeError, ValueError: an argument is wrong, the model is sharded (call it before `fully_shard`), or `device` is
            not the model's and `fake` is not set.
        RuntimeError: the model has a FusedAccumulator, and `fake` is not set.
        torch.OutOfMemoryError: the run does not fit.
    """
    size = positive_int(batch_size, "batch_size")
    expect(optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer")
    params = [p for p in is_module(model).parameters() if p.requires_grad]
    own = params[0].device if params else torch.device("cpu")
    target = own if device is None else as_device(device)
    if not fake and target.type != own.type:
        raise ValueError(f"the model is on {own}: a report for {target} needs fake=True, or model.to({str(target)!r})")
    if not fake and own.type == "meta":
        raise ValueError("the model is on the meta device: a report on it needs fake=True")
    training = training_for(
        "memory_report",
        model,
        target,
        source_of(make_batch=is_callable(make_batch, "make_batch")),
        loss_fn=loss_fn,
        amp_dtype=amp_dtype,
        accumulate=accumulate,
        cpu_offload=cpu_offload,
        fake=fake,
    )
    if training.cpu_offload and target.type == "cpu":
        raise ValueError(
            "cpu_offload=True on the CPU, whose sums are in host memory anyway: give the device that trains, as in "
            "device='cuda' with fake=True"
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in owned for p in params):
        raise ValueError("optimizer owns none of the model's trainable parameters")
    measure = _predict if fake else _measure
    outer = sys.exc_info()[1]
    peaks = measure(training, optimizer, size)
    # Some ops treat a single sample otherwise, and BatchNorm takes no batch of one.
    first = 2 if fake and size == 1 else size
    other = first // 2 if first >= 4 else 2 * first
    try:
        at_first = peaks if first == size else measure(training, optimizer, first)
        lines = _lines(first, at_first, other, measure(training, optimizer, other), fake)
    except BaseException as error:
        if other < size or not is_oom_error(error):
            raise
        let_go(error, outer)
        lines = _bounds(size, peaks)
    return _report(size, peaks, lines, fake)


def _lines(size: int, peaks: _Peaks, other: int, others: _Peaks, predicted: bool) -> list[tuple[float, float]]:
    """Lines over the batch size: what is alive at each moment of a step."""
    if len(peaks.moments) != len(others.moments):  # which ops run depends on the size
        lines = _bounds(size, peaks)
        for nbytes, fewer in ((peaks.training, others.training), (peaks.update, others.update)):
            growth = max(0.0, (nbytes - fewer) / (size - other))
            lines.append((nbytes - growth * size, growth))
        return lines
    # What the allocator rounds up stays, and what ops allocate inside, which is measured alone, goes on growing.
    more, at_other = (found.total - max(found.moments) for found in (peaks, others))
    inside = 0.0 if predicted else max(0.0, (more - at_other) / (size - other))
    lines = []
    for nbytes, fewer in zip(peaks.moments, others.moments, strict=True):
        growth = inside + min(max(0.0, (nbytes - fewer) / (size - other)), nbytes / size)
        lines.append((nbytes + more - growth * size, growth))
    return lines


def _bounds(size: int, peaks: _Peaks) -> list[tuple[float, float]]:
    """Lines that no larger batch exceeds, from one size: as if gradients and casts of weights grew, too."""
    fixed = min(peaks.training, peaks.parameters + peaks.accumulators + peaks.optimizer)
    return [(fixed, (peaks.training - fixed) / size), (peaks.update, 0.0)]


def _report(size: int, peaks: _Peaks, lines: list[tuple[float, float]], predicted: bool) -> MemoryReport:
    parts = {part: getattr(peaks, part) for part in PARTS[:4]}
    fixed = sum(parts.values())
    total = max(peaks.total, fixed)
    activations = min(peaks.forward, total - fixed)
    largest: list[tuple[float, float]] = []
    for line in sorted(lines, reverse=True):
        if not largest or line[1] > largest[-1][1]:  # else one that begins higher and grows as fast is always above it
            largest.append(line)
    return MemoryReport(
        batch_size=size,
        **parts,
        activations=activations,
        workspace=total - fixed - activations,
        per_sample=largest[-1][1],
        training_peak=peaks.training,
        predicted=predicted,
        lines=tuple(largest),
        host=peaks.host,
    )


def _measure(training: Training, optimizer: Optimizer, size: int) -> _Peaks:
    snapshot = training.snapshot()
    snapshot.include(optimizer)
    device, memory = training.device, memory_of(training.device, None)
    memory.let_go()
    meter = Meter(memory, snapshot, BLOCK if devices.counts_memory(device) else 1, device)
    try:
        for param in training.model.parameters():
            param.grad = None
        with torch.inference_mode(False), torch.enable_grad(), meter:
            return _train(training, optimizer, size, meter, predicts=False)
    finally:
        snapshot.restore()


def _predict(training: Training, optimizer: Optimizer, size: int) -> _Peaks:
    fakes = FakeDevice(training.device)
    model, optimizer = fakes.copy(training.model, optimizer)
    faked = dataclasses.replace(training, model=model, device=fakes.device)
    # Batches may be made with real random generators, and a loss function have real parameters.
    snapshot = dataclasses.replace(training, model=nn.Module()).snapshot()
    meter = FakeMeter(fakes.device, snapshot, BLOCK if devices.is_accelerator(training.device) else 1)
    try:
        with _plain_layers(), fakes.mode, torch.inference_mode(False), torch.enable_grad(), meter:
            return _train(faked, optimizer, size, meter, predicts=True)
    finally:
        snapshot.restore()


@contextmanager
def _plain_layers() -> Iterator[None]:
    """Run recurrent layers op by op: fake kernels of oneDNN and cuDNN say that they keep nothing for backward.

    Torch's own contexts set precisions, too, which warns where there is nothing to set.
    """
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)


def draw_memory(path: Path | str, reports: Iterable[MemoryReport], limit: int | str | None = None) -> None:
    """Draw reports as stacked bars over batch sizes, with a device's limit as a line; a PNG of 1080 x 600 pixels.

    Args:
        path: Where to write it.
        reports: One for each bar.
        limit: Bytes of the device, as in "24GiB" or as a number of at least 2**20; None for no line.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: `reports` is no iterable of reports, or empty, or `limit` is no device's memory.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "accumkernels[demo]"') from error
    bars = list(expect_iterable(reports, "reports", "an iterable of MemoryReports"))
    if not all(isinstance(report, MemoryReport) for report in bars):
        raise wrong_type("reports", "an iterable of MemoryReports", reports)
    bars.sort(key=lambda report: report.batch_size)
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
        nbytes = as_bytes(limit, "limit", of_a_device=True)
        axes.axhline(nbytes / 1e6, color="#D55E00", linestyle="--", label=f"limit: {nbytes / 1e6:,.0f} MB")
    axes.set_title("Memory of a training step")
    axes.set_xlabel("micro-batch size (samples)")
    axes.set_ylabel("MB")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left")
    figure.savefig(path, format="png")


# ---- Trains without memory, on copies of model and optimizer made of fake tensors


class FakeDevice:
    """A device that holds only shapes.

    Args:
        device: The device to stand in for. If torch has no CUDA, autograd of fake CUDA tensors crashes the process, so
            the fakes are then CPU tensors, as they are for any other missing device.

    Attributes:
        device: The device of the fakes.
        mode: The FakeTensorMode to run them in.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device = device if cuda and devices.is_available(device) else torch.device("cpu")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._foreach = cuda  # torch.optim's own choice for real CUDA parameters

    def copy(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Copy both with fake parameters, buffers and states. Ties are kept, and no value is read."""
        memo: dict[int, Any] = {}
        held = tensors_of([list(optimizer.state.values()), optimizer.param_groups])
        for tensor in (*model.parameters(), *model.buffers(), *held):
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
        for module in model.modules():
            for value in module.__dict__.values():
                if isinstance(value, torch.Generator):  # deepcopy cannot copy it
                    memo[id(value)] = value.clone_state()
        model, optimizer = copy.deepcopy((model, optimizer), memo)
        for group in optimizer.param_groups:
            if self._foreach and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        return model, optimizer

    def _fake(self, tensor: Tensor) -> Tensor:
        # A step counter is a 0-d CPU tensor wherever its parameter is.
        device = tensor.device if tensor.dim() == 0 and tensor.device.type == "cpu" else self.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
            return fake


class FakeMeter(Meter):
    """Counts fake tensors, and supplies what only real tensors know.

    A number read from a fake tensor is 1; a missing device is replaced by the fakes'.
    """

    def __init__(self, device: torch.device, snapshot: Snapshot, granularity: int) -> None:
        super().__init__(Memory(), snapshot, granularity)
        self._device = device

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op on fakes."""
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta", self._device.type):
            kwargs = {**kwargs, "device": self._device}
        return super().call(func, args, kwargs)
