"""The compile report: every kernel is in it, nothing spills, and the accumulate kernels move 128 bits at a time.

The report is made once, in a process of its own: in this one Triton may be its interpreter.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accumkernels.ops import native, triton_table
from benchmarks import compile_report
from benchmarks.compile_report import CAPABILITIES, Code, readable
from benchmarks.harness import sass

ROOT = Path(__file__).resolve().parents[2]
ARCHS = [f"sm_{capability}" for capability in CAPABILITIES]
BUILT = [arch for arch in (native.build_info() or {}).get("archs", []) if arch in ARCHS]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[Code]:
    """What the command reports with all details, although TRITON_INTERPRET is set."""
    file = tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, "-m", "benchmarks.compile_report", "--details", "--archs", ",".join(ARCHS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--json", str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(file.read_text())
    assert bool(done.stderr) == (not (native.build_info() or {}).get("cuda"))  # says so when there is no CUDA part
    return [Code(**entry) for entry in json.loads(done.stdout)]


def names(compiled: list[Code], backend: str, arch: str) -> set[str]:
    """Kernels without their variants."""
    return {c.kernel.partition("[")[0] for c in compiled if (c.backend, c.arch) == (backend, arch)}


@pytest.mark.starts
class TestCompiled:
    """Every kernel, compiled for sm_80, sm_90 and sm_100."""

    @pytest.mark.parametrize("arch", ARCHS)
    def test_every_triton_kernel_is_listed(self, compiled, arch):
        """Each @triton.jit function that triton.py launches."""
        source = (ROOT / "accumkernels" / "ops" / "triton.py").read_text()
        launched = set(re.findall(r"\b(?:kernels|_kernels\(\))\.(\w+_kernel)\b", source))
        assert len(launched) >= 7
        assert names(compiled, "triton", arch) == launched

    @pytest.mark.parametrize("arch", BUILT)
    def test_every_cuda_kernel_is_listed(self, compiled, arch):
        """Each __global__ function in csrc/cuda."""
        sources = "".join(path.read_text() for path in (ROOT / "csrc" / "cuda").glob("*.[ch]*"))
        defined = set(re.findall(r"__global__ void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(", sources))
        assert len(defined) == sources.count("__global__ ") >= 7
        assert names(compiled, "cuda", arch) == defined

    def test_each_is_listed_once(self, compiled):
        """No two variants share a name."""
        keys = [(c.kernel, c.backend, c.arch) for c in compiled]
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize("flaw", ["spills", "fused", "flushed", "approximate", "late_loads"])
    def test_no(self, compiled, flaw):
        """No spilled register, fused multiply-add, flushed subnormal, approximate division, or load that comes late."""
        assert [c for c in compiled if getattr(c, flaw)] == []

    def test_accumulate_is_vectorised(self, compiled):
        """128-bit loads and stores; but not at addresses that may be unaligned."""
        accumulate = [c for c in compiled if "accumulate" in c.kernel]
        assert {(c.backend, c.arch) for c in accumulate} == {
            *(("triton", arch) for arch in ARCHS),
            *(("cuda", arch) for arch in BUILT),
        }
        for code in accumulate:
            wide = "unaligned" not in code.kernel
            assert (code.vector_loads > 0, code.vector_stores > 0) == (wide, wide), code

    def test_accumulate_is_vectorised_throughout(self, compiled):
        """Triton's: as many wide accesses as the bytes of a thread need, of 128 bits or half as many of 256."""
        sizes = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
        results = [c for c in compiled if c.backend == "triton" and c.kernel.startswith("accumulate_kernel[")]
        assert len(results) == 9 * len(CAPABILITIES)
        for code in results:
            grad, buffer = code.kernel.partition("[")[2].rstrip("]").split(",")[:2]
            per_thread = triton_table.BLOCK // (32 * triton_table.NUM_WARPS)
            stores = per_thread * sizes[buffer] // 16
            loads = stores + per_thread * sizes[grad] // 16
            if "unaligned" not in code.kernel:
                assert code.vector_loads >= loads // 2, code
                assert code.vector_stores >= stores // 2, code

    @pytest.mark.parametrize("kernel", ["norm_kernel", "check_finite_kernel", "scaled_copy_kernel"])
    def test_other_kernels_are_vectorised(self, compiled, kernel):
        """As accumulate."""
        results = [c for c in compiled if c.kernel.partition("[")[0] == kernel]
        assert results
        assert all(c.vector_loads for c in results)
        assert all(c.vector_stores for c in results) == (kernel == "scaled_copy_kernel")

    def test_registers_leave_room(self, compiled):
        """Two blocks of 256 threads fit into a multiprocessor's 65,536 registers."""
        assert [c for c in compiled if c.regs * 256 * 2 > 65_536] == []


def test_default_is_brief(monkeypatch, capsys):
    """Without --details an entry has the eight documented fields; 2,048 threads of 32 registers fit, 96 bytes each."""
    loop = sass.Loop({64: 4, 128: 4}, {128: 4}, 0, 96)
    monkeypatch.setattr(
        compile_report, "report", lambda details, archs: [Code("k[bf16]", "cuda", "sm_90", 32, 0, 4, 2, [loop])]
    )
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", ""))  # main() takes it away
    assert compile_report.main([]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "kernel": "k[bf16]",
            "backend": "cuda",
            "arch": "sm_90",
            "regs": 32,
            "spills": 0,
            "vector_loads": 4,
            "vector_stores": 2,
            "loops": ["loads 4 x 64 + 4 x 128, stores 4 x 128; 192 KB in flight"],
        }
    ]


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN12accumkernels4cuda46_GLOBAL__N__d6_13_accumulate_cu_e87b4417accumulate_kernelIfLb0ELi2031EEEvNS0_5TableINS1_1XEEE",
         "accumulate_kernel[fp32]"),
        ("_ZN12accumkernels4cuda46_GLOBAL__N__d6_13_accumulate_cu_e87b4417accumulate_kernelIdLb1EEEvNS0_5TableINS1_1XEEE",
         "accumulate_kernel[fp64,sq_norm]"),
        ("_ZN12accumkernels4cuda39_GLOBAL__N__8a_7_norm_cu_1249e70918norm_finish_kernelILNS_4NormE1EEEvPKdlPd",
         "norm_finish_kernel[inf]"),
        ("_ZN12accumkernels4cuda39_GLOBAL__N__fd_7_norm_cu_1249e70911norm_kernelILNS_4NormE1ELi256EEEvNS0_5TableINS1_1XEEEPd",
         "norm_kernel[inf,short]"),
        ("_ZN12accumkernels4cuda40_GLOBAL__N__c8_8_probe_cu_0c50b0d312probe_kernelEv", "probe_kernel"),
        ("_ZN12accumkernels4cuda48_GLOBAL__N__61_15_check_finite_cu_d40a8bcc19check_finite_kernelENS0_5TableINS1_1XEEE",
         "check_finite_kernel"),
        ("_ZN3abc12_GLOBAL__N_1_x_cu_1234567811some_kernelI6__halfLi4EEEvPK6__half", "some_kernel[fp16,Li4E]"),
    ],
)  # fmt: skip
def test_names_are_readable(mangled, name):
    """Names as nvcc mangles those of anonymous namespaces."""
    assert readable(mangled) == name
