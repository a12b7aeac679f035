"""The gate on the CUDA kernels' machine code: what each loop moves, by which accesses, and that nothing is spilled.

Read from the library where it was built for all three architectures; else the sources are compiled here. Each planted
fault is compiled too and must be seen.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accumkernels.ops import native
from benchmarks import compile_report
from benchmarks.compile_report import Code
from benchmarks.harness import sass

__test__ = shutil.which("nvcc") is not None and importlib.util.find_spec("triton") is not None  # which has cuobjdump
pytestmark = pytest.mark.starts

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "csrc").is_dir())
ARCHS = ("sm_80", "sm_90", "sm_100")
SIZES = (2, 2, 4, 8)  # bytes of fp16, bf16, fp32 and fp64
KERNELS = ("accumulate", "check_finite", "norm", "scaled_copy")


def nvcc_flags() -> list[str]:
    """Those of the build."""
    spec = importlib.util.spec_from_file_location("accumkernels_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.NVCC_FLAGS)


def compiled(folder: Path, csrc: Path, stem: str, archs: tuple[str, ...]) -> list[Code]:
    """The kernels of csrc/cuda/STEM.cu."""
    source, objects = csrc / "cuda" / f"{stem}.cu", folder / f"{stem}.o"
    targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
    command = ["nvcc", *nvcc_flags(), *targets, f"-I{csrc}", "-c", str(source), "-o", str(objects)]
    subprocess.run(command, check=True)
    return without_finish(compile_report.cuda_code(objects, archs))


def without_finish(found: list[Code]) -> list[Code]:
    """The kernels that stream elements."""
    return [code for code in found if not any(name in code.kernel for name in ("finish", "probe", "decide"))]


def main_loops(kernel: str, arch: str) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Loads and stores, as {bits: count}, of the loops that a kernel must have for tensors that are aligned.

    A group of elements is 16 bytes of the widest type, so that a warp's accesses fill whole sectors.
    """
    name, _, variant = kernel.rstrip("]").partition("[")
    if name == "accumulate_kernel":
        buffer, unroll = 8 if "fp64" in variant else 4, 1 if arch == "sm_80" else 2
        for size in SIZES:
            width = 16 // max(size, buffer)
            gradient_bits, buffer_bits = 8 * width * size, 8 * width * buffer
            loads = {gradient_bits: unroll}
            loads[buffer_bits] = loads.get(buffer_bits, 0) + unroll
            yield loads, {buffer_bits: unroll}
        yield {}, {128: 1}  # zeros of a dropped first touch
    elif name in ("check_finite_kernel", "norm_kernel"):
        for size in SIZES:
            yield {128: 2 if size == 2 else 4}, {}
    else:  # each loop has the code for all types of one width of arithmetic: fp32, then fp64
        yield {64: 8, 128: 4}, {64: 8, 128: 4}
        # sm_100 loads fp16 and bf16 by one instruction.
        yield {32: 1 if arch == "sm_100" else 2, 64: 1, 128: 1}, {32: 2, 64: 1, 128: 1}


def faults(code: Code) -> list[str]:
    """What is wrong with a kernel, in words."""
    where = f"{code.kernel} on {code.arch}"
    found = [f"{where}: {loop}" for loop in code.loops if loop.spills]
    if code.spills:
        found.append(f"{where}: {code.spills} bytes of local memory")
    rest = list(code.loops)
    for loads, stores in main_loops(code.kernel, code.arch):
        match = next((loop for loop in rest if (loop.loads, loop.stores) == (loads, stores)), None)
        if match is None:
            found.append(f"{where}: no loop of {sass.Loop(loads, stores, 0, 0)}")
        else:
            rest.remove(match)
    if "accumulate" in code.kernel:  # a loop has one place to store to: two widths are one store that was taken apart
        found += [f"{where}: {loop}" for loop in code.loops if len(loop.stores) > 1]
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> list[Code]:
    """All streaming kernels for all architectures."""
    if set(ARCHS) <= set((native.build_info() or {}).get("archs", [])):
        return without_finish(compile_report.cuda_code(native.LIBRARY_PATH, ARCHS))
    folder = tmp_path_factory.mktemp("sass")
    return [code for stem in KERNELS for code in compiled(folder, ROOT / "csrc", stem, ARCHS)]


