"""The CUDA kernels under ThreadSanitizer, on the host: barriers, blocks that race, shuffles, rounding.

Each fault is planted in a copy of the sources, and the run must fail for it.
"""

import os
import re
import shutil

import pytest

from tests.cuda_host.build import ROOT, SANITIZED, build_check, build_faulty_check, has_thread_sanitizer, run_check

pytestmark = [pytest.mark.starts, pytest.mark.cuda_host]
__test__ = has_thread_sanitizer() and SANITIZED not in os.environ  # build.py --run does it before


def test_kernels_do_not_race():
    """All kernels over several blocks, in three orders, with flags that blocks raise at once."""
    result = run_check(build_check())
    assert (result.returncode, result.stderr) == (0, "")


FAULTS = {
    "no barrier between two reductions": (
        "cuda/accumulate.cu",
        r"__syncthreads\(\);(  // block_reduce uses)",
        r"\1",
        "data race",
    ),
    "no barrier behind the lookup": (
        "cuda/accumulate.cu",
        r"__syncthreads\(\);\n(  Outcome outcome)",
        r"\1",
        "data race",
    ),
    "no barrier inside a reduction": (
        "cuda/reduce.h",
        r"(of_warps\[warp\] = value;\n)\s*__syncthreads\(\);",
        r"\1",
        "data race",
    ),
    "blocks store to one place": (
        "cuda/norm.cu",
        r"partials\[blockIdx.x\] = result;",
        "partials[0] = result;",
        "data race",
    ),
    "half of the lanes in the mask": ("cuda/reduce.h", "0xffffffffu", "0x0000ffffu", "not in its mask"),
    "fp16 towards zero": ("core/numeric.h", "__float2half_rn", "__float2half_rz", "scaled_copy rounds to nearest"),
    "bf16 towards zero": (
        "core/numeric.h",
        "__float2bfloat16_rn",
        "__float2bfloat16_rz",
        "scaled_copy rounds to nearest",
    ),
}
COMPILED = {"cuda/accumulate.cu": "accumulate", "core/numeric.h": "scaled_copy"}  # by what is changed; else norm


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault, tmp_path):
    """The run ends with an error that names the fault."""
    file, sound, faulty, message = FAULTS[fault]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text, count = re.subn(sound, faulty, (tmp_path / "csrc" / file).read_text())
    assert count == 1
    (tmp_path / "csrc" / file).write_text(text)
    result = run_check(build_faulty_check(tmp_path / "csrc", COMPILED.get(file, "norm")))
    assert result.returncode != 0
    assert message in result.stderr
