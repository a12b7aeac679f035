"""The four stages. Each begins with the build, since the machine may be a new one every time."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from . import device, machine, ncu
from .parts import ROOT, Part, Setting

TITLES = {
    1: "kernels without torch, build, tests on the GPU, sanitizers, a first benchmark",
    2: "kernels against every peer",
    3: "training: GPT-2 124M",
    4: "what each kernel does, from the hardware's counters",
}
_SLOW = "takes a minute on a CPU, and has tests of its own"
_ON_A_GPU = r"\bmark\.gpu\b|\bbackends import\b"


def benchmark(setting: Setting, name: str, part: str, csv: str, options: str, tiny: str, seconds: float) -> Part:
    """A command of benchmarks/; `tiny` are its options in a rehearsal."""
    chosen = f"{tiny} --threads 1" if setting.rehearse else options
    command = [setting.python, "-m", f"benchmarks.{name}", "--device", setting.device, "--csv", setting.file(csv)]
    return Part(part, [*command, *shlex.split(chosen)], seconds)


def picture(setting: Setting, name: str, csv: str) -> Part:
    """Drawn from a CSV."""
    command = [setting.python, "-m", "benchmarks.pictures", setting.file(csv)]

    def missing() -> str | None:
        lacking = setting.missing("matplotlib")()
        return lacking or (None if Path(setting.file(csv)).exists() else "there are no results to draw")

    return Part(f"picture-{name}", command, 60, missing=missing)


def build(setting: Setting) -> Part:
    """For this GPU alone; a rehearsal keeps to what the machine builds otherwise."""
    environment = {"ACCUMKERNELS_BUILD_CUDA": "1", "ACCUMKERNELS_CUDA_ARCHS": setting.capability or ""}
    command = [setting.python, "setup.py", "-q", "build_ext", "--inplace"]
    return Part("build", command, 240, {} if setting.rehearse else environment)


def pytest(setting: Setting, part: str, chosen: str, seconds: float, parallel: bool = False) -> Part:
    """Tests that need a GPU, by name; a rehearsal runs a few others."""
    command = [setting.python, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command.append(f"--junitxml={setting.folder / part}.xml")
    if setting.rehearse:
        return Part(part, [*command, "tests/benchmarks/test_structure.py"], seconds)
    if parallel and machine.has_module(setting.python, "xdist"):
        command += ["-n", "4"]  # more would share the GPU's memory, not its time
    # Only files that have such tests: others may need packages that are not there, and would end the whole run.
    command += ["--continue-on-collection-errors", "-m", "gpu", "-k", chosen]
    return Part(part, [*command, *tests(_ON_A_GPU)], seconds)


def tests(pattern: str) -> list[str]:
    """The files of tests/ whose text matches."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text())]


def first(setting: Setting) -> list[Part]:
    """Does it work at all?"""
    elsewhere = "graph or synchronis"
    return [
        *device.parts(setting),
        build(setting),
        Part("doctor", [setting.python, "-m", "accumkernels"], 60),
        pytest(setting, "tests", f"not ({elsewhere})", 180, parallel=True),
        pytest(setting, "graph-capture", "graph", 60),
        pytest(setting, "no-synchronisation", "synchronis", 60),
        benchmark(
            setting,
            *("kernels", "accumulate", "kernels_{}_first.csv"),
            "--tables accumulate --shapes gpt2,tiny --dtype bf16,fp16,fp32 --methods mixed,foreach --seconds 3",
            "--tables accumulate --shapes tiny --dtype bf16 --methods mixed --repetitions 1 --processes 0",
            120,
        ),
        device.sanitizer(setting, "memcheck", 100),
        device.sanitizer(setting, "racecheck", 100),
        device.sanitizer(setting, "synccheck", 60),
    ]


def second(setting: Setting) -> list[Part]:
    """How fast are the kernels?"""
    shapes = "--shapes gpt2,tiny,resnet50 --seconds 4"
    tables = {"bf16": "accumulate,window,host", "fp16": "accumulate,window", "fp32": "accumulate"}
    tiny = "--elements 2000 --repetitions 1 --processes 0 --tokens 8 --methods mixed --micro-batches 2"
    return [
        build(setting),
        *(
            benchmark(
                setting,
                *("kernels", f"kernels-{dtype}", f"kernels_{{}}_{dtype}.csv"),
                f"--tables {some} {shapes} --dtype {dtype}",
                f"{tiny} --tables {some.removesuffix(',host')} --shapes resnet50 --dtype {dtype}",
                130,
            )
            for dtype, some in tables.items()
        ),
        benchmark(
            setting,
            *("kernels", "fused-products", "kernels_{}_products.csv"),
            "--tables 'accumulate,other jobs' --methods mixed --shapes gpt2 --dtype bf16,fp16 --seconds 3",
            f"{tiny} --tables 'other jobs' --shapes resnet50 --dtype bf16",
            60,
        ),
        benchmark(
            setting,
            *("kernels", "sizes", "kernels_{}_size.csv"),
            "--tables accumulate --shapes uniform --dtype bf16 --seconds 1",
            f"{tiny} --tables accumulate --shapes uniform --dtype bf16",
            80,
        ),
        benchmark(
            setting,
            *("buckets", "buckets", "buckets_{}.csv"),
            "--dtype bf16,fp16",
            "--elements 20000 --repetitions 1",
            60,
        ),
        picture(setting, "bf16", "kernels_{}_bf16.csv"),
        picture(setting, "sizes", "kernels_{}_size.csv"),
    ]


