"""Timing methods against each other, and what a result needs said about the machine."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

Methods = dict[str, Callable[[], object]]


def in_turn(methods: Methods, repetitions: int, wait: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each method, `repetitions` times in turn, so that what disturbs the machine disturbs all alike.

    `wait` returns when the device has finished.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repetition in range(repetitions + 2):
        for name, method in methods.items():
            wait()
            start = time.perf_counter()
            method()
            wait()
            elapsed = time.perf_counter() - start
            if repetition >= 2:  # the first two rounds warm up
                seconds[name].append(elapsed)
    return seconds


def median_and_spread(seconds: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return statistics.median(seconds), deciles[0], deciles[8]


def cpu_model() -> str:
    """The processor's name and, as some names say little, its family and model numbers."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if "model name" not in fields:
        return platform.machine()
    return f"{fields['model name']} (family {fields.get('cpu family', '?')} model {fields.get('model', '?')})"


def git(*arguments: str) -> str:
    """What git says about this checkout; nothing where there is none."""
    folder = str(Path(__file__).resolve().parent)
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Versions, commit and date: the same for all rows of a run."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if changed else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
