"""`python -m accumkernels`: what works on this machine, and why something does not.

The doctor may look at the machine, the library and torch, and run the ops on small tensors. People read its report and,
with `--json`, programs do. Nothing in the package depends on it, and it never changes a setting.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import __version__, ops
from .buffers import flat
from .devices import accelerators, is_available, module, obstacle
from .offload.host import available_bytes
from .ops.schema import State

# ---- What is installed on this machine, for the doctor: versions, the NVIDIA driver, the devices that torch finds

_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str | None]:
    """The versions of all packages that decide which backend works; None if one is not installed."""
    packages = packages_distributions().get("triton")  # ROCm's and Intel's builds have names of their own
    return {
        "accumkernels": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_rocm": torch.version.hip,
        "triton": version(packages[0]) if packages else None,
        "driver": driver(),
    }


def driver() -> str | None:
    """The NVIDIA driver's version, for instance 580.65.06; None if none is loaded."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.[\d.]+\b", text)
    return found.group() if found else "unknown"


def is_pure() -> bool:
    """Whether there is no library on purpose: installed as py3-none-any, or on another system than Linux."""
    if sys.platform != "linux":
        return True
    try:
        wheel = distribution("accumkernels").read_text("WHEEL")
    except PackageNotFoundError:
        return False
    return "Root-Is-Purelib: true" in (wheel or "")


def devices() -> list[torch.device]:
    """The CPU and every accelerator that torch can use."""
    return [torch.device("cpu"), *accelerators()]


def describe(device: torch.device) -> str:
    """The architecture of a CPU; a GPU's name and its compute capability (AMD's: its architecture); others' names."""
    if device.type == "cpu":
        return platform.machine()
    of_kind = module(device)
    if device.type != "cuda":
        name = getattr(of_kind, "get_device_name", None)
        return f"accelerator {device.type}" if name is None else str(name(device))
    properties = of_kind.get_device_properties(device)
    if torch.version.hip is not None:
        return f"{properties.name}, {properties.gcnArchName.partition(':')[0]}"
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def why_no_gpu() -> str | None:
    """Why torch uses no GPU although an NVIDIA driver is loaded; None if that is as expected."""
    cuda = torch.device("cuda")
    if driver() is None or is_available(cuda):
        return None
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return None  # hidden on purpose
    try:
        module(cuda).init()
    except Exception as error:  # whatever the error is, it is the cause
        return f"torch cannot use it: {str(error).partition(chr(10))[0]}"
    return "torch finds no device"


# ---- What to do about a problem, in one line, and what to set so that memory in pieces fits a batch that should fit

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch >= 2.9 reads both, and warns of the old one

_REINSTALL = (
    "reinstall the wheel for this machine (pip install --force-reinstall --no-deps), or `make build` in a clone"
)

# From the words of a cause to advice. The causes are texts of ours (ops/native.py, ops/triton.py,
# csrc/cuda/probe.cu), of torch and of the system's loader.
_ADVICE = (
    (r"needs torch", "pip install --upgrade torch"),
    (r"are for Linux", "none needed; on Linux, or WSL on Windows, kernels are compiled"),
    (r"has sources", "run Python in another folder than these sources, or compile them in place by make build"),
    (
        r"no compiled kernels",
        "install a C++ compiler, then pip install . again in a clone; or the wheel for this platform",
    ),
    (r"GLIBC|CXXABI", "the library was built on a newer Linux: build it on this machine, pip install . in a clone"),
    (
        r"is missing|is built for|not a shared library|cut short|cannot be read|does not load with|built from",
        _REINSTALL,
    ),
    (
        r"cannot use it|finds no",
        "see that CUDA_VISIBLE_DEVICES names a GPU, and that the driver is new enough for this torch",
    ),
    (
        r"driver supports|NVIDIA driver|driver version",
        "install the driver named there, or a wheel built with an older CUDA toolkit (make wheel CUDA_HOME=...)",
    ),
    (r"for device type", "none needed: plain torch serves it"),
    (r"has no fp64", "train on the CPU, or on another accelerator"),
    (r"for AMD GPUs", "none needed: they get the Triton kernels, which were compiled for AMD but not yet run there"),
    (r"no kernel image", "build for this GPU: ACCUMKERNELS_CUDA_ARCHS=X.Y pip install . in a clone"),
    (r"torch is built without CUDA", "install a CUDA build of torch"),
    (r"built without CUDA", "build with a CUDA toolkit: ACCUMKERNELS_BUILD_CUDA=1 pip install . in a clone"),
    (r"triton is not installed", "pip install triton (for Windows: triton-windows)"),
    (r"ACCUMKERNELS_CPU", "set it to avx2 or portable, or unset it"),
    (r"TRITON_INTERPRET", "unset TRITON_INTERPRET: it is for tests on the CPU"),
    (r"self-test", "do not train with it: take another backend=, and report this output"),
)


