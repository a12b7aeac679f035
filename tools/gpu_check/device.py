"""The program of tests/cuda_device, without torch: checked, timed, and under compute-sanitizer."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from . import machine
from .parts import ROOT, Part, Setting

_PROGRAMS = Path("build/cuda_device")
_SEVERAL_BLOCKS = ("accumulate/blocks", "check_finite/blocks", "norm/blocks", "scaled_copy/blocks")
# What compute-sanitizer watches of the program of tests/cuda_device: racecheck is the slowest by far.
_SIZES = ("accumulate/dtypes", "accumulate/mixed", "check_finite/values", "norm/dtypes", "scaled_copy/dtypes")
_WATCHED = {"memcheck": ("--tight", *_SIZES), "racecheck": _SEVERAL_BLOCKS, "synccheck": _SEVERAL_BLOCKS}


def build(setting: Setting) -> Part:
    """The programs of tests/cuda_device, without torch; a rehearsal builds what runs on the host."""
    capability = (setting.capability or "").replace(".", "")
    command = ["make", "-s", "-j", "4", "-C", "tests/cuda_device", f"OUT={ROOT / _PROGRAMS}"]
    return Part("device-build", [*command, *(["host"] if setting.rehearse else ["all", f"ARCH=sm_{capability}"])], 120)


def _program(setting: Setting) -> str:
    """What `build` has built."""
    return str(ROOT / _PROGRAMS / ("host" if setting.rehearse else "device") / "check")


def check(setting: Setting) -> Part:
    """Every kernel against a reference, without torch; `make device-check` has run all of it on the host."""
    chosen = ("decide", "accumulate/blocks") if setting.rehearse else ()
    return Part("device-check", [_program(setting), *chosen], 60)


def time(setting: Setting) -> Part:
    """Bytes per second of every kernel beside a copy, torch's `mul_` and a plain loop."""
    tiny = ("--elements", "8192", "--repetitions", "1") if setting.rehearse else ()
    command = [_program(setting), "--time", "--csv", setting.file("device_time_{}.csv"), *tiny]
    return Part("device-time", command, 60)


@functools.cache
def _sanitizer_fails(program: str, target: str) -> str | None:
    """Some virtual machines let nobody watch, not even a launch of one thread."""
    command = [program, "--error-exitcode", "1", target, "decide"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return "compute-sanitizer does not end here within a minute"
    if done.returncode == 0:
        return None
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"compute-sanitizer does not work here: {(said or ['no message'])[-1].strip('= ')[:120]}"


def sanitizer(setting: Setting, tool: str, seconds: float) -> Part:
    """Every access of our kernels is watched."""
    program = machine.program("compute-sanitizer", setting.environment)
    target = _program(setting)

    def missing() -> str | None:
        if setting.rehearse:
            return "needs a GPU"
        if program is None:
            return "compute-sanitizer is not installed"
        return _sanitizer_fails(program, target)

    command = [program or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", target, *_WATCHED[tool]]
    return Part(tool, command, seconds, missing=missing)


def parts(setting: Setting) -> list[Part]:
    """What runs before anything needs torch."""
    return [build(setting), check(setting), time(setting)]
