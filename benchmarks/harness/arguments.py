"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Collection

import torch

from accumkernels.ops import native


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
