"""How fast is one `accumulate`, against the memory limit and against every way eager torch has?

    python -m benchmarks.accumulate --csv benchmarks/results/accumulate_cpu.csv

Every method adds a list of 16-bit gradients into fp32 accumulators that already hold a sum (a later micro-batch). Ours
also multiplies by weight / loss_scale and checks for inf and nan, which the others leave to passes of their own. GB/s
counts what the job needs, 2 + 4 bytes read and 4 written per element, so that it compares across methods.

Each method runs in processes of its own, as a training program uses one of them, with the two limits in turn. Most of
the time of eager torch is its fp32 temporaries: glibc hands large ones back to the system and takes them anew, page by
page, at every call. In a process whose heap holds a free block of the size, or with a malloc tuned to keep it, they
cost only bandwidth. `kept temporaries` shows that case: 4 more bytes per element, allocated once.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from accumkernels.ops import native

from . import stream
from .measure import Methods, cpu_model, environment, in_turn, median_and_spread
from .shapes import SHAPES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROCESSES = 3  # of each method, spread over the run
MOST_TENSORS_TO_COMPILE = 300  # inductor takes minutes over thousands

OURS = "accumkernels"
MUL, STREAM, COPY = "limit: flat.mul_(1.0)", "limit: streaming loop 6:4", "limit: device copy"
KEPT, COMPILED = "kept temporaries: _foreach_copy_, _foreach_add_", "torch.compile'd loop"


class Case:
    """Gradients of one dtype, the flat buffer with everything `accumulate_` needs, and views of it for the others."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        self.grads = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        self.numel = sum(g.numel() for g in self.grads)
        starts, end = [], 0
        for g in self.grads:
            starts.append(end)
            end += -(-g.numel() // 32) * 32  # 128-byte aligned, as FusedAccumulator lays them out
        self.flat = torch.zeros(end, device=device)
        self.views = [self.flat[s : s + g.numel()].view(g.shape) for s, g in zip(starts, self.grads, strict=True)]
        self.layout_host = torch.tensor([[s, g.numel()] for s, g in zip(starts, self.grads, strict=True)])
        self.layout = self.layout_host.to(device)
        self.state = torch.zeros(4, dtype=torch.float64, device=device)
        self.flags = torch.zeros(len(shapes), dtype=torch.int32, device=device)
        self.loss_scale = torch.tensor(1024.0, device=device)
        self.segments = list(range(len(shapes)))
        self.no_overwrite = [False] * len(shapes)
        self.flat_grad = torch.ones(
            end, dtype=dtype, device=device
        )  # not zeros: untouched pages would be no memory at all


def ours(case: Case) -> Callable[[], object]:
    """The op with everything a window needs: loss scale, flags, counters."""
    return lambda: native.accumulate_(
        case.flat,
        case.state,
        case.grads,
        case.segments,
        case.no_overwrite,
        case.layout,
        case.layout_host,
        flags=case.flags,
        loss_scale=case.loss_scale,
    )


def mixed_add(views: list[Tensor], grads: list[Tensor]) -> None:
    """The loop that anybody writes first."""
    for view, grad in zip(views, grads, strict=True):
        view.add_(grad)


def cast_and_add(views: list[Tensor], grads: list[Tensor]) -> None:
    """The same with the cast spelled out."""
    for view, grad in zip(views, grads, strict=True):
        view.add_(grad.float())


def compiled(case: Case) -> Callable[[], object]:
    """The first loop under torch.compile, which fuses cast and addition."""
    function = torch.compile(mixed_add, fullgraph=True, dynamic=False)
    return lambda: function(case.views, case.grads)


def autograd_into_views(case: Case) -> Callable[[], object]:
    """`p.grad_dtype = None` and a preset flat fp32 `.grad`: backward's own AccumulateGrad nodes."""
    params = []
    for view, grad in zip(case.views, case.grads, strict=True):
        param = torch.nn.Parameter(torch.empty_like(grad))
        param.grad_dtype = None
        param.grad = view
        params.append(param)
    return lambda: torch.autograd.backward(params, case.grads)


def kept_temporaries(case: Case) -> Callable[[], object]:
    """Eager torch without allocations, for 4 more bytes of memory per element."""
    temporaries = [torch.empty_like(view) for view in case.views]

    def run() -> None:
        torch._foreach_copy_(temporaries, case.grads)
        torch._foreach_add_(case.views, temporaries)

    return run


# Name: how to set the method up, and the kernels that it starts per tensor (0: one, or few, for the whole list).
METHODS: dict[str, tuple[Callable[[Case], Callable[[], object]], int]] = {
    OURS: (ours, 0),
    "mixed add_": (lambda case: lambda: mixed_add(case.views, case.grads), 1),
    "cast and add_": (lambda case: lambda: cast_and_add(case.views, case.grads), 2),
    "_foreach_add_, mixed": (lambda case: lambda: torch._foreach_add_(case.views, case.grads), 1),
    "_foreach_add_, cast": (lambda case: lambda: torch._foreach_add_(case.views, [g.float() for g in case.grads]), 2),
    "grad_dtype=None, flat .grad": (autograd_into_views, 1),
    KEPT: (kept_temporaries, 2),
    COMPILED: (compiled, 0),
}
EAGER = [name for name in METHODS if name not in (OURS, KEPT, COMPILED)]


def limits(case: Case, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """What no method can beat, with the bytes each moves per element."""
    multiply = (lambda: case.flat.mul_(1.0), 8)
    if device.type == "cuda":
        source = torch.ones_like(case.flat)
        return {MUL: multiply, COPY: (lambda: case.flat.copy_(source), 8)}
    streaming = stream.build()
    return {MUL: multiply, STREAM: (lambda: streaming(case.flat, case.flat_grad), 10)}


def run_method(
    method: str, shapes: str, dtype: str, device_name: str, threads: int, repetitions: int
) -> dict[str, list[float]]:
    """In a process of its own: seconds of the method and of the limits."""
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    case = Case(SHAPES[shapes](), DTYPES[dtype], device)
    calls: Methods = {name: call for name, (call, _) in limits(case, device).items()}
    calls[method] = METHODS[method][0](case)
    return in_turn(calls, repetitions, torch.cuda.synchronize if device.type == "cuda" else lambda: None)


def measure(shapes: str, dtype: str, device: str, threads: int, repetitions: int) -> list[dict[str, object]]:
    """One row per method and limit. The limits are those of the processes that ran ours."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES[shapes]()]
    names = [name for name in METHODS if name != COMPILED or len(sizes) <= MOST_TENSORS_TO_COMPILE]
    second_limit = COPY if device == "cuda" else STREAM
    seconds: dict[str, list[float]] = {MUL: [], second_limit: [], **{name: [] for name in names}}
    with Progress(transient=True) as progress:
        task = progress.add_task(f"{shapes} {dtype}", total=PROCESSES * len(names))
        for _ in range(PROCESSES):
            for name in names:
                progress.update(task, description=f"{shapes} {dtype}: {name}")
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    result = process.submit(run_method, name, shapes, dtype, device, threads, repetitions).result()
                for measured in (MUL, second_limit, OURS) if name == OURS else (name,):
                    seconds[measured] += result[measured]
                progress.advance(task)

    elements = sum(sizes)
    medians = {name: median_and_spread(times)[0] for name, times in seconds.items()}
    rate = {name: (8 if name in (MUL, COPY) else 10) * elements / median / 1e9 for name, median in medians.items()}
    limit = max(rate[MUL], rate[second_limit])
    rows: list[dict[str, object]] = []
    for name, times in seconds.items():
        median, p10, p90 = median_and_spread(times)
        rows.append(
            {
                "method": name,
                "device": torch.cuda.get_device_name() if device == "cuda" else cpu_model(),
                "dtype": dtype,
                "shapes": shapes,
                "tensors": len(sizes),
                "elements": elements,
                "launches": (METHODS[name][1] * len(sizes) if name in METHODS else 0) or 1,
                "ms_median": f"{median * 1e3:.4g}",
                "ms_p10": f"{p10 * 1e3:.4g}",
                "ms_p90": f"{p90 * 1e3:.4g}",
                "GB_per_s": f"{rate[name]:.4g}",
                "fraction_of_limit": f"{rate[name] / limit:.3f}",
                "ratio_to_ours": f"{median / medians[OURS]:.2f}",
                "instruction_set": "cuda" if device == "cuda" else native.cpu_instruction_set(),
                "threads": threads,
                **environment(),
            }
        )
    return rows


def show(console: Console, rows: list[dict[str, object]]) -> None:
    """A table of one shape list and dtype, and under it what the table says."""
    first = rows[0]
    title = f"{first['shapes']}, {first['dtype']}: {first['tensors']:,} tensors, {first['elements']:,} elements; "
    title += f"{first['threads']} threads, torch {first['torch']}, {first['device']}"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("launches", "ms", "p10 to p90", "GB/s", "of the limit", "ratio to ours"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in rows:
        spread = f"{r['ms_p10']} to {r['ms_p90']}"
        cells = (r["launches"], r["ms_median"], spread, r["GB_per_s"], r["fraction_of_limit"], r["ratio_to_ours"])
        table.add_row(str(r["method"]), *map(str, cells), style="bold" if r["method"] == OURS else None)
    console.print(table)

    ratio = {str(r["method"]): float(str(r["ratio_to_ours"])) for r in rows}
    best = min(EAGER, key=ratio.__getitem__)
    text = f"accumkernels runs at {next(r['fraction_of_limit'] for r in rows if r['method'] == OURS)} of the limit and "
    text += f"{ratio[best]:.2f} times as fast as eager torch's best ({best}), {ratio[KEPT]:.2f} times as fast where "
    text += "eager torch keeps its temporaries"
    if COMPILED in ratio:
        text += f", {ratio[COMPILED]:.2f} times as fast as torch.compile"
    console.print(text + ".\n", soft_wrap=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="gpt2,tiny", help="comma-separated: gpt2, tiny (default: both)")
    parser.add_argument("--dtype", default="bf16,fp16", help="comma-separated: bf16, fp16 (default: both)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--repetitions",
        type=int,
        default=15,
        help=f"of each method in each of its {PROCESSES} processes; 20 times as many for tiny (default: 15)",
    )
    parser.add_argument("--csv", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    shapes, dtypes = arguments.shapes.split(","), arguments.dtype.split(",")
    for name, chosen, known in (("--shapes", shapes, SHAPES), ("--dtype", dtypes, DTYPES)):
        for choice in chosen:
            if choice not in known:
                parser.error(f"{name}: {choice!r} is not one of {', '.join(known)}")
    if arguments.repetitions < 1 or arguments.threads < 1:
        parser.error("--repetitions and --threads must be at least 1")
    cause = native.unavailable(torch.device(arguments.device))
    if cause is not None:
        print(f"nothing to measure: {cause}", file=sys.stderr)
        return 1

    console = Console(width=max(Console().width, 140))
    rows: list[dict[str, object]] = []
    for shape in shapes:
        for dtype in dtypes:
            repetitions = arguments.repetitions * (20 if shape == "tiny" else 1)
            added = measure(shape, dtype, arguments.device, arguments.threads, repetitions)
            show(console, added)
            rows += added
    if arguments.csv:
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"wrote {arguments.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
