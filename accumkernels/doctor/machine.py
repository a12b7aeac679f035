"""What is installed on this machine, for the doctor: versions, the NVIDIA driver, the devices that torch finds."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import packages_distributions, version
from pathlib import Path

import torch

from .. import __version__

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


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch can use."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def describe(device: torch.device) -> str:
    """The architecture of a CPU, or the name of a GPU and its compute capability (AMD's: its architecture)."""
    if device.type == "cpu":
        return platform.machine()
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return f"{properties.name}, {properties.gcnArchName.partition(':')[0]}"
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def why_no_gpu() -> str | None:
    """Why torch uses no GPU although an NVIDIA driver is loaded; None if that is as expected."""
    if driver() is None or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return None  # hidden on purpose
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the error is, it is the cause
        return f"torch cannot use it: {str(error).partition(chr(10))[0]}"
    return "torch finds no device"
