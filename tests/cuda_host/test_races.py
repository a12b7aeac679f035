"""The program of tests/cuda_device under ThreadSanitizer, on the host: barriers, blocks that race, shuffles.

Each fault is planted in a copy of the sources, and the run must fail for it.
"""

import os

import pytest

from tests.cuda_host.build import SANITIZED, Fault, build_check, build_faulty_check, has_thread_sanitizer, run_check

pytestmark = [pytest.mark.starts, pytest.mark.cuda_host]
__test__ = has_thread_sanitizer() and SANITIZED not in os.environ  # build.py --run does it before


@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_do_not_race(seed):
    """All kernels over several blocks, with flags that blocks raise at once; threads in order, and in another."""
    result = run_check(build_check(races=True), seed=seed)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout


RACES = {
    "no barrier between two reductions": Fault(
        "cuda/accumulate.cu", r"__syncthreads\(\);(  // block_reduce uses)", r"\1", "accumulate", "data race"
    ),
    "no barrier inside a reduction": Fault(
        "cuda/reduce.h", r"(of_warps\[warp\] = value;\n)\s*__syncthreads\(\);", r"\1", "norm", "data race"
    ),
    "blocks store to one place": Fault(
        "cuda/norm.cu", r"partials\[blockIdx.x\] = result;", "partials[0] = result;", "norm", "data race"
    ),
}


@pytest.mark.parametrize("fault", RACES)
def test_planted_races_fail(fault, tmp_path):
    """The run ends with an error that names the race."""
    result = run_check(build_faulty_check(RACES[fault], tmp_path, races=True))
    assert result.returncode != 0
    assert RACES[fault].message in result.stderr
