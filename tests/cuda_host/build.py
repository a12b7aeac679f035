"""Compiles every .cu file under csrc for the host, against the CUDA headers in this folder.

    python tests/cuda_host/build.py               # build with AddressSanitizer and UBSan
    python tests/cuda_host/build.py --run [ARGS]  # and run pytest ARGS on tests/cuda_host under them, and the
                                                  # program of tests/cuda_device under ThreadSanitizer

Ninja rebuilds what a changed source or header asks for. Output: build/cuda_host/.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = next(folder for folder in FOLDER.parents if (folder / "csrc").is_dir())
DEVICE = ROOT / "tests" / "cuda_device"
BUILD = ROOT / "build" / "cuda_host"
MODULE = "accumkernels_cuda_host"
SANITIZED = "ACCUMKERNELS_SANITIZED"  # set in the environment of a pytest that runs under the sanitizers

# Products and sums are rounded one by one, as on the device; kernels load any type as vectors of integers.
FLAGS = "-std=c++17 -g1 -fvisibility=hidden -ffp-contract=off -fno-strict-aliasing -DAK_EMULATED"
FLAGS += " -Wall -Wextra -Wno-unknown-pragmas"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
_RACES_FLAGS = f"{FLAGS} -O0 -fsanitize=thread -DCUDA_HOST_RACES -I{FOLDER}"
_RACES_LINK = "-fsanitize=thread -pthread"
_SEVERAL_BLOCKS = ("accumulate/blocks", "check_finite/blocks", "norm/blocks", "scaled_copy/blocks")


def compiler() -> str | None:
    """The C++ compiler: CXX, else g++, else None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _runtime(name: str) -> str:
    """Path of a sanitizer's runtime library, which has to be loaded before Python."""
    command = [str(compiler()), f"-print-file-name={name}"]
    return os.path.realpath(subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.strip())


def has_thread_sanitizer() -> bool:
    """Whether the compiler has ThreadSanitizer's runtime."""
    return compiler() is not None and Path(_runtime("libtsan.so")).exists()


def _ninja(out: Path, flags: str, link: str, objects: list[tuple[str, Path, str]], target: str) -> Path:
    """Compile (object, source, further flags) and link them; a failure raises with the compiler's words."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "rule compile",
        f"  command = {compiler()} {flags} $more -MMD -MF $out.d -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler()} $in {link} -o $out",
    ]
    for name, source, more in objects:
        lines += [f"build {name}: compile {source}", f"  more = {more}"]
    lines.append(f"build {target}: link {' '.join(name for name, _, _ in objects)}")
    text, file = "\n".join(lines) + "\n", out / "build.ninja"
    command = [sys.executable, "-m", "ninja", "-C", str(out), "-j", os.environ.get("MAX_JOBS", "2")]
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # every worker of pytest collects the tests, and builds what they import
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)
    return out / target


def _kernels(csrc: Path) -> list[tuple[str, Path, str]]:
    return [(f"{path.name}.o", path, "") for path in sorted((csrc / "cuda").glob("*.cu"))]


def build(*, sanitize: bool) -> Path:
    """Build the extension module and return its path."""
    import pybind11

    includes = [FOLDER, pybind11.get_include(), sysconfig.get_paths()["include"]]
    sanitizers = SANITIZERS if sanitize else ""
    flags = " ".join([FLAGS, "-O1 -fPIC", sanitizers, *(f"-I{path}" for path in includes)])
    objects = [*_kernels(ROOT / "csrc")]
    objects += [(f"{stem}.o", FOLDER / f"{stem}.cpp", "") for stem in ("bindings", "emulator", "probes")]
    objects.append(("probes_host.o", FOLDER / "probes.cpp", "-UAK_EMULATED"))  # what csrc/core is for the CPU
    library = f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    return _ninja(BUILD / ("sanitized" if sanitize else "plain"), flags, f"-shared {sanitizers}", objects, library)


def _check_objects() -> list[tuple[str, Path, str]]:
    uninstrumented = "-O1 -fno-sanitize=thread"
    sources = [*DEVICE.glob("*.cpp"), FOLDER / "emulator.cpp"]
    objects = [(f"{path.name}.o", path, uninstrumented) for path in sorted(sources) if path.stem != "triton"]
    return [*_kernels(ROOT / "csrc"), ("timing.cu.o", DEVICE / "timing.cu", ""), *objects]


def build_check(*, races: bool) -> Path:
    """Build the program of tests/cuda_device for the host, and return its path.

    Args:
        races: Under ThreadSanitizer; else as `make device-check` does.
    """
    if races:
        return _ninja(BUILD / "races", _RACES_FLAGS, _RACES_LINK, _check_objects(), "check")
    command = ["make", "-s", "-C", str(DEVICE), "-j", os.environ.get("MAX_JOBS", "2"), "host"]
    subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    return ROOT / "build" / "cuda_device" / "host" / "check"


class Fault(NamedTuple):
    """A change of the sources that a run has to see."""

    file: str  # under csrc
    sound: str  # a pattern that occurs once
    faulty: str
    kernel: str  # the stem of the .cu file that is compiled with it
    message: str  # part of what the run says


def build_faulty_check(fault: Fault, folder: Path, *, races: bool) -> Path:
    """Build it with one fault, in a folder of its own."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    text, count = re.subn(fault.sound, fault.faulty, (folder / "csrc" / fault.file).read_text())
    assert count == 1, fault.sound
    (folder / "csrc" / fault.file).write_text(text)
    sound = build_check(races=races).parent
    others = [str(sound / name) for name, _, _ in _check_objects() if name != f"{fault.kernel}.cu.o"]
    # Its own object comes first, since of an inline function the linker keeps the first.
    objects = [("faulty.o", folder / "csrc" / "cuda" / f"{fault.kernel}.cu", "")]
    flags, link = (_RACES_FLAGS, _RACES_LINK) if races else (f"{FLAGS} -O1 -I{FOLDER}", "-pthread")
    return _ninja(folder / "build", flags, f"{' '.join(others)} {link}", objects, "check")


def run_check(program: Path, *checks: str, seed: int = 1) -> subprocess.CompletedProcess[str]:
    """Run what `build_check` built: it fails where a result is wrong and, under ThreadSanitizer, where threads race.

    Args:
        program: The program.
        checks: Which of its checks; default: those of several blocks.
        seed: Of the order of threads and blocks.
    """
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "CUDA_HOST_SEED": str(seed)}
    command = [str(program), *(checks or _SEVERAL_BLOCKS)]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=300)


def load(*, sanitize: bool) -> ModuleType:
    """Build the module if needed and import it."""
    spec = importlib.util.spec_from_file_location(MODULE, build(sanitize=sanitize))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> int:
    """Run all kernels under ThreadSanitizer, then pytest under the others; returns an exit code."""
    if has_thread_sanitizer():
        for seed in range(3):
            checked = run_check(build_check(races=True), seed=seed)
            print("ThreadSanitizer:", checked.stderr or checked.stdout, flush=True)
            if checked.returncode != 0:
                return checked.returncode
    else:
        print("ThreadSanitizer: left out, the compiler has no libtsan", flush=True)
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
