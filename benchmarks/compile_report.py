"""What the compilers made of the kernels, on a machine without a GPU.

    python -m benchmarks.compile_report [--json FILE] [--ptx FOLDER]

Compiles every Triton kernel as a launch would, and reads the SASS of the CUDA kernels in the built library. Standard
output is a JSON list of {kernel, backend, arch, regs, spills, vector_loads, vector_stores, loops, shared}: registers
per thread, bytes of stack and local memory per thread (0: nothing is spilled), how many instructions of the kernel load
from or store to global memory 128 bits or more at a time, and bytes of shared memory per block. CUDA kernels read the
dtype of gradients at run time: one kernel has the code for all of them. For each innermost loop, `loops` says how many
loads and stores of how many bits a thread makes in one turn (4 x 64 of 16-bit gradients and 4 x 128 of an fp32 buffer,
say), and how much of that is in flight on a multiprocessor before its threads wait. Triton's kernels have no loops over
elements. They are compiled for AMD's GPUs too, by the backend in Triton's own wheel.

Left out unless --details is given: Triton's forms for tensors that are not 16-byte aligned, which cannot have wide
accesses (a CUDA kernel holds both forms), and counts of what would round otherwise than the reference does.

--ptx leaves the PTX of Triton's kernels, for the program tests/cuda_device/triton.cpp, and reports nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .harness import assembly, sass

CAPABILITIES = (80, 90, 100)  # that Triton's kernels are compiled for
AMD = ("gfx90a", "gfx942", "gfx1100")  # and these: MI200, MI300, RX 7900
_WIDE_LOAD = re.compile(r"\bLDG?\.[\w.]*(?:128|256)\b")
_WIDE_STORE = re.compile(r"\bSTG?\.[\w.]*(?:128|256)\b")
# The capacity of the table in a kernel's arguments: kShortTable and kLongTable of csrc/cuda/table.h.
_TABLES = {"Li256E": "short", "Li1015E": "", "Li1354E": "", "Li2031E": ""}
# What template arguments say, by kernel; they are shown as they are mangled otherwise.
_ARGUMENTS = {
    "accumulate_kernel": {"Lb0E": "", "Lb1E": "sq_norm", **_TABLES},
    "check_finite_kernel": _TABLES,
    "norm_kernel": {"LNS_4NormE0E": "2", "LNS_4NormE1E": "inf", **_TABLES},
    "scaled_copy_kernel": _TABLES,
    "norm_finish_kernel": {"LNS_4NormE0E": "2", "LNS_4NormE1E": "inf"},
}
# That a launch has on each multiprocessor, and which run at once: kBlocks of csrc/cuda.
BLOCKS = {"accumulate_kernel": 4, "check_finite_kernel": 6, "norm_kernel": 4, "scaled_copy_kernel": 3}
_TYPES = {"f": "fp32", "d": "fp64", "6__half": "fp16", "13__nv_bfloat16": "bf16"}


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel for one architecture; what is in DETAILS only of Triton's, counted in its assembly."""

    kernel: str
    backend: str
    arch: str
    regs: int
    spills: int
    vector_loads: int
    vector_stores: int
    loops: Sequence[sass.Loop] = ()  # only of CUDA kernels
    shared: int = 0
    half_loads: int = 0  # of 64 bits, as of four 16-bit gradients
    fused: int = 0  # multiply-adds, which round once instead of twice
    flushed: int = 0  # instructions that take subnormal numbers for zero
    approximate: int = 0  # divisions
    late_loads: int = 0  # wide loads behind a product, which therefore wait for memory one after the other

    def brief(self) -> dict[str, object]:
        """What is reported without --details."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if name not in DETAILS}
        return {**found, "loops": [self.moved_by(loop) for loop in self.loops]}

    def moved_by(self, loop: sass.Loop) -> str:
        """What one turn of a loop moves, and how much of it is in flight on a multiprocessor."""
        if self.kernel.startswith("scaled_copy"):  # a loop has the code for several dtypes, of which one runs
            return str(loop)
        most = sass.blocks_per_multiprocessor(self.regs, self.arch)
        blocks = min(most, BLOCKS.get(self.kernel.partition("[")[0], most))
        return f"{loop}; {loop.in_flight * sass.BLOCK * blocks // 1024} KB in flight"


DETAILS = ("half_loads", "fused", "flushed", "approximate", "late_loads")


def cuobjdump() -> Path:
    """NVIDIA's disassembler, which the package triton brings along."""
    from triton import __file__ as triton_file

    return Path(triton_file).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def readable(mangled: str) -> str:
    """Name and template arguments of a kernel, such as "accumulate_kernel[fp32,sq_norm]"."""
    found = re.search(r"\d([a-z][a-z_]*)(I.*?E)?E?v?(?:N|P|K|$)", mangled.partition("_cu_")[2] or mangled)
    if found is None:
        return mangled
    name, arguments = found.group(1), (found.group(2) or "")[1:-1]
    spelled = _ARGUMENTS.get(name, {})
    one = "|".join([r"L.*?\d+E", *sorted(_TYPES, key=len, reverse=True), "[a-z]"])
    parts = [spelled.get(a, _TYPES.get(a, a)) for a in re.findall(one, arguments + "E")]
    shown = ",".join(part for part in parts if part)
    return f"{name}[{shown}]" if shown else name


