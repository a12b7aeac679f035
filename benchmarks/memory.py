"""How long gradients live: peaks of their bytes, and a picture of everything in memory over one window.

    python -m benchmarks.memory [--device cpu|cuda] [--csv FILE] [--timeline FILE]
    python -m benchmarks.pictures FILE

A deep MLP and a GPT of the demo's size are trained with stock accumulation, with `grad_dtype`, and with
FusedAccumulator in both release modes, with and without masters. Tensors are counted op by op, once per storage, in the
second window, when the optimizer's state exists. "gradients" are those of a micro-batch, "accumulators" what holds the
window's sum: stock's `.grad`, our flat buffers. On a GPU the allocator's peak of a run without counting stands beside.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .harness.arguments import command_line, listed, usable
from .harness.case import DTYPES
from .harness.machine import environment
from .harness.results import Row, groups, write_csv
from .harness.tables import Table, track
from .harness.timeline import KINDS, Timeline, thinned
from .methods.training import METHODS, SIZES, STOCK, Batch, Fused, Loop, Method, Size, build

SMALL_BUCKETS = 2**20
POINTS = 100  # of a method in the picture
COLUMNS = (
    *("model", "parameters", "method", "device", "dtype", "micro_batches", "gradients_peak_MB", "accumulators_MB"),
    *("peak_MB", "gradients_to_stock", "peak_to_stock", "cuda_peak_MB", "threads", "instruction_set", "driver"),
    *("cuda", "triton", "torch", "python", "commit", "date"),
)


class MLP(nn.Module):
    """Square layers, as deep as gradients need to be many; `forward(x, y)` is the mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map `[samples, width]` to a scalar."""
        for layer in self.layers:
            x = nn.functional.relu(layer(x))
        return nn.functional.mse_loss(x.float(), y)


class Trained(NamedTuple):
    """A model, and how its batches are made."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.device, torch.Generator], Batch]


def _mlp(width: int, depth: int, samples: int) -> Trained:
    def batch(device: torch.device, generator: torch.Generator) -> Batch:
        x, y = (torch.randn(samples, width, device=device, generator=generator) for _ in range(2))
        return x, y

    return Trained(lambda: MLP(width, depth), batch)


def _gpt(size: Size, samples: int, length: int) -> Trained:
    def batch(device: torch.device, generator: torch.Generator) -> Batch:
        x, y = (torch.randint(size.vocabulary, (samples, length), device=device, generator=generator) for _ in range(2))
        return x, y

    return Trained(size.model, batch)


MODELS = {
    "deep MLP": _mlp(width=1024, depth=32, samples=24),
    "demo GPT": _gpt(SIZES["small"], samples=7, length=96),
    "gpt2": _gpt(SIZES["gpt2"], samples=7, length=96),
    "tiny": _mlp(width=64, depth=6, samples=5),
}
BUCKETED = Method(
    f'FusedAccumulator, release="backward", not fused, {SMALL_BUCKETS // 2**20} MiB buckets',
    Fused,
    {"release": "backward", "fuse_weight_gradients": False, "bucket_bytes": SMALL_BUCKETS},
)


def _methods() -> list[Method]:
    """Those of the benchmark of training, and one with smaller buckets after the one with the default."""
    found = list(METHODS)
    place = next(i for i, m in enumerate(found) if "not fused" in m.name) + 1
    return [*found[:place], BUCKETED, *found[place:]]


