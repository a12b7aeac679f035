"""`make test-torch-matrix`: one wheel, never built again, beside the oldest torch, the one of CI and the newest.

The index's builds of torch are CUDA builds on x86-64, several GB each; environments (.venv-torch-*) are kept for the
next run. TORCHES names others ("2.10.0 newest"), each with =PYTHON for another interpreter ("2.10.0=python3.10").
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import ROOT, Environment

MATRIX = os.environ.get("TORCHES", "2.10.0 2.13.0 newest").split()


@pytest.mark.parametrize("entry", MATRIX)
def test_passes_the_doctor_and_trains_a_window(entry: str, wheel: Path) -> None:
    """The library loads, registers its CPU and CUDA kernels, counts right, and a window trains."""
    version, _, python = entry.partition("=")
    folder = ROOT / f".venv-torch-{version}"
    if not (folder / "bin" / "python").exists():
        subprocess.run([python or sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    environment = Environment(folder)
    if version == "newest":
        environment.pip_install("--upgrade", "torch")
    else:
        environment.pip_install(f"torch=={version}")
    environment.pip_install("--no-deps", "--no-index", "--force-reinstall", wheel)
    found = environment.check()
    versions = found["report"]["versions"]
    print(f"\npython {versions['python']}, torch {versions['torch']}, CUDA {versions['torch_cuda']}: passed")
    assert version == "newest" or versions["torch"].partition("+")[0] == version