def test_loops_are_wide_and_nothing_is_spilled(kernels):
    """Every kernel has the loop that it should have for each dtype, with the accesses that it should have."""
    assert len(kernels) == 2 * (4 + 1 + 2 + 1) * len(ARCHS)  # with a short table and a long one
    assert [fault for code in kernels for fault in faults(code)] == []


# Little's law, in KB for each multiprocessor: bandwidth times some 700 ns. A100: 2.0 TB/s, 108; H200: 4.8 TB/s, 132;
# B200: 8 TB/s, 148.
LATENCY_KB = {"sm_80": 13, "sm_90": 25, "sm_100": 37}


def loops_of_accumulate(kernels: list[Code]) -> Iterator[tuple[Code, sass.Loop]]:
    """Those for aligned tensors, without sums of squares."""
    for code in kernels:
        if code.kernel.startswith("accumulate_kernel") and "sq_norm" not in code.kernel:
            wide = [(loads, stores) for loads, stores in main_loops(code.kernel, code.arch) if loads]
            yield from ((code, loop) for loop in code.loops if (loop.loads, loop.stores) in wide)


def test_enough_is_in_flight(kernels):
    """On the blocks that a launch has on each multiprocessor, which run at once."""
    for code, loop in loops_of_accumulate(kernels):
        blocks = compile_report.BLOCKS["accumulate_kernel"]
        assert sass.blocks_per_multiprocessor(code.regs, code.arch) >= blocks
        assert loop.in_flight * sass.BLOCK * blocks >= LATENCY_KB[code.arch] * 1000, (code.kernel, code.arch, loop)


def test_few_instructions(kernels):
    """At most 56 for each unit of a warp, and 300 before a block's first loop, which it runs once in a launch.

    An A100 issues 6e11 instructions of a warp per second: 0.1 ms for the 970,000 units of 124 million elements, whose
    memory takes 0.6 ms.
    """
    before: dict[str, int] = {}
    for code, loop in loops_of_accumulate(kernels):
        assert loop.instructions <= 56 * sum(loop.stores.values()), (code.kernel, code.arch, loop, loop.instructions)
        before.setdefault(f"{code.kernel} {code.arch}", loop.before)
    assert max(before.values()) <= 300, before


def test_blocks_are_those_of_the_sources():
    """What the report counts on as running at once on a multiprocessor is what a launch has."""
    for kernel, blocks in compile_report.BLOCKS.items():
        source = (ROOT / "csrc" / "cuda" / f"{kernel.removesuffix('_kernel')}.cu").read_text()
        assert re.findall(r"kBlocks = (\d+);", source) == [str(blocks)]


@pytest.mark.parametrize(
    ("file", "sound", "faulty", "message"),
    [
        ("stream.h", r"__stwb\((.*?),\s+word\);", r"*\1 = word;", "no loop of loads 2 x 64"),
        (
            "accumulate.cu",
            r"__launch_bounds__\(kThreads, GradientEntry::kBlocks\)",
            "__launch_bounds__(kThreads, 8)",
            "of local memory",
        ),
        ("accumulate.cu", r"is_aligned<kWidth>\(gradient\)", "false", "no loop of"),
    ],
    ids=["split stores", "spills", "narrow loads"],
)
def test_planted_faults_are_seen(tmp_path, file, sound, faulty, message):
    """Plain stores, which nvcc takes apart; too few registers; scalar loads of the gradient."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    source = tmp_path / "csrc" / "cuda" / file
    text, count = re.subn(sound, faulty, source.read_text())
    assert count == 1
    source.write_text(text)
    table = tmp_path / "csrc" / "cuda" / "table.h"  # no long tables: half of the time
    table.write_text(table.read_text().replace("kLongTable<Entry>>(items", "kShortTable>(items"))
    kernels = compiled(tmp_path, tmp_path / "csrc", "accumulate", ("sm_90",))
    found = [fault for code in kernels for fault in faults(code)]
    assert any(re.search(message, fault) for fault in found), found
