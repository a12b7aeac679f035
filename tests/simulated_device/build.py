"""Builds the simulated device's library with g++, once for each torch and each state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
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
    """The library for the torch that runs; what is not built yet is built.

    Raises:
        RuntimeError: The compiler's output, where it fails.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of pytest want it at once
        objects = list(threads.map(_object, sorted(SOURCES.glob("*.cpp"))))
    whole = hashlib.sha256(" ".join(made.name for made in objects).encode())
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return _made(f"device-{whole.hexdigest()[:16]}.so", [*objects, "-shared", *libraries, "-lc10", "-ltorch_cpu"])


def _object(source: Path) -> Path:
    text = source.read_bytes()
    digest = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode() + text)
    if b'#include "' in text:
        for header in sorted(SOURCES.glob("*.h")):
            digest.update(header.read_bytes())
    headers = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    return _made(f"{source.stem}-{digest.hexdigest()[:16]}.o", [*FLAGS, *headers, "-c", source])


def _made(name: str, arguments: list[object]) -> Path:
    """A file of the build folder, where it appears whole."""
    made = BUILD / name
    if not made.exists():
        unfinished = BUILD / f"{os.getpid()}-{name}"
        command = [compiler() or "g++", *map(str, arguments), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        unfinished.rename(made)
    return made
