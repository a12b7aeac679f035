"""Compiles every .cu file under csrc for the host, against the `cuda_runtime.h` in this folder.

    python tests/cuda_host/build.py               # build with AddressSanitizer and UBSan
    python tests/cuda_host/build.py --run [ARGS]  # and run pytest ARGS on tests/cuda_host under them

Ninja rebuilds what a changed source or header asks for. Output: build/cuda_host/.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
MODULE = "accumkernels_cuda_host"
SANITIZED = "ACCUMKERNELS_SANITIZED"  # set in the environment of a pytest that runs under the sanitizers

# Products and sums are rounded one by one, as on the device; kernels load any type as vectors of integers.
FLAGS = "-std=c++17 -O1 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-strict-aliasing"
FLAGS += " -Wall -Wextra -Wno-unknown-pragmas"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"


def compiler() -> str | None:
    """The C++ compiler: CXX, else g++, else None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def sources() -> list[Path]:
    """Every CUDA source of the library, then this folder's C++ files."""
    return sorted((ROOT / "csrc").rglob("*.cu")) + sorted(FOLDER.glob("*.cpp"))


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(*, sanitize: bool) -> Path:
    """Build the extension module and return its path; a failure raises with the compiler's words."""
    import pybind11

    out = ROOT / "build" / "cuda_host" / ("sanitized" if sanitize else "plain")
    out.mkdir(parents=True, exist_ok=True)
    includes = [FOLDER, pybind11.get_include(), sysconfig.get_paths()["include"]]
    flags = " ".join([FLAGS, SANITIZERS if sanitize else "", *(f"-I{path}" for path in includes)])
    lines = [
        f"flags = {flags}",
        "rule compile",
        f"  command = {compiler()} $flags -MMD -MF $out.d -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler()} -shared {SANITIZERS if sanitize else ''} $in -o $out",
    ]
    objects = []
    for source in sources():
        objects.append(f"{source.name}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
    library = f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    lines.append(f"build {library}: link {' '.join(objects)}")
    _write_if_changed(out / "build.ninja", "\n".join(lines) + "\n")
    jobs = os.environ.get("MAX_JOBS", "2")
    done = subprocess.run(
        [sys.executable, "-m", "ninja", "-C", str(out), "-j", jobs], text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return out / library


def load(*, sanitize: bool) -> ModuleType:
    """Build the module if needed and import it."""
    spec = importlib.util.spec_from_file_location(MODULE, build(sanitize=sanitize))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _runtime(name: str) -> str:
    """Path of a sanitizer's runtime library, which has to be loaded before Python."""
    command = [str(compiler()), f"-print-file-name={name}"]
    return os.path.realpath(subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.strip())


def run(arguments: list[str]) -> int:
    """Run pytest under the sanitizers; returns its exit code."""
    environment = dict(
        os.environ,
        LD_PRELOAD=f"{_runtime('libasan.so')} {_runtime('libubsan.so')}",
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    environment[SANITIZED] = "1"
    # Capturing only what Python prints: a sanitizer writes its report to the process's own stderr and ends it.
    command = [sys.executable, "-m", "pytest", "--capture=sys", str(FOLDER), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    if compiler() is None:
        sys.exit("no C++ compiler: install g++ or set CXX")
    build(sanitize=True)
    if sys.argv[1:2] == ["--run"]:
        sys.exit(run(sys.argv[2:]))
