"""What a result needs said about the machine and the software, in every row."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from accumkernels.ops import native


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


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def driver() -> str:
    """The NVIDIA driver's version, for instance 580.65.06; empty where there is none."""
    try:
        found = re.search(r"\b\d{3}\.[\d.]+\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    if found is not None:
        return found.group()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.partition("\n")[0].strip()


def git(*arguments: str) -> str:
    """What git says about this checkout; nothing where there is none."""
    folder = str(Path(__file__).resolve().parent)
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """The commit that is measured, `+changes` with what is not committed.

    Where the checkout came without its history: the environment's ACCUMKERNELS_COMMIT, else what the library was built
    from; "unknown" where nobody says.
    """
    head = git("rev-parse", "--short", "HEAD")
    if head:
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    given = os.environ.get("ACCUMKERNELS_COMMIT", "").strip()
    return given or (native.build_info() or {}).get("commit") or "unknown"


def version(package: str) -> str:
    """Of an installed package, else empty."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment(device: torch.device) -> dict[str, object]:
    """Device, versions, commit and date: the same for all rows of a run."""
    cuda = device.type == "cuda"
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "instruction_set": "cuda" if cuda else (native.cpu_instruction_set() or ""),
        "driver": driver() if cuda else "",
        "cuda": (torch.version.cuda or "") if cuda else "",
        "triton": version("triton"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
