"""The compile report: every kernel is in it, nothing spills, and the accumulate kernels move 128 bits at a time.

The report is made once, in a process of its own: in this one Triton may be its interpreter.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from accumkernels.ops import native, triton
from benchmarks import compile_report
from benchmarks.compile_report import AMD, CAPABILITIES, Code, readable
from benchmarks.harness import assembly, sass

ROOT = Path(__file__).resolve().parents[2]
ARCHS = [f"sm_{capability}" for capability in CAPABILITIES]
TRITON_ARCHS = [*ARCHS, *AMD]
WARPS = {arch: 64 if arch.startswith("gfx9") else 32 for arch in TRITON_ARCHS}  # threads; 64 on AMD's Instinct cards
SIZES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
# Bytes of shared memory per block: two sums of 8 warps in fp64. What exchanges a block's elements takes 8 KB or more.
FOR_REDUCTIONS = 2 * 8 * triton.NUM_WARPS
# Triton 3.7 (torch 2.13 for CUDA) schedules loads of sums in fp64 earlier, and spills 8 bytes of one copy.
OLD_TRITON = Version(importlib.metadata.version("triton")) < Version("3.8")
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
    """Every kernel, compiled for sm_80, sm_90 and sm_100, and Triton's for AMD's GPUs."""

    @pytest.mark.parametrize("arch", TRITON_ARCHS)
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

    @pytest.mark.parametrize("flaw", ["spills", "fused", "flushed", "approximate"])
    def test_no(self, compiled, flaw):
        """No spilled register, fused multiply-add, flushed subnormal, or approximate division."""
        allowed = 8 if flaw == "spills" and OLD_TRITON else 0
        assert [c for c in compiled if getattr(c, flaw) > (allowed if c.backend == "triton" else 0)] == []

    def test_no_late_loads(self, compiled):
        """No load waits for another. On gfx1100 two forms have some: its scheduler moves loads behind products."""
        assert [c for c in compiled if c.late_loads and c.arch != "gfx1100"] == []

    def test_threads_exchange_sums_alone(self, compiled):
        """Triton's loads and stores give a thread the same elements, which need no shared memory in between."""
        found = {c.kernel: c.shared for c in compiled if c.backend == "triton"}
        assert found["accumulate_kernel[bf16,fp32,unchecked]"] == 0
        assert [c for c in compiled if c.backend == "triton" and c.shared > FOR_REDUCTIONS] == []

    def test_accumulate_is_vectorised(self, compiled):
        """128-bit loads and stores; but not at addresses that may be unaligned."""
        accumulate = [c for c in compiled if "accumulate" in c.kernel]
        assert {(c.backend, c.arch) for c in accumulate} == {
            *(("triton", arch) for arch in TRITON_ARCHS),
            *(("cuda", arch) for arch in BUILT),
        }
        for code in accumulate:
            wide = "unaligned" not in code.kernel
            assert (code.vector_loads > 0, code.vector_stores > 0) == (wide, wide), code

    def test_accumulate_is_vectorised_throughout(self, compiled):
        """Triton's: 128 bits of the buffer at a time, and as many elements of the gradient, as far as 128 bits hold."""
        results = [c for c in compiled if c.backend == "triton" and c.kernel.startswith("accumulate_kernel[")]
        assert len(results) == 9 * len(TRITON_ARCHS)
        for code in results:
            grad, buffer = (SIZES[name] for name in code.kernel.partition("[")[2].rstrip("]").split(",")[:2])
            per_thread = triton.BLOCK // (WARPS[code.arch] * triton.NUM_WARPS)
            stores = per_thread * buffer // 16
            loads = stores + (per_thread * grad // 16 if grad >= buffer else 0)
            if "unaligned" not in code.kernel:
                assert (code.vector_loads, code.vector_stores) == (loads, stores), code
            if "unaligned" not in code.kernel and (grad, buffer) == (2, 4):
                assert code.half_loads == per_thread * grad // 8, code

    @pytest.mark.parametrize("kernel", ["norm_kernel", "check_finite_kernel", "scaled_copy_kernel"])
    def test_other_kernels_are_vectorised(self, compiled, kernel):
        """As accumulate."""
        results = [c for c in compiled if c.kernel.partition("[")[0] == kernel]
        assert results
        assert all(c.vector_loads or c.half_loads for c in results)
        assert all(c.vector_stores for c in results) == (kernel == "scaled_copy_kernel")

    def test_registers_leave_room(self, compiled):
        """Two blocks of 256 threads fit into a multiprocessor's 65,536 registers."""
        most = {"cuda": 128, "triton": 144 if OLD_TRITON else 128}
        assert [c for c in compiled if c.regs > most[c.backend]] == []


def test_default_is_brief(monkeypatch, capsys):
    """Without --details an entry has the nine documented fields; 2,048 threads of 32 registers fit, 96 bytes each."""
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
            "shared": 0,
            "loops": ["loads 4 x 64 + 4 x 128, stores 4 x 128; 192 KB in flight"],
        }
    ]


# A division of AMD's compiler, which rounds correctly, and a product whose addend is -0.
DIVISION = """
	v_rcp_f32_e32 v6, v4
	v_fma_f32 v7, -v4, v6, 1.0
	v_fmac_f32_e32 v6, v7, v6
	v_mul_f32_e32 v7, v5, v6
	v_fma_f32 v8, -v4, v7, v5
	v_dual_fmac_f32 v7, v8, v6 :: v_dual_fmac_f32 v5, v4, v7
	v_div_fmas_f32 v4, v4, v6, v7
	v_div_fixup_f32 v2, v4, v3, v2
	v_fma_mix_f32 v7, v38, v87, neg(0) op_sel_hi:[1,0,0]
	.amdhsa_float_denorm_mode_32 3
"""


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (DIVISION, {}),
        (DIVISION + "\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]\n", {"fused": 1}),
        (DIVISION + "\tv_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5\n", {"fused": 1}),
        (DIVISION + "\tv_fma_mix_f32 v7, v38, v87, v1 op_sel_hi:[1,0,0]\n", {"fused": 1}),
        (DIVISION + "\tv_rcp_f32_e32 v6, v4\n", {"approximate": 1}),
        (DIVISION + "\tv_cvt_pkrtz_f16_f32 v6, v4, v5\n", {"approximate": 1}),
        (DIVISION.replace("mode_32 3", "mode_32 0"), {"flushed": 1}),
        ("  .private_segment_fixed_size: 16\n  .vgpr_count:     40\n", {"spills": 16, "regs": 40}),
        (".LBB0_1:\n\tv_mul_f32_e32 v1, v2, v3\n\tbuffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen\n",
         {"late_loads": 1, "vector_loads": 1}),
        (".LBB0_1:\n\tglobal_load_b128 v[0:3], v9, s[4:7]\n\tv_dual_mul_f32 v1, v2, v3 :: v_dual_mov_b32 v4, v5\n",
         {"vector_loads": 1}),
    ],
    ids=["division", "packed", "dual", "mixed", "reciprocal", "toward zero", "flushed", "spilled", "late", "in time"],
)  # fmt: skip
def test_amd_assembly(text, flaw):
    """What would round otherwise, spill or wait in AMD's machine code is counted, and correct divisions are not."""
    assert {name: count for name, count in assembly.amdgcn(text).items() if count} == flaw


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