def _held(loop: Loop) -> dict[str, Callable[[], Iterable[Tensor]]]:
    """Who holds what in a loop."""
    accumulator = getattr(loop, "accumulator", None)
    stepped = [p for group in loop.optimizer.param_groups for p in group["params"]]  # type: ignore[attr-defined]
    params = [*loop.model.parameters(), *loop.model.buffers(), *stepped]

    def sums() -> Iterable[Tensor]:
        if accumulator is not None:
            return list(accumulator.flat_buffers)
        return [p.grad for p in params if p.grad is not None]

    def state() -> Iterable[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(list(loop.optimizer.state.values()))  # type: ignore[attr-defined]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    return {"parameters": lambda: params, "optimizer state": state, "accumulators": sums}


def record(
    method: Method, trained: Trained, dtype: torch.dtype, device: torch.device, data: list[Batch]
) -> list[dict[str, int]]:
    """Bytes by kind after every op of the second window."""
    gc.collect()
    loop = build(method, trained.model, dtype, device)
    timeline = Timeline(loop.model, _held(loop))
    timeline.add([*loop.model.parameters(), *loop.model.buffers()])
    timeline.add(p for group in loop.optimizer.param_groups for p in group["params"])  # type: ignore[attr-defined]
    accumulator = getattr(loop, "accumulator", None)
    if accumulator is not None:
        timeline.add(accumulator.flat_buffers)
    with timeline, timeline.watch():
        loop.window(data)
        timeline.recording = True
        loop.window(data)
    return timeline.points


def cuda_peak(method: Method, trained: Trained, dtype: torch.dtype, device: torch.device, data: list[Batch]) -> int:
    """The allocator's peak of the second window, model included, data not."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    loop = build(method, trained.model, dtype, device)
    loop.window(data)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    loop.window(data)
    return torch.cuda.max_memory_allocated(device) - before


def _megabytes(nbytes: float) -> float:
    return float(f"{nbytes / 1e6:.5g}")


def measure(name: str, dtype: str, device: torch.device, micro_batches: int, about: Row) -> tuple[list[Row], list[Row]]:
    """All methods on one model: rows of peaks, and rows of the picture."""
    trained = MODELS[name]
    generator = torch.Generator(device).manual_seed(1)
    data = [trained.batch(device, generator) for _ in range(micro_batches)]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in trained.model().parameters())
    peaks: list[Row] = []
    points: list[Row] = []
    common: dict[str, Any] = {"model": name, "parameters": parameters, "dtype": dtype, "micro_batches": micro_batches}
    for method in track(_methods(), f"{name}, {dtype}"):
        line = record(method, trained, DTYPES[dtype], device, data)
        peak = {kind: max(point[kind] for point in line) for kind in KINDS}
        row: Row = {**common, **about, "method": method.name}
        row["gradients_peak_MB"] = _megabytes(peak["gradients"])
        row["accumulators_MB"] = _megabytes(peak["accumulators"])
        row["peak_MB"] = _megabytes(max(sum(point.values()) for point in line))
        if device.type == "cuda":
            row["cuda_peak_MB"] = _megabytes(cuda_peak(method, trained, DTYPES[dtype], device, data))
        peaks.append(row)
        for at, point in enumerate(thinned(line, POINTS)):
            megabytes = {kind: _megabytes(point[kind]) for kind in KINDS}
            points.append({"model": name, "dtype": dtype, "method": method.name, "point": at, **megabytes})
    stock = next(row for row in peaks if row["method"] == STOCK)
    for row in peaks:
        for column, ratio in (("gradients_peak_MB", "gradients_to_stock"), ("peak_MB", "peak_to_stock")):
            row[ratio] = float(f"{row[column] / stock[column]:.3g}")  # type: ignore[operator]
    return [{column: row.get(column) for column in COLUMNS} for row in peaks], points


def show(rows: Sequence[Row]) -> None:
    """A table per model and dtype."""
    for group in groups(rows, "model", "dtype").values():
        first = group[0]
        title = f"{first['model']}, {first['parameters']:,} parameters, {first['dtype']}, {first['micro_batches']} "
        title += f"micro-batches; MB; torch {first['torch']}, {first['device']}"
        headers = ("method", "gradients, peak", "accumulators", "all, peak", "to stock", "CUDA peak")
        table = Table(title, headers)
        columns = ("gradients_peak_MB", "accumulators_MB", "peak_MB", "peak_to_stock", "cuda_peak_MB")
        for r in group:
            table.add(str(r["method"]), *("" if r[c] is None else f"{r[c]:,}" for c in columns))
        table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16", help="comma-separated: bf16, fp16 (default: bf16)")
    parser.add_argument("--models", default="deep MLP,demo GPT", help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--timeline", type=Path, help="write what the picture needs here")
    arguments = parser.parse_args(argv)
    dtypes = listed(parser, "dtype", arguments.dtype, ("bf16", "fp16"))
    models = listed(parser, "models", arguments.models, MODELS)
    device = usable(arguments.device, arguments.threads)
    about = environment(device)
    peaks: list[Row] = []
    points: list[Row] = []
    for dtype in dtypes:
        for name in models:
            some_peaks, some_points = measure(name, dtype, device, arguments.micro_batches, about)
            show(some_peaks)
            peaks += some_peaks
            points += some_points
            write_csv(arguments.csv, peaks)
            # Where it was measured is said once: the file has some thousand rows.
            write_csv(arguments.timeline, [{**row, **(about if row is points[0] else {})} for row in points])
    return 0


if __name__ == "__main__":
    sys.exit(main())