def advice(cause: str) -> str:
    """Say what to do about `cause`."""
    return next((text for words, text in _ADVICE if re.search(words, cause)), "report this output")


def allocator_advice() -> list[str]:
    """Lines of advice on the CUDA caching allocator's settings; none if there is nothing to advise or no NVIDIA GPU.

    The allocator carves tensors out of segments that it gets from the driver. Batches of varying size leave gaps
    between them that fit no other tensor, so that memory runs out though the gaps together would do. With expandable
    segments one segment grows instead of many being cut up. On AMD GPUs only newer torch has them, and they were
    reported to hang (pytorch issue 192259).
    """
    if torch.version.hip is not None or not is_available(torch.device("cuda")):
        return []
    advice = []
    name = NEW if NEW in os.environ else OLD
    settings = dict(part.strip().partition(":")[::2] for part in os.environ.get(name, "").split(",") if part.strip())
    if name == OLD and OLD in os.environ:
        advice.append(f"advice: {OLD} is the old name: set {NEW}")
    backend = settings.get("backend", "native").strip()
    if backend == "native" and settings.get("expandable_segments", "").strip().lower() != "true":
        advice.append(
            "advice: when memory runs out though much is 'reserved but unallocated', set "
            f"{NEW}=expandable_segments:True"
        )
    return advice


# ---- A quick check, for the doctor, that a backend's ops run here and agree with float64

SIZES = {torch.float16: (1000, 7), torch.bfloat16: (1, 513), torch.float32: (300,), torch.float64: (33,)}
LOSS_SCALE = 1024.0
WEIGHTS = (3.0, 5.0)
TOLERANCE = 1e-6  # of fp32 arithmetic: conversion, two products, a sum and a quotient round to 2**-24 = 6e-8 each


def self_test(backend: ModuleType, device: torch.device) -> str | None:
    """Say what `backend` does wrong on `device`, or return None if it works."""
    try:
        return _accumulates(backend, device) or _sees_overflow(backend, device) or _rounds(backend, device)
    except Exception as error:  # whatever the error is, the doctor reports it
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(numel, generator=generator) * 100).to(dtype) for dtype, sizes in SIZES.items() for numel in sizes
    ]