def _usages(text: str) -> dict[str, tuple[int, int, int]]:
    """Registers, spilled and shared bytes by function, from what cuobjdump says."""
    found = re.findall(r"^ Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text, re.MULTILINE)
    return {name: (int(regs), int(stack) + int(local), int(shared)) for name, regs, stack, shared, local in found}


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run([str(cuobjdump()), *arguments], capture_output=True, text=True, check=True).stdout


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes of the one kernel in `cubin`; disassembling it too would take half a second."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ((regs, spills, _),) = _usages(_cuobjdump("-res-usage", file.name)).values()
    return {"regs": regs, "spills": spills}


def _dump(path: Path, arch: str) -> dict[str, tuple[int, int, int, int, list[sass.Loop], int]]:
    """Registers, spilled bytes, wide loads, wide stores, loops and shared bytes of each kernel in a library."""
    text = _cuobjdump("-sass", "-res-usage", "-arch", arch, str(path))
    usage = _usages(text)
    found = {}
    for part in re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]:
        name, _, code = part.partition("\n")
        regs, spills, shared = usage[name.strip()]
        wide = (len(_WIDE_LOAD.findall(code)), len(_WIDE_STORE.findall(code)))
        found[name.strip()] = (regs, spills, *wide, sass.loops(code), shared)
    return found


def triton_code(details: bool = False) -> Iterator[Code]:
    """Compile Triton's kernels. Only where this process's Triton is the compiler, not the interpreter."""
    from benchmarks import triton_compile

    for variant in triton_compile.variants():
        if "unaligned" in variant.name and not details:
            continue
        for capability in CAPABILITIES:
            compiled = triton_compile.compile_variant(variant, capability)
            counts = {**_usage(compiled.asm["cubin"]), **assembly.ptx(compiled.asm["ptx"])}
            yield Code(variant.name, "triton", f"sm_{capability}", shared=compiled.metadata.shared, **counts)
        for arch in AMD:
            compiled = triton_compile.compile_variant(variant, arch)
            counts = assembly.amdgcn(compiled.asm["amdgcn"])
            yield Code(variant.name, "triton", arch, shared=compiled.metadata.shared, **counts)


def leave_ptx(folder: Path, capability: int) -> None:
    """Write each Triton kernel's PTX to FOLDER/NAME.ptx, with its bytes of shared memory in the first line."""
    from benchmarks import triton_compile

    folder.mkdir(parents=True, exist_ok=True)
    for variant in triton_compile.variants():
        compiled = triton_compile.compile_variant(variant, capability)
        text = f"// shared {compiled.metadata.shared}\n{compiled.asm['ptx']}"
        (folder / f"{variant.name}.ptx").write_text(text)


def cuda_code(library: Path, archs: Sequence[str]) -> list[Code]:
    """What a library or an object file holds for these architectures."""
    with ThreadPoolExecutor(2) as pool:
        dumps = list(pool.map(lambda arch: _dump(library, arch), archs))
    return [
        Code(readable(name), "cuda", arch, *numbers)
        for arch, kernels in zip(archs, dumps, strict=True)
        for name, numbers in kernels.items()
    ]


def library_archs() -> list[str]:
    """Architectures that the built library has code for; says on standard error why there is none."""
    from accumkernels.ops import native

    info = native.build_info()
    archs = [arch for arch in (info or {}).get("archs", []) if arch.startswith("sm_")]
    if not archs:
        print(
            f"no CUDA kernels to report: {native.load_error or 'the library was built without CUDA'}", file=sys.stderr
        )
    return archs


def report(details: bool = False, archs: Sequence[str] | None = None) -> list[Code]:
    """All kernels of both backends.

    Args:
        details: See above.
        archs: Only these of the library's architectures.
    """
    from accumkernels.ops import native

    found = list(triton_code(details))
    built = library_archs()
    return found + cuda_code(native.LIBRARY_PATH, [arch for arch in built if archs is None or arch in archs])


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the list here too")
    parser.add_argument("--archs", help="comma-separated: only these of the library's architectures, as sm_80,sm_90")
    parser.add_argument("--details", action="store_true", help="unaligned forms and rounding too")
    parser.add_argument("--ptx", type=Path, help="a folder for the PTX of Triton's kernels; nothing else is done")
    arguments = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported, which is below
    if arguments.ptx:
        leave_ptx(arguments.ptx, CAPABILITIES[0])
        return 0
    code = report(arguments.details, arguments.archs.split(",") if arguments.archs else None)
    text = json.dumps([dataclasses.asdict(c) if arguments.details else c.brief() for c in code], indent=1)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
