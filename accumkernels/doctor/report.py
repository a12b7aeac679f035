"""`python -m accumkernels`: what works on this machine, why the rest does not, and what to do about it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from .. import __version__, ops
from ..buffers import pages
from . import machine
from .advice import advice, allocator_advice
from .selftest import self_test


def report(as_json: bool = False) -> int:
    """Print the report.

    Returns:
        0, or 1 if something that should work does not: the library does not load or is of another version, a GPU is
        unused or gets plain torch, or a backend fails its self-test.
    """
    found = examine()
    print(json.dumps(found, indent=2) if as_json else render(found))
    return 0 if found["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as `--json` prints it.

    `problems` is a list of {"problem", "advice", "serious"}. A serious problem is something that should work and does
    not; others are possible improvements. `ok` says that no problem is serious. `memory` is advice on the allocator and
    on huge pages for CPU tensors.
    """
    problems: list[dict[str, Any]] = []

    def note(problem: str, cause: str, serious: bool = True) -> None:
        problems.append({"problem": problem, "advice": advice(cause), "serious": serious})

    library = _library()
    if not library["loaded"]:
        note(f"the native library does not load: {library['error']}", library["error"])
    elif library["version"].partition("+")[0] != __version__:
        note(
            f"the native library is built from version {library['version']}, the package is {__version__}", "built from"
        )
    unused = machine.why_no_gpu()
    if unused is not None:
        note(f"the NVIDIA driver {machine.driver()} is loaded, but {unused}", unused, torch.version.cuda is not None)

    devices = [_examine(device) for device in machine.devices()]
    for device in devices:
        native, triton, _ = device["backends"]
        if device["device"] != "cpu" and native["cause"] is not None and library["loaded"]:
            note(f"native kernels do not work on {device['device']}: {native['cause']}", native["cause"], serious=False)
        if device["device"] != "cpu" and device["backend"] == "reference":
            note(f"neither native nor Triton kernels work on {device['device']}", triton["cause"])
        for backend in device["backends"]:
            if backend["failure"] is not None:
                where = f"{backend['name']} on {device['device']}"
                note(f"{where} fails its self-test: {backend['failure']}", "self-test")
    return {
        "ok": not any(problem["serious"] for problem in problems),
        "versions": machine.versions(),
        "library": library,
        "devices": devices,
        "problems": problems,
        "memory": [*allocator_advice(), *_huge_pages()],
    }


def _huge_pages() -> list[str]:
    """What the system's setting of huge pages means for flat buffers, 16-bit copies and masters on the CPU."""
    setting = pages.setting()
    if setting is None:
        return []
    meaning = {
        "always": "all large CPU tensors have them",
        "madvise": "large flat buffers, masters and autocast's copies ask for them",
        "never": 'CPU kernels take longer; "madvise" in /sys/kernel/mm/transparent_hugepage/enabled would do',
    }
    return [f"transparent huge pages: {setting} ({meaning.get(setting, 'unknown')})"]


def _library() -> dict[str, Any]:
    """Where the native library is, and what it was built from and with ("version", "nvcc", "archs", ...)."""
    info = ops.native.build_info()
    return {
        "path": str(ops.native.LIBRARY_PATH),
        "loaded": info is not None,
        "error": ops.native.load_error,
        "cpu_instruction_set": ops.native.cpu_instruction_set(),
        **(info or {}),
    }


def _examine(device: torch.device) -> dict[str, Any]:
    """Which backend `device` gets; for each, the `cause` of its absence, or the `failure` of its self-test."""
    backends = []
    for module in (ops.native, ops.triton, ops.reference):
        cause = None if module is ops.reference else module.unavailable(device)
        failure = None if cause is not None else self_test(module, device)
        backends.append({"name": ops.name(module), "cause": cause, "failure": failure})
    return {
        "device": str(device),
        "description": machine.describe(device),
        "backend": _chosen(device),
        "backends": backends,
    }


def _chosen(device: torch.device) -> str:
    """The backend that `FusedAccumulator(backend="auto")` chooses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cause is in the report
        return ops.name(ops.select("auto", device))


def render(found: dict[str, Any]) -> str:
    """The report for people."""
    versions, library = found["versions"], found["library"]
    cuda = f"built for CUDA {versions['torch_cuda']}" if versions["torch_cuda"] else "built without CUDA"
    if versions["torch_rocm"]:
        cuda = f"built for ROCm {versions['torch_rocm']}"
    lines = [
        f"accumkernels {versions['accumkernels']}",
        f"python {versions['python']} on {versions['platform']}",
        f"torch {versions['torch']}, {cuda}, {torch.get_num_threads()} threads",
        f"triton {versions['triton'] or 'not installed (serves GPUs where native kernels do not work)'}",
        *([] if versions["torch_rocm"] else [f"NVIDIA driver {versions['driver'] or 'not loaded'}"]),
        f"native library: {library['path']}",
    ]
    if library["loaded"]:
        commit = f", commit {library['commit']}" if library["commit"] else ""
        kernels = "no CUDA kernels"
        if library["cuda"]:
            nvcc = library.get("nvcc", "unknown")  # a library of another version may lack it
            kernels = f"CUDA {library['cuda']} kernels by nvcc {nvcc} for {', '.join(library['archs'])}"
        lines += [
            f"  version {library['version']}{commit}, compiled by {library['compiler']}",
            f"  CPU kernels: {library['cpu_instruction_set']}; {kernels}",
        ]
    else:
        lines.append(f"  not loaded: {library['error']}")
    for device in found["devices"]:
        lines += [
            f"{device['device']}: {device['description']}",
            f"  backend: {device['backend']} (the first of native, Triton on a GPU, reference that works)",
            *(f"  {backend['name']}: {_verdict(backend)}" for backend in device["backends"]),
        ]
    lines += found["memory"]
    for problem in found["problems"]:
        lines += [
            f"{'problem' if problem['serious'] else 'note'}: {problem['problem']}",
            f"  advice: {problem['advice']}",
        ]
    return "\n".join(lines if found["problems"] else [*lines, "no problems found"])


def _verdict(backend: dict[str, Any]) -> str:
    if backend["cause"] is not None:
        return f"not available: {backend['cause']}"
    if backend["failure"] is not None:
        return f"FAILS its self-test: {backend['failure']}"
    return "works (self-test against float64 passed)"
