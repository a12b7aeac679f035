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
    return [code for code in found if not any(name in code.kernel for name in ("finish", "probe", "judge"))]


def main_loops(kernel: str) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Loads and stores, as {bits: count}, of the loops that a kernel must have for tensors that are aligned.

    A group of elements is 16 bytes of the widest type, so that a warp's accesses fill whole sectors.
    """
    name, _, variant = kernel.rstrip("]").partition("[")
    if name == "accumulate_kernel":
        buffer, unroll = 8 if "fp64" in variant else 4, 2 if "sq_norm" in variant else 4
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
        for accesses in ({64: 8, 128: 4}, {32: 8, 64: 4, 128: 4}):
            yield accesses, accesses


def faults(code: Code) -> list[str]:
    """What is wrong with a kernel, in words."""
    where = f"{code.kernel} on {code.arch}"
    found = [f"{where}: {loop}" for loop in code.loops if loop.spills]
    if code.spills:
        found.append(f"{where}: {code.spills} bytes of local memory")
    rest = list(code.loops)
    for loads, stores in main_loops(code.kernel):
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


def test_enough_is_in_flight(kernels):
    """Little's law: 4.8 TB/s times some 700 ns is 3.4 MB, 25 KB on each of 132 multiprocessors; 64 KB leave room."""
    for code in kernels:
        if code.kernel.startswith("accumulate_kernel") and "sq_norm" not in code.kernel:
            blocks = sass.blocks_per_multiprocessor(code.regs, code.arch)
            wide = [(loads, stores) for loads, stores in main_loops(code.kernel) if loads]
            for loop in code.loops:
                if (loop.loads, loop.stores) in wide:
                    assert loop.in_flight * sass.BLOCK * blocks >= 64 * 1024, (code.kernel, code.arch, loop)


@pytest.mark.parametrize(
    ("file", "sound", "faulty", "message"),
    [
        ("stream.h", r"__stwb\((.*?),\s+word\);", r"*\1 = word;", "stores 4 x 32"),
        ("accumulate.cu", r"__launch_bounds__\(kThreads, 4\)", "__launch_bounds__(kThreads, 8)", "of local memory"),
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
