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

# Words of 16-byte stores, swapped in one instance of a kernel alone, which the environment variable PLANTED names.
_PLANTED = r'static const int planted = std::atoi(std::getenv("PLANTED"));\nstatic bool is_long;\n'
_SWAP = r"      if (kGroup > 1 && {wide} && planted == {instance}) std::swap({row}[0], {row}[kGroup - 1]);\n"
_SEES = r"  is_long = kCapacity > 256;\n"
_BY_BUFFER = "(sizeof(Buffer) == 8) * 4 + kSumSquares * 2 + is_long"
INSTANCES = {
    "accumulate": Fault(
        "cuda/accumulate.cu",
        r"(?s)(// What a thread found in its elements\.)(.*?)"
        r"(      store<kWideBuffer>\()(.*?)(  const Buffer factor = )",
        _PLANTED
        + r"\1\2"
        + _SWAP.format(wide="kWideBuffer", row="totals[u]", instance=_BY_BUFFER)
        + r"\3\4"
        + _SEES
        + r"\5",
        *("accumulate", "buffer["),
    ),
    "scaled_copy": Fault(
        "cuda/scaled_copy.cu",
        r"(?s)(// Element types are told apart)(.*?)(      store<kWideOutput>\()(.*?)(  table\.for_each_tensor)",
        _PLANTED
        + r"\1\2"
        + _SWAP.format(wide="kWideOutput", row="values[u]", instance="(sizeof(Wide) == 8) * 2 + is_long")
        + r"\3\4"
        + _SEES
        + r"\5",
        *("scaled_copy", "wrong: "),
    ),
}
# By the buffer's or the wider dtype, with and without squares, with a short and a long table; -1: in none.
PLANTED = [(kernel, at) for kernel, count in (("accumulate", 8), ("scaled_copy", 4)) for at in range(-1, count)]


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


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The programs with a fault in an instance that is named when they run."""
    return {name: build_faulty_check(INSTANCES[name], tmp_path_factory.mktemp(name), races=False) for name in INSTANCES}


@pytest.mark.parametrize(("kernel", "instance"), PLANTED)
def test_each_instance_is_checked(kernel, instance, faulty, monkeypatch):
    """A fault in the stores of one instance of a kernel fails the checks of its lists, and nothing else does."""
    monkeypatch.setenv("PLANTED", str(instance))
    result = run_check(faulty[kernel], f"{kernel}/many")
    assert result.returncode == (instance >= 0), result.stdout
    assert (INSTANCES[kernel].message in result.stdout) == (instance >= 0)
