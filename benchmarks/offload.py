"""What sums in host memory cost: time of the host, bytes over the bus, and bytes of the device.

    python -m benchmarks.offload [--parameters 33554432] [--threads 1,2] [--csv FILE]

With `FusedAccumulator(cpu_offload=True)` the host adds every micro-batch and ends every window, on bf16 gradients and
fp32 masters: both are timed by the code that does them, per parameter and beside `flat.mul_`, which reads and writes
as many sums as the memory allows. Adding moves 10 bytes per parameter (2 of the gradient, 8 of the sum), `mul_` 8; the
end clips, steps fused AdamW and rounds. Bytes of the device are the peak of a backward above what was there before it,
on the simulated device of the tests, for stock torch and with sums in host memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import accumkernels as ak

from .harness.machine import environment
from .harness.measure import Timer, median_and_spread
from .harness.results import Row, write_csv
from .harness.tables import Table, track

COLUMNS = (
    *("what", "parameters", "threads", "ns_per_parameter", "GB_per_s", "of_mul", "bytes_per_parameter", "samples"),
    *("device", "instruction_set", "torch", "python", "commit", "date"),
)
WIDTH = 1024  # of the square matrices whose sums are timed
SAMPLES = 9


def host(count: int, threads: int, samples: int) -> list[Row]:
    """Time an addition, a window's end and `mul_` for so many parameters."""
    torch.set_num_threads(threads)
    timer = Timer(torch.device("cpu"))
    params = [nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)) for _ in range(max(1, count // WIDTH**2))]
    grads = [torch.full_like(p, 1e-3) for p in params]
    acc = ak.FusedAccumulator(params, master_weights=True)
    optimizer = torch.optim.AdamW(acc.parameters(), fused=True)
    count = sum(p.numel() for p in params)

    def give() -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad

    seconds: dict[str, list[float]] = {"mul_": [], "add": [], "end": []}
    for index in range(samples + 1):
        give()
        acc.accumulate()  # the first of a window stores and does not read
        give()
        add = timer(acc.accumulate)
        (flat,) = acc.flat_buffers
        mul = timer(lambda flat=flat: flat.mul_(1.0))
        end = timer(lambda: acc.step(optimizer, max_norm=1.0))
        if index:  # the first makes the optimizer's state
            for name, value in (("mul_", mul), ("add", add), ("end", end)):
                seconds[name].append(value)
    acc.remove()
    moved = {"mul_": 8, "add": 10}
    medians = {name: median_and_spread(values)[0] for name, values in seconds.items()}
    rate = {name: nbytes * count / medians[name] for name, nbytes in moved.items()}
    return [
        {
            **{"what": name, "parameters": count, "threads": threads, "samples": samples},
            "ns_per_parameter": float(f"{1e9 * medians[name] / count:.3g}"),
            "GB_per_s": float(f"{rate[name] / 1e9:.3g}") if name in rate else None,
            "of_mul": float(f"{rate[name] / rate['mul_']:.2f}") if name in rate else None,
            "bytes_per_parameter": moved.get(name),
        }
        for name in seconds
    ]


def bus(count: int) -> list[Row]:
    """Bytes that cross the bus, which follow from the dtype."""
    return [
        {"what": f"bus, {way}", "parameters": count, "bytes_per_parameter": 2, "threads": None}
        for way in ("gradients, in each micro-batch", "weights, at each window's end")
    ]


def devices() -> list[Row]:
    """The peaks of `methods.offload_device`, in a process whose accelerator is the simulated device."""
    command = [sys.executable, "-m", "benchmarks.methods.offload_device"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    count, peaks = json.loads(done.stdout)
    return [
        {
            **{"what": f"device, {way}", "parameters": count, "threads": None},
            "bytes_per_parameter": round(peak / count, 3),
        }
        for way, peak in peaks.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=2**25, metavar="N", help="whose sums are timed")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="of each time; their median counts")
    parser.add_argument("--no-device", action="store_true", help="leave the simulated device out")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    found: list[Row] = []
    for threads in track([int(number) for number in given.threads.split(",")], "threads"):
        found += host(given.parameters, threads, given.samples)
    found += bus(int(str(found[0]["parameters"])))
    if not given.no_device:
        found += devices()
    about = environment(torch.device("cpu"))
    rows = [{column: {**about, **row}.get(column) for column in COLUMNS} for row in found]
    table = Table("sums in host memory", ["", "threads", "ns/parameter", "GB/s", "of mul_", "bytes/parameter"])
    for row in rows:
        shown = ("what", "threads", "ns_per_parameter", "GB_per_s", "of_mul", "bytes_per_parameter")
        table.add(*(row[name] for name in shown))
    table.print()
    write_csv(given.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
