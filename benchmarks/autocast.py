"""What the usual AMP loop pays for gradients, and what FusedAccumulator leaves of it.

    python -m benchmarks.autocast [--device cpu|cuda] [--csv FILE]

fp32 GPT-2 124M under autocast, GradScaler, clip_grad_norm_, fused AdamW, windows of K micro-batches of few tokens, so
that gradients rather than matrix products take the time. The gradient side of a window is its time less what it would
cost if nobody cast weights or accumulated anything: K times forward and backward of the same model whose weights are 16
bit where autocast computes in 16 bit, and whose gradients are dropped (`floor`), and one step of the same optimizer.
Left in it: casts of weights, widening, adding, unscaling, checking, norm, clip and zeroing. Methods take turns, window
by window. Of compiled models the graphs are counted that all windows took, with those that warm up.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .harness.arguments import command_line, usable
from .harness.case import DTYPES
from .harness.machine import environment
from .harness.measure import median_and_spread, milliseconds, take_turns
from .harness.results import Row, write_csv
from .harness.tables import Table
from .methods.training import SIZES, Batch, Fused, Loop, Method, Size, Stock, batches, build

STOCK = "stock GradScaler + clip_grad_norm_"
METHODS = (
    Method(STOCK, Stock, {"scale_loss": True}),
    Method('FusedAccumulator, release="microbatch"', Fused, {"scale_loss": True, "release": "microbatch"}),
    Method(
        "FusedAccumulator, fuse_weight_gradients=False", Fused, {"scale_loss": True, "fuse_weight_gradients": False}
    ),
    Method("FusedAccumulator, fused weight gradients", Fused, {"scale_loss": True, "fuse_weight_gradients": True}),
    Method("FusedAccumulator, defaults", Fused, {"scale_loss": True}),
)
FLOOR, OPTIMIZER = "floor: forward and backward, K times", "fused AdamW"
COLUMNS = (
    *("model", "parameters", "method", "device", "dtype", "micro_batches", "tokens_per_micro_batch"),
    *("tokens_per_second", "ms_median", "ms_p10", "ms_p90", "gradient_side_ms", "stock_to_this", "share_of_window"),
    *("fused", "in_16_bits", "graphs"),
    *("samples", "threads", "instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


def floor(
    size: Size, dtype: torch.dtype, device: torch.device, compiled: bool = False
) -> Callable[[list[Batch]], None]:
    """Forward and backward under autocast that has nothing to cast, and whose gradients are dropped."""
    torch.manual_seed(0)
    with torch.device(device):
        model = size.model()
        model.head = nn.Linear(size.width, size.vocabulary, bias=False)  # no longer the embedding, which stays fp32
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    if compiled:
        model.compile()
    params = list(model.parameters())

    def window(data: list[Batch]) -> None:
        for batch in data:
            with torch.autocast(device.type, dtype=dtype):
                loss = model(*batch)
            torch.autograd.grad(loss, params)

    return window


def optimizer_step(size: Size, device: torch.device) -> Callable[[], object]:
    """A fused AdamW over the model, with gradients."""
    with torch.device(device):
        params = list(size.model().parameters())
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return torch.optim.AdamW(params, lr=1e-4, fused=True).step


def windows(
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    micro_batches: int,
    repetitions: int,
    methods: Sequence[Method] = METHODS,
    compiled: bool = False,
) -> tuple[dict[str, list[float]], dict[str, Row]]:
    """Seconds of every window, by method, of the floor and the optimizer too; and shares and graphs, by method."""
    data = batches(size, micro_batches, device)
    loops: dict[str, Loop] = {method.name: build(method, size.model, dtype, device, compiled) for method in methods}
    bare, step = floor(size, dtype, device, compiled), optimizer_step(size, device)
    calls: dict[str, Callable[[], object]] = {
        **{name: functools.partial(loop.window, data) for name, loop in loops.items()},
        FLOOR: lambda: bare(data),
        OPTIMIZER: step,
    }
    seconds, graphs = take_turns(calls, device, repetitions, "windows")
    seen: dict[str, Row] = {name: {**loop.ways()} for name, loop in loops.items()}
    for name in loops if compiled else ():
        seen[name]["graphs"] = graphs[name]
    return seconds, seen


def rows(of_windows: dict[str, list[float]], micro_batches: int, common: Row, seen: dict[str, Row]) -> list[Row]:
    """A row per method, the floor and the optimizer among them."""
    medians = {name: median_and_spread(found)[0] for name, found in of_windows.items()}
    rest = medians[FLOOR] + medians[OPTIMIZER]
    found: list[Row] = []
    for name, seconds in of_windows.items():
        added: Row = {"method": name, "samples": len(seconds), **milliseconds(seconds), **common, **seen.get(name, {})}
        if name not in (FLOOR, OPTIMIZER):
            side = medians[name] - rest
            tokens = int(str(common["tokens_per_micro_batch"])) * micro_batches
            added["tokens_per_second"] = float(f"{tokens / medians[name]:.3g}")
            added["gradient_side_ms"] = float(f"{side * 1e3:.4g}")
            added["stock_to_this"] = float(f"{(medians[STOCK] - rest) / side:.3g}")
            added["share_of_window"] = float(f"{side / medians[name]:.3g}")
        found.append(added)
    return [{column: r.get(column) for column in COLUMNS} for r in found]


def show(found: Sequence[Row]) -> None:
    """Print the rows as a table."""
    first = found[0]
    title = f"{first['model']}, {first['dtype']}, {first['micro_batches']} micro-batches of "
    title += f"{first['tokens_per_micro_batch']} tokens; torch {first['torch']}, {first['device']}"
    headers = ("method", "tokens/s", "ms", "p10 to p90", "gradient side, ms", "stock to this", "share of window")
    table = Table(title, headers)
    for r in found:
        cells = [r["tokens_per_second"], r["ms_median"], f"{r['ms_p10']:g} to {r['ms_p90']:g}"]
        cells += [r[c] for c in ("gradient_side_ms", "stock_to_this", "share_of_window")]
        table.add(r["method"], *cells)
    table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    parser.add_argument("--model", default="gpt2", choices=list(SIZES))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of a micro-batch")
    parser.add_argument("--methods", default="", help="comma-separated parts of names: only these methods, and stock")
    parser.add_argument("--no-scaler", action="store_true", help="without a GradScaler")
    parser.add_argument("--compile", action="store_true", help="models are compiled by torch.compile")
    parser.add_argument("--windows", type=int, default=15, help="timed, per method")
    arguments = parser.parse_args(argv)
    device = usable(arguments.device, arguments.threads)
    size = SIZES[arguments.model]._replace(length=arguments.tokens, samples=1)
    dtype, k = DTYPES[arguments.dtype], arguments.micro_batches
    about = environment(device)
    wanted, scale = arguments.methods.split(","), not arguments.no_scaler
    methods = [
        m._replace(options={**m.options, "scale_loss": scale})
        for m in METHODS
        if m.name == STOCK or any(part in m.name for part in wanted)
    ]
    label = arguments.model + (", torch.compile" if arguments.compile else "")
    label += "" if scale else ", no GradScaler"
    common: Row = {"model": label, "parameters": size.parameters, "dtype": arguments.dtype, "micro_batches": k}
    common.update(tokens_per_micro_batch=arguments.tokens, **about)
    of_windows, seen = windows(size, dtype, device, k, arguments.windows, methods, arguments.compile)
    found = rows(of_windows, k, common, seen)
    show(found)
    write_csv(arguments.csv, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
