"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Collection
from pathlib import Path

import torch

from accumkernels.ops import native


def command_line(doc: str | None) -> ArgumentParser:
    """A parser that knows where to measure and where to write; the first line of `doc` describes the command."""
    parser = ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2, help="on the CPU")
    parser.add_argument("--csv", type=Path, help="write the rows here")
    return parser


def listed(parser: ArgumentParser, option: str, text: str, known: Collection[str]) -> list[str]:
    """A comma-separated option; the parser ends the program where an entry is not known."""
    entries = text.split(",")
    for entry in entries:
        if entry not in known:
            parser.error(f"--{option}: {entry!r} is not one of {', '.join(known)}")
    return entries


def usable(name: str, threads: int) -> torch.device:
    """The device, and so many threads on the CPU; ends the program where native kernels do not work on it."""
    device = torch.device(name)
    cause = native.unavailable(device)
    if cause is not None:
        print(f"nothing to measure: {cause}", file=sys.stderr)
        raise SystemExit(1)
    torch.set_num_threads(threads)
    return device