def one_card(setting: Setting) -> Part:
    """1.2 billion parameters, with sums on the card and in host memory."""
    options = "--layers 24 --width 2048 --windows 4 --threads 8"
    part = benchmark(setting, "one_card", "one-card", "one_card_{}.csv", options, "--layers 1 --width 64", 150)
    return dataclasses.replace(part, missing=lambda: "needs a GPU" if setting.rehearse else None)


def not_rehearsed(setting: Setting, part: Part) -> Part:
    """Left out on the CPU, for the time it takes there."""
    return dataclasses.replace(part, missing=lambda: _SLOW if setting.rehearse else None)


def third(setting: Setting) -> list[Part]:
    """What does a user get?"""
    tiny = "--model tiny --windows 1 --micro-batches 2 --methods masters"
    memory = benchmark(
        setting,
        *("memory", "memory", "memory_{}.csv"),
        "--models gpt2 --dtype bf16,fp16",
        "--models tiny",
        100,
    )
    memory = dataclasses.replace(memory, command=[*memory.command, "--timeline", setting.file("timeline_{}.csv")])
    trainers = benchmark(
        setting,
        *("trainers", "trainers", "trainers_{}.csv"),
        "--windows 7",
        "--model tiny --windows 2 --micro-batches 2 --trainers accelerate",
        120,
    )
    compiled = benchmark(
        setting,
        *("training", "compiled", "training_{}_compiled.csv"),
        "--compile --dtype bf16 --micro-batches 8 --windows 10 --methods microbatch,masters",
        "",
        150,
    )
    found = [
        build(setting),
        *(
            benchmark(
                setting,
                *("training", f"training-{dtype}", f"training_{{}}_{dtype}.csv"),
                f"--dtype {dtype} --micro-batches 1,8 --windows 10",
                f"--dtype {dtype} {tiny}",
                110,
            )
            for dtype in ("bf16", "fp16")
        ),
        not_rehearsed(setting, compiled),
        memory,
        benchmark(setting, "fits", "fits", "fits_{}.csv", "", "--model tiny", 60),
        benchmark(
            setting,
            *("autocast", "autocast", "autocast_{}.csv"),
            "--dtype bf16",
            "--model tiny --tokens 8 --windows 1 --micro-batches 2",
            60,
        ),
        trainers,
        one_card(setting),
        not_rehearsed(setting, benchmark(setting, "demo", "demo", "demo_{}.csv", "--runs 1", "", 150)),
        picture(setting, "training", "training_{}_bf16.csv"),
        picture(setting, "timeline", "timeline_{}.csv"),
    ]
    if setting.gpus > 1:
        found.insert(-2, benchmark(setting, "ranks", "ranks", "ranks_{}.csv", "--windows 10", "", 90))
    return found


def profile(setting: Setting, backend: str) -> Part:
    """Each kernel of a backend under Nsight Compute; a rehearsal runs the same program without."""
    program = machine.program("ncu", setting.environment)
    elements = 2**12 if setting.rehearse else 2**26
    target = [setting.python, str(Path(__file__).with_name("each_kernel.py")), backend, setting.device, str(elements)]
    environment = {"PYTHONPATH": str(ROOT)}
    if setting.rehearse:
        chosen = [target[0], target[1], "native" if backend == "native" else "reference", *target[3:]]
        return Part(f"counters-{backend}", chosen, 60, environment)
    missing = (lambda: None) if program else (lambda: "ncu is not installed")
    then = functools.partial(ncu.write, path=setting.folder / f"counters_{backend}.csv", backend=backend)
    return Part(f"counters-{backend}", ncu.command(program or "ncu", target), 180, environment, missing, then)


def fourth(setting: Setting) -> list[Part]:
    """Why are the kernels as fast as they are?"""
    report = [setting.python, "-m", "benchmarks.compile_report", "--json", str(setting.folder / "compile_report.json")]

    def missing() -> str | None:
        return _SLOW if setting.rehearse else setting.missing("triton")()

    return [
        build(setting),
        profile(setting, "native"),
        profile(setting, "triton"),
        Part("compile-report", report, 120, missing=missing),
    ]


STAGES: dict[int, Callable[[Setting], list[Part]]] = {1: first, 2: second, 3: third, 4: fourth}
