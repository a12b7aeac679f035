"""What Nsight Compute says about each kernel: its command line, and its table."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "load_sectors_per_request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "store_sectors_per_request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
    "registers": "launch__registers_per_thread",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
# CUDA's kernels are in our namespace; Triton's have a name and no more.
_KERNELS = r"regex:accumkernels::|^(accumulate|account|check_finite|check_weight|norm|norm_total|scaled_copy)_kernel"
# To the units of the columns above: ncu chooses one per metric.
_UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6}
_UNITS |= {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def command(ncu: str, target: list[str]) -> list[str]:
    """Profile a program; the clocks stay as they are."""
    metrics = ",".join(METRICS.values())
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--kernel-name-base", "demangled"]
    return [ncu, *options, "--kernel-name", _KERNELS, "--metrics", metrics, *target]


def rows(log: str) -> Iterator[dict[str, object]]:
    """One per launch; figures are None where ncu has none.

    Raises:
        ValueError: there is no table in the log.
    """
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        raise ValueError("ncu wrote no table")
    table = csv.DictReader(line for line in lines[starts[0] :] if line.startswith('"'))
    units = next(table, None) or {}
    for row in table:
        found: dict[str, object] = {"kernel": row["Kernel Name"]}
        for column, metric in METRICS.items():
            text = (row.get(metric) or "").replace(",", "")
            try:
                found[column] = float(f"{float(text) * _UNITS.get(units.get(metric) or '', 1.0):.5g}")
            except ValueError:  # "n/a", or a metric that this GPU does not have
                found[column] = None
        yield found


def write(log: str, path: Path, backend: str) -> None:
    """The table as a CSV."""
    found = [{"backend": backend, **row} for row in rows(log)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["backend", "kernel", *METRICS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
