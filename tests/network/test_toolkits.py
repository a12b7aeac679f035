"""`make test-toolkits`: a second CUDA toolkit, from the package index, builds wheels that pass every gate."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import accumkernels
from tests.support import library_gates as gates
from tests.support.environments import ROOT, Environment, clean_environ

TOOLKIT = os.environ.get("TOOLKIT", "13.2")
CASES = {  # ACCUMKERNELS_CUDA_ARCHS: images expected
    "8.0;9.0+PTX": {"sm_80", "sm_90", "compute_90"},
    "": {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120"},
}


@pytest.fixture(scope="module")
def home() -> Path:
    """CUDA_HOME of the toolkit, kept in build/ for the next run."""
    folder = ROOT / "build" / f"cuda-{TOOLKIT}"
    command = [sys.executable, ROOT / "tools" / "toolkit.py", TOOLKIT, folder]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


@pytest.mark.parametrize("archs", CASES, ids=["two", "all"])
def test_builds_a_wheel_with_it(archs: str, home: Path, tmp_path: Path) -> None:
    """From an empty build folder: exactly these images in every file of kernels, all gates, and it works installed."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_bytes((ROOT / name).read_bytes())
    suffix = f"+cu{TOOLKIT.replace('.', '')}"
    knobs = {"CUDA_HOME": str(home), "ACCUMKERNELS_VERSION_SUFFIX": suffix, "ACCUMKERNELS_CUDA_ARCHS": archs}
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel"]
    subprocess.run(command, cwd=tmp_path / "project", env=clean_environ(**knobs), check=True)
    (wheel,) = (tmp_path / "project" / "dist").iterdir()
    print(f"\nCUDA {TOOLKIT}, {archs or 'all'}: {time.perf_counter() - start:.1f} s, {wheel.stat().st_size} bytes")

    assert gates.wheel_gate(wheel, accumkernels.__version__ + suffix) == []
    library = tmp_path / "project" / "build" / "native" / "_native.so"
    assert {gate.__name__: gate(library) for gate in gates.LIBRARY_GATES if gate(library)} == {}
    assert str(home).encode() not in library.read_bytes()
    assert gates.cuda_images(library) == [CASES[archs]] * len(list((ROOT / "csrc" / "cuda").glob("*.cu")))
    environment = Environment(tmp_path / "venv")
    environment.borrow_torch()
    environment.pip_install("--no-index", "--no-deps", wheel)
    found = environment.check()["report"]["library"]
    assert (found["cuda"], set(found["archs"])) == (TOOLKIT, CASES[archs])


def test_an_architecture_it_does_not_know(home: Path) -> None:
    """CUDA 13 dropped Volta: one line names the entry and lists what there is."""
    environ = clean_environ(CUDA_HOME=str(home), ACCUMKERNELS_CUDA_ARCHS="7.0")
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "does not know '7.0'; valid, each also with +PTX: 7.5 8.0" in line
