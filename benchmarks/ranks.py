"""Data parallel windows: time and bytes against DistributedDataParallel, on ranks of one machine.

    python -m benchmarks.ranks [--device cpu|cuda] [--ranks 2,4] [--simulate] [--csv FILE]

On the CPU the ranks are processes that share its cores and talk gloo over the loopback device; on GPUs there is one
rank per GPU, with NCCL. Every method trains the same model on the same random tokens with fused SGD; they take turns,
window by window, and a window takes as long as its slowest rank. Bytes are what the loopback device sent in a window,
for each rank, headers included (nothing else may use it); NCCL's are not seen there. `held_MB` is what rank 0 holds
between windows: parameters, buckets, flat buffers and the optimizer's state. `difference` holds a method to the
first: how far parameters are apart after two windows, relative to how far they have moved. `--simulate` records what
is sent on 2 to 16,384 ranks: see simulated.py.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accumkernels.demo.gpt import GPT

from . import simulated
from .harness.arguments import command_line
from .harness.machine import environment
from .harness.measure import median_and_spread, milliseconds
from .harness.processes import free_ports, start
from .harness.results import Row, groups, write_csv, write_json
from .harness.tables import Table
from .methods.ranks import METHODS, NO_SYNC, Window
from .methods.training import SIZES, batches

COLUMNS = (
    *("model", "parameters", "method", "device", "backend", "ranks", "micro_batches", "tokens_per_micro_batch"),
    *("ms_median", "ms_p10", "ms_p90", "ratio_to_no_sync", "sent_MB", "held_MB", "difference", "windows", "threads"),
    *("instruction_set", "driver", "cuda", "triton", "torch", "python", "commit", "date"),
)


class Setting(NamedTuple):
    """What is trained, and how long."""

    model: str
    device: str
    micro_batches: int
    windows: int
    threads: int


def _sent() -> int | None:
    """Bytes that the loopback device has sent since the machine started; None where nobody says."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    found = [line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")]
    return int(found[0][8]) if found else None


def _model(setting: Setting, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return SIZES[setting.model].model().to(device)


def _values(model: nn.Module) -> Tensor:
    """All parameters as one vector; collective where they are sharded."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


class _Malloc(ctypes.Structure):
    _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))


def _held(device: torch.device) -> int:
    """Bytes that are allocated: on the CPU what glibc's malloc has given out to anybody, torch's C++ included."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    found = mallinfo2()
    return found.field_4 + found.field_7  # in arenas, and in mappings of their own


def _rank(rank: int, ranks: int, port: int, setting: Setting) -> tuple[dict[str, Any], ...]:
    """One process: every method, in turns; by method, seconds, megabytes sent and held, and the difference."""
    torch.set_num_threads(setting.threads)
    device = torch.device("cuda", rank) if setting.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", timedelta(minutes=10), world_size=ranks, rank=rank
    )
    data = batches(SIZES[setting.model], setting.micro_batches, device, seed=rank)

    def timed(window: Window) -> float:
        torch.distributed.barrier()
        start = time.perf_counter()
        window(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
        return seconds.item()

    windows: dict[str, Window] = {}
    trained: dict[str, Tensor] = {}
    sent: dict[str, float | None] = {}
    held: dict[str, float] = {}
    METHODS[NO_SYNC](_model(setting, device))(data)  # what libraries allocate once is nobody's
    for name, method in METHODS.items():
        start = _values(_model(setting, device))
        gc.collect()
        before = _held(device)
        model = _model(setting, device)
        windows[name] = method(model)
        for _ in range(2):  # DistributedDataParallel rebuilds its buckets after the first
            windows[name](data)
        gc.collect()
        held[name] = (_held(device) - before) / 1e6
        trained[name] = _values(model) - start
        torch.distributed.barrier()
        sent_before = _sent() if backend == "gloo" else None
        torch.distributed.barrier()
        windows[name](data)
        torch.distributed.barrier()
        after = _sent()
        sent[name] = None if sent_before is None or after is None else (after - sent_before) / ranks / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in windows}
    names = list(windows)
    for turn in range(setting.windows):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]  # nobody always goes first
            seconds[name].append(timed(windows[name]))
    first = trained[NO_SYNC]
    apart = {name: ((moved - first).norm() / first.norm()).item() for name, moved in trained.items()}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return seconds, sent, held, apart