def _accumulate(
    backend: ModuleType, device: torch.device, batches: list[list[Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate a window of `batches` with `WEIGHTS`; returns the layout, and the buffer and state it computed."""
    numels = [grad.numel() for grad in batches[0]]
    ends = list(itertools.accumulate(flat.aligned(numel, torch.float32) for numel in numels))
    layout = torch.tensor(list(zip([0, *ends[:-1]], numels, strict=True)))  # (offset, numel), as in a flat buffer
    segments = list(range(len(layout)))
    buffer = torch.zeros(int(layout[-1].sum()), device=device)
    state = torch.zeros(len(State), dtype=torch.float64, device=device)
    flags = torch.zeros(len(layout), dtype=torch.int32, device=device)
    scale = torch.full((1,), LOSS_SCALE, device=device)
    for index, (grads, weight) in enumerate(zip(batches, WEIGHTS, strict=True)):
        backend.accumulate_(
            buffer,
            state,
            [grad.to(device) for grad in grads],
            segments,
            [index == 0] * len(segments),
            layout.to(device),
            layout,
            flags=flags,
            weight=weight,
            loss_scale=scale,
        )
    return layout, buffer, state


def _differs(what: str, found: Tensor, exact: Tensor) -> str | None:
    error = float((found.double().cpu() - exact).abs().max() / exact.abs().max())
    return None if error <= TOLERANCE else f"{what} is off by {error:.1e} of the largest value"


def _accumulates(backend: ModuleType, device: torch.device) -> str | None:
    batches = [_gradients(0), _gradients(1)]
    layout, buffer, state = _accumulate(backend, device, batches)
    for index, (offset, numel) in enumerate(layout.tolist()):
        exact = torch.zeros(numel, dtype=torch.float64)
        for grads, weight in zip(batches, WEIGHTS, strict=True):
            exact += weight / LOSS_SCALE * grads[index].double()
        wrong = _differs(f"the sum of {batches[0][index].dtype} gradients", buffer[offset : offset + numel], exact)
        if wrong:
            return wrong
    if state.tolist() != [sum(WEIGHTS), 0.0, len(WEIGHTS), 0.0]:
        return f"the state is {state.tolist()}"
    norm = torch.zeros(1, dtype=torch.float64, device=device)
    backend.norm_(norm, [buffer])
    return _differs("the norm", norm, buffer.double().cpu().square().sum().reshape(1))


def _sees_overflow(backend: ModuleType, device: torch.device) -> str | None:
    for value, place in itertools.product((torch.inf, torch.nan), (0, -1)):
        batches = [_gradients(0), _gradients(1)]
        batches[1][0][place] = value
        _, _, state = _accumulate(backend, device, batches)
        if float(state[State.FOUND_INF]) != 1.0:
            return f"{value} in element {place} goes unnoticed"
    return None


def _rounds(backend: ModuleType, device: torch.device) -> str | None:
    value = torch.linspace(-3, 3, 1001, device=device)
    divisor = torch.full((1,), 8.0, dtype=torch.float64, device=device)
    outputs = [torch.empty_like(value, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
    backend.scaled_copy_(outputs, [value, value], divisor=divisor)
    for output in outputs:
        if not torch.equal(output, (value / 8).to(output.dtype)):
            return f"rounding to {output.dtype} is wrong"
    return None


# ---- `python -m accumkernels`: what works on this machine, why the rest does not, and what to do about it


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
    on huge pages for CPU tensors, and what host memory `cpu_offload` finds.
    """
    problems: list[dict[str, Any]] = []

    def note(problem: str, cause: str, serious: bool = True) -> None:
        problems.append({"problem": problem, "advice": advice(cause), "serious": serious})

    library = _library()
    if not library["loaded"] and not ops.native.LIBRARY_PATH.exists() and is_pure():
        what = (
            "installed with no compiled kernels: CPUs get plain torch, and GPUs Triton's kernels, or else plain torch"
        )
        note(what, library["error"] if sys.platform != "linux" else what, serious=False)
    elif not library["loaded"]:
        note(f"the native library does not load: {library['error']}", library["error"])
    elif library["version"].partition("+")[0] != __version__:
        note(
            f"the native library is built from version {library['version']}, the package is {__version__}", "built from"
        )
    limit = os.environ.get("ACCUMKERNELS_CPU", "")
    if limit not in ("", "avx512", "avx2", "portable"):  # csrc/cpu/dispatch.cpp reads it, and cannot warn
        note(f"ACCUMKERNELS_CPU={limit!r} is no instruction set, and has no effect", "ACCUMKERNELS_CPU", serious=False)
    unused = why_no_gpu()
    if unused is not None:
        note(f"the NVIDIA driver {driver()} is loaded, but {unused}", unused, torch.version.cuda is not None)

    found = [_examine(device) for device in devices()]
    for device in found:
        native, triton, _ = device["backends"]
        if device["obstacle"] is not None:
            note(f"FusedAccumulator refuses {device['device']}: {device['obstacle']}", "has no fp64", serious=False)
            continue
        if device["device"] != "cpu" and native["cause"] is not None and library["loaded"]:
            note(f"native kernels do not work on {device['device']}: {native['cause']}", native["cause"], serious=False)
        if device["device"].startswith("cuda") and device["backend"] == "reference":
            note(f"neither native nor Triton kernels work on {device['device']}", triton["cause"])
        for backend in device["backends"]:
            if backend["failure"] is not None:
                where = f"{backend['name']} on {device['device']}"
                note(f"{where} fails its self-test: {backend['failure']}", "self-test")
    return {
        "ok": not any(problem["serious"] for problem in problems),
        "versions": versions(),
        "library": library,
        "devices": found,
        "problems": problems,
        "memory": [*allocator_advice(), *_huge_pages(), *_host_memory()],
    }


def _huge_pages() -> list[str]:
    """What the system's setting of huge pages means for flat buffers, 16-bit copies and masters on the CPU."""
    setting = flat.setting()
    if setting is None:
        return []
    meaning = {
        "always": "all large CPU tensors have them",
        "madvise": "large flat buffers and masters ask for them",
        "never": 'CPU kernels take longer; "madvise" in /sys/kernel/mm/transparent_hugepage/enabled would do',
    }
    return [f"transparent huge pages: {setting} ({meaning.get(setting, 'unknown')})"]


def _host_memory() -> list[str]:
    """What host memory there is for `cpu_offload=True`, and whether it can be pinned for copies."""
    if not accelerators():
        return []
    available = available_bytes()
    size = "an unknown amount" if available is None else f"{available / 2**30:,.1f} GiB"
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
        pinned = "which can be pinned"
    except RuntimeError as error:
        pinned = f"which cannot be pinned, so that copies are slow: {str(error).partition(chr(10))[0]}"
    return [f"host memory for cpu_offload=True: {size} available, {pinned}"]


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
    backends, refused = [], obstacle(device)
    for backend in (ops.native, ops.triton, ops.reference):
        cause = refused if backend is ops.reference else backend.unavailable(device)
        failure = None if cause is not None else self_test(backend, device)
        backends.append({"name": ops.name(backend), "cause": cause, "failure": failure})
    return {
        "device": str(device),
        "description": describe(device),
        "obstacle": refused,
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
