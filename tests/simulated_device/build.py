"""Builds the simulated device's library with g++, once for each torch and each state of its sources.

All sources are compiled as one, since torch's headers take most of the time: 30 s on one core, and 75 s one by one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "simulated_device"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def compiler() -> str | None:
    """The path of g++, or of what CXX names."""
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """The library for the torch that runs; it is built unless it is there.

    Raises:
        RuntimeError: The compiler's output, where it fails.
    """
    digest = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    made = BUILD / f"device-{digest.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of pytest want it at once
        if not made.exists():
            _build(made)
    return made


def _build(made: Path) -> None:
    unfinished = made.with_suffix(".unfinished")
    headers = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    # The sources are standard input; "-x none" ends that what follows is a source.
    command = [compiler() or "g++", *FLAGS, *headers, "-x", "c++", "-", "-x", "none", "-shared", *libraries]
    whole = "".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    done = subprocess.run([*command, "-o", str(unfinished)], input=whole, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    unfinished.rename(made)
