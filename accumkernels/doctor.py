"""`python -m accumkernels`: what works on this machine, and why what does not work does not."""

from __future__ import annotations

import platform
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch

from . import __version__, ops
from .planning.fragmentation import allocator_advice
from .selftest import self_test


def report() -> int:
    """Print the report.

    Returns:
        0, or 1 when something that should work does not: the library does not load, a GPU is left with plain torch, or
        a backend fails its self-test.
    """
    problems: list[str] = []
    for line in _versions():
        print(line)
    for line in _library():
        print(line)
    if ops.native.load_error is not None:
        problems.append("the native library does not load")
    for device in _devices():
        print(f"{device}: {_describe(device)}")
        chosen = _chosen(device)
        print(f"  backend: {chosen} (the first of native, Triton on a GPU, reference that works)")
        if device.type == "cuda" and chosen == "reference":
            problems.append(f"neither native nor Triton kernels work on {device}")
        for backend in (ops.native, ops.triton, ops.reference):
            name = _name(backend)
            cause = backend.unavailable(device) if backend is not ops.reference else None
            failure = None if cause is not None else self_test(backend, device)
            print(f"  {name}: {_verdict(cause, failure)}")
            if failure is not None:
                problems.append(f"{name} on {device} fails its self-test")
    for line in allocator_advice():
        print(line)
    print("problems: " + "; ".join(problems) if problems else "no problems found")
    return 1 if problems else 0


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _verdict(cause: str | None, failure: str | None) -> str:
    if cause is not None:
        return f"not available: {cause}"
    return "works (self-test against float64 passed)" if failure is None else f"FAILS its self-test: {failure}"


def _versions() -> list[str]:
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed (serves GPUs where native kernels do not work)"
    return [
        f"accumkernels {__version__}",
        f"python {platform.python_version()} on {platform.platform()}",
        f"torch {torch.__version__}, {cuda}, {torch.get_num_threads()} threads",
        f"triton {triton}",
    ]


def _library() -> list[str]:
    """About the native library: where it is from, what is in it."""
    info = ops.native.build_info()
    if info is None:
        return [f"native library: not loaded: {ops.native.load_error}"]
    commit = f", commit {info['commit']}" if info.get("commit") else ""
    cuda = f"CUDA {info['cuda']} kernels for {', '.join(info['archs'])}" if info["cuda"] else "no CUDA kernels"
    return [
        f"native library: {ops.native.LIBRARY_PATH}",
        f"  version {info['version']}{commit}, compiled by {info['compiler']}",
        f"  CPU kernels: {ops.native.cpu_instruction_set()}; {cuda}",
    ]


def _devices() -> list[torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.machine()
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, sm_{properties.major}{properties.minor}, driver {_driver()}"


def _driver() -> str:
    """The NVIDIA driver's version, for instance 580.65.06."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.[\d.]+\b", text)
    return found.group() if found else "unknown"


def _chosen(device: torch.device) -> str:
    """What FusedAccumulator's `backend="auto"` takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cause is in the report
        return _name(ops.select("auto", device))
