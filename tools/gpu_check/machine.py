"""What this machine is, asked without importing torch here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

UNKNOWN = "unknown"
_ASK_TORCH = """
import json, platform, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": torch.cuda.device_count() if gpu else 0,
    "device": torch.cuda.get_device_name() if gpu else None,
    "capability": "%d.%d" % torch.cuda.get_device_capability() if gpu else None,
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
}))
"""


def commit(root: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The commit that is checked: ACCUMKERNELS_COMMIT, else what git says, else "unknown"; never an empty string.

    A variable that another program filled from a missing value ("None", "null") counts as not set.
    """
    given = environment.get("ACCUMKERNELS_COMMIT", "").strip()
    if given and given.lower() not in ("none", "null", UNKNOWN):
        return given
    if not (root / ".git").exists():  # else git would answer for a repository around this copy
        return UNKNOWN
    try:
        command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def describe(python: str) -> dict[str, object]:
    """Versions of Python, torch and CUDA, and the GPU; the error's last line where torch does not import."""
    done = subprocess.run([python, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def has_module(python: str, module: str) -> bool:
    """Whether that Python finds a module."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, module], capture_output=True, check=False).returncode == 0


def program(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """A program on PATH or in the CUDA toolkit."""
    toolkit = environment.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which(name, path=os.pathsep.join([environment.get("PATH", os.defpath), f"{toolkit}/bin"]))
