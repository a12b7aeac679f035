"""One line of advice for each problem that the doctor knows, in a table keyed by words of the cause."""

from __future__ import annotations

import re

_REINSTALL = (
    "reinstall the wheel for this machine (pip install --force-reinstall --no-deps), or `make build` in a clone"
)

# The causes are our own texts (ops/loading.py, ops/triton.py, csrc/cuda/probe.cu), torch's and the system loader's.
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