def measure(ranks: int, setting: Setting, about: Row) -> list[Row]:
    """A row per method."""
    (seconds, sent, held, apart), *_ = start(_rank, (ranks, *free_ports(1), setting), ranks)
    size = SIZES[setting.model]
    found = []
    for name, samples in seconds.items():
        times: Row = {}
        if samples:
            ratio = median_and_spread(samples)[0] / median_and_spread(seconds[NO_SYNC])[0]
            times = {**milliseconds(samples), "ratio_to_no_sync": float(f"{ratio:.3f}")}
        row: Row = {
            **about,
            **{"model": setting.model, "parameters": size.parameters, "method": name, "ranks": ranks},
            **{"backend": "nccl" if setting.device == "cuda" else "gloo", "micro_batches": setting.micro_batches},
            **{"tokens_per_micro_batch": size.tokens, "threads": setting.threads},
            **times,
            "windows": len(samples),
            "sent_MB": None if sent[name] is None else float(f"{sent[name]:.4g}"),
            "held_MB": float(f"{held[name]:.4g}"),
            "difference": float(f"{apart[name]:.2g}"),
        }
        found.append({column: row.get(column) for column in COLUMNS})
    return found


def show(rows: Sequence[Row]) -> None:
    """A table per number of ranks."""
    for group in groups(rows, "model", "ranks", "micro_batches").values():
        first = group[0]
        title = f"{first['ranks']} ranks ({first['backend']}), {first['model']}, {first['parameters']:,} parameters, "
        title += f"{first['micro_batches']} micro-batches of {first['tokens_per_micro_batch']} tokens, "
        title += f"{first['threads']} threads each; torch {first['torch']}, {first['device']}"
        headers = ("method", "ms a window", "p10 to p90", "to no_sync", "MB sent a rank", "MB held", "difference")
        table = Table(title, headers)
        for r in group:
            times = ("", "", "")
            if r["ms_median"] is not None:
                times = (f"{r['ms_median']:g}", f"{r['ms_p10']:g} to {r['ms_p90']:g}", f"{r['ratio_to_no_sync']:g}")
            sent = "" if r["sent_MB"] is None else f"{r['sent_MB']:g}"
            table.add(str(r["method"]), *times, sent, f"{r['held_MB']:g}", f"{r['difference']:g}")
        table.print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command_line(__doc__)
    parser.set_defaults(threads=1)  # of each rank
    parser.add_argument("--ranks", help="comma-separated (default: 2,4; on GPUs as many as there are)")
    parser.add_argument("--model", choices=list(SIZES), help="default: gpt2 on GPUs, small on the CPU")
    parser.add_argument("--micro-batches", default="8", help="per window, comma-separated (default: 8)")
    parser.add_argument(
        "--windows", type=int, default=20, help="timed, per method; 0: bytes alone, which a busy machine counts as well"
    )
    parser.add_argument("--simulate", action="store_true", help="what is sent on 2 to 16,384 ranks that do not exist")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if arguments.simulate:
        rows = simulated.measured(arguments)
        write_csv(arguments.csv, rows)
        write_json(arguments.json, rows)
        return 0
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus == 0:
        print("nothing to measure: there is no GPU", file=sys.stderr)
        return 1
    ranks = arguments.ranks or ("2,4" if arguments.device == "cpu" else str(gpus))
    counts = [int(count) for count in ranks.split(",")]
    if arguments.device == "cuda" and max(counts) > gpus:
        parser.error(f"--ranks: there are {gpus} GPUs")
    model = arguments.model or ("gpt2" if arguments.device == "cuda" else "small")
    about = environment(torch.device(arguments.device))
    found: list[Row] = []
    for count in counts:
        for micro_batches in map(int, arguments.micro_batches.split(",")):
            setting = Setting(model, arguments.device, micro_batches, arguments.windows, arguments.threads)
            added = measure(count, setting, about)
            show(added)
            found += added
            write_csv(arguments.csv, found)
            write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
