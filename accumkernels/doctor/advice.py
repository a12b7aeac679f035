"""What to do about a problem, in one line, and what to set so that memory in pieces fits a batch that should fit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # torch >= 2.9 reads both, and warns of the old one

_REINSTALL = (
    "reinstall the wheel for this machine (pip install --force-reinstall --no-deps), or `make build` in a clone"
)

# From the words of a cause to advice. The causes are texts of ours (ops/loading.py, ops/triton.py,
# csrc/cuda/probe.cu), of torch and of the system's loader.
_ADVICE = (
    (r"needs torch", "pip install --upgrade torch"),
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
    (r"for AMD GPUs", "none needed: they get the Triton kernels, which were compiled for AMD but not yet run there"),
    (r"no kernel image", "build for this GPU: ACCUMKERNELS_CUDA_ARCHS=X.Y pip install . in a clone"),
    (r"torch is built without CUDA", "install a CUDA build of torch"),
    (r"built without CUDA", "build with a CUDA toolkit: ACCUMKERNELS_BUILD_CUDA=1 pip install . in a clone"),
    (r"triton is not installed", "pip install triton"),
    (r"TRITON_INTERPRET", "unset TRITON_INTERPRET: it is for tests on the CPU"),
    (r"self-test", "do not train with it: take another backend=, and report this output"),
)


def advice(cause: str) -> str:
    """Say what to do about `cause`."""
    return next((text for words, text in _ADVICE if re.search(words, cause)), "report this output")


def allocator_advice(environ: Mapping[str, str] | None = None, on_gpu: bool | None = None) -> list[str]:
    """Lines of advice on the CUDA caching allocator's settings; none if there is nothing to advise or no NVIDIA GPU.

    The allocator carves tensors out of segments that it gets from the driver. Batches of varying size leave gaps
    between them that fit no other tensor, so that memory runs out though the gaps together would do. With expandable
    segments one segment grows instead of many being cut up. On AMD GPUs only newer torch has them, and they were
    reported to hang (pytorch issue 192259).

    Args:
        environ: Default: the process's.
        on_gpu: Whether there is an NVIDIA GPU; default: whether torch finds one.
    """
    environ = os.environ if environ is None else environ
    if not (torch.version.hip is None and torch.cuda.is_available() if on_gpu is None else on_gpu):
        return []
    advice = []
    name = NEW if NEW in environ else OLD
    settings = dict(part.strip().partition(":")[::2] for part in environ.get(name, "").split(",") if part.strip())
    if name == OLD and OLD in environ:
        advice.append(f"advice: {OLD} is the old name: set {NEW}")
    backend = settings.get("backend", "native").strip()
    if backend == "native" and settings.get("expandable_segments", "").strip().lower() != "true":
        advice.append(
            "advice: when memory runs out though much is 'reserved but unallocated', set "
            f"{NEW}=expandable_segments:True"
        )
    return advice
