"""The program of `make device-check`, run on the host: faults planted in a copy of the sources must fail it.

Nothing here is the host's alone: a device, or what stands in for one, runs the same program and sees the same faults.
"""

import pytest

from tests.cuda_host.build import Fault, build_check, build_faulty_check, compiler, run_check

pytestmark = [pytest.mark.starts, pytest.mark.cuda_host]
__test__ = compiler() is not None

SWAP = "if constexpr (sizeof(word) > 4) { const auto x = word.x; word.x = word.y; word.y = x; }"
FAULTS = {
    "last block lost": Fault(
        *("cuda/table.h", r"unit < units\) {", "unit < units && blockIdx.x + 1 < gridDim.x) {"),
        *("accumulate", "buffer["),
    ),
    "words swapped": Fault(
        *("cuda/stream.h", r"memcpy\(&word, values, sizeof\(word\)\);", rf"\g<0> {SWAP}"),
        *("accumulate", "buffer["),
    ),
    "barrier gone": Fault(
        *("cuda/reduce.h", r"(of_warps\[warp\] = value;)\n  __syncthreads\(\);", r"\1", "norm", "norm"),
    ),
    "fp16 towards zero": Fault(
        *("core/numeric.h", "__float2half_rn", "__float2half_rz", "scaled_copy", "fp16 of fp32["),
    ),
    "bf16 towards zero": Fault(
        *("core/numeric.h", "__float2bfloat16_rn", "__float2bfloat16_rz", "scaled_copy", "bf16 of fp32["),
    ),
    "off by one in the table": Fault(
        *("cuda/table.h", "first_unit = table.units;", "first_unit = table.units + 1;", "accumulate", "buffer["),
    ),
    "half of the lanes in the mask": Fault("cuda/reduce.h", "0xffffffffu", "0x0000ffffu", "norm", "not in its mask"),
}


def test_sound_kernels_pass():
    """What the faults fail; `make device-check` runs all the other checks too."""
    result = run_check(build_check(races=False))
    assert result.returncode == 0, result.stdout
    assert "0 of 4 checks failed" in result.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail(fault, tmp_path):
    """The run fails and says what is wrong where."""
    result = run_check(build_faulty_check(FAULTS[fault], tmp_path, races=False))
    assert result.returncode == 1
    assert FAULTS[fault].message in result.stdout
