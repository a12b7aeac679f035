"""What only the native CPU kernels have: instruction sets, threads, streaming stores, 64-bit sizes, ownership."""

import contextlib
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from accumkernels.ops import native, reference
from tests.support.backends import BUFFERS, Accumulate, assert_same_bits, dtype_id, random, scalar, squares
from tests.support.instruction_set_check import NATIVE

__test__ = native.load_error is None  # nothing to collect without the library

INSTRUCTION_SETS = ("portable", "avx2", "avx512")
BEST = native.cpu_instruction_set()
SUPPORTED = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(BEST) + 1] if BEST else ()
CHUNK = 32 * 1024  # elements; csrc/cpu/chunks.h


@pytest.fixture
def threads():
    """Sets the number of threads, and resets it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.starts
@pytest.mark.parametrize("instruction_set", SUPPORTED)
def test_instruction_set(instruction_set):
    """Each instruction set that this processor has, in a process of its own, agrees with plain torch in every bit."""
    script = Path(__file__).parents[1] / "support" / "instruction_set_check.py"
    environment = {**os.environ, "ACCUMKERNELS_CPU": instruction_set, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["OMP_NUM_THREADS"] = "2"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [instruction_set]


@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
def test_number_of_threads_changes_no_bit(threads, buffer_dtype):
    """Gradients over many chunks, cut inside and between tensors: the same sums and flags on 1, 2 and 3 threads."""
    sizes = [3 * CHUNK + 5, 0, 7, CHUNK - 1, 1, 64, 2 * CHUNK, 100_003]
    grads = [random(n, torch.bfloat16 if n % 2 else torch.float32, seed=n, magnitude=1e3) for n in sizes]
    grads[-1][-1] = torch.inf
    results = []
    for count in (1, 2, 3):
        threads(count)
        call = Accumulate(grads, buffer_dtype=buffer_dtype, kwargs={"weight": 0.7, "sq_norm": squares(0.0)})
        result = call.run(native)
        result["norm"] = scalar(0.0)
        native.norm_(result["norm"], grads[:-1])
        results.append(result)
    for other in results[1:]:
        for name, expected in results[0].items():
            assert_same_bits(other[name], expected, name)


@pytest.mark.parametrize("alignment", [32, 33], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("buffer_dtype", BUFFERS, ids=dtype_id)
def test_large_first_touch(buffer_dtype, alignment):
    """32 MB of buffer and more are stored past the caches where aligned: same bits, neighbours untouched."""
    elements = 32 * 2**20 // buffer_dtype.itemsize
    sizes = [elements - 5000, 4999, 4097, 3, 100]
    grads = [random(n, dtype, seed=n) for n, dtype in zip(sizes, [torch.bfloat16, torch.float16] * 3, strict=False)]
    overwrite = [True, True, True, True, False]
    call = Accumulate(grads, buffer_dtype, overwrite=overwrite, alignment=alignment, kwargs={"weight": 0.3})
    call.check(NATIVE)


@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, 5 * CHUNK + 77, 9 * CHUNK - 1])
def test_overflow_in_any_chunk(position):
    """One bad element flags its tensor alone, wherever it lies."""
    grads = [random(9 * CHUNK, torch.float16, seed=i) for i in range(2)]
    grads[1][position] = torch.nan
    result = Accumulate(grads, kwargs={"tag": 7}).check(NATIVE)
    assert result["flags"].tolist() == [0, 7]
    found_inf, flags = scalar(0.0), torch.zeros(2, dtype=torch.int32)
    native.check_finite_(grads, [0, 1], found_inf, flags, tag=3)
    assert found_inf.item() == 1 and flags.tolist() == [0, 3]


def sparse(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written."""
    no_reserve = 0x4000  # MAP_NORESERVE on Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def test_offsets_beyond_32_bits():
    """Segments behind the 2**31st and 2**32nd element of a buffer."""
    buffer = sparse(2**32 + 4096, torch.float32)
    rows = [[0, 5], [2**31 - 3, 100], [2**32 + 1, 70]]
    layout = torch.tensor(rows)
    grads = [random(n, torch.bfloat16, seed=n) for _, n in rows]
    state, flags = torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.int32)
    for overwrite in (True, False):
        native.accumulate_(buffer, state, grads, [0, 1, 2], [overwrite] * 3, layout, layout, flags=flags)
    for (offset, n), grad in zip(rows, grads, strict=True):
        assert_same_bits(buffer[offset : offset + n], 2 * grad.float())
        assert not buffer[offset + n : offset + n + 64].any()


def test_tensor_of_more_than_2_to_the_31_elements():
    """The last element of 2**31 + 11 is seen by every op that reads without writing as much."""
    big = sparse(2**31 + 11, torch.float16)
    big[-1] = -5.0
    norm, largest = scalar(0.0), scalar(0.0)
    native.norm_(norm, [big])
    native.norm_(largest, [big], ord=float("inf"))
    assert (norm.item(), largest.item()) == (25.0, 5.0)
    big[-1] = torch.inf
    found_inf, flags = scalar(0.0), torch.zeros(1, dtype=torch.int32)
    native.check_finite_([big], [0], found_inf, flags)
    assert found_inf.item() == 1 and flags.item() == 1


@pytest.mark.parametrize("valid", [True, False], ids=["call", "refused call"])
def test_tensors_are_released(valid):
    """The library keeps no reference to a tensor it was given, in a list or alone, whether it worked or raised."""
    call = Accumulate([torch.ones(3), torch.ones(4)], kwargs={"sq_norm": squares(0.0)})
    tensors = [torch.ones(3), torch.ones(4 if valid else 5), torch.zeros(4, dtype=torch.float64), squares()]
    references = [weakref.ref(tensor) for tensor in tensors]
    with contextlib.nullcontext() if valid else pytest.raises(RuntimeError, match=r"grads\[1\] has 5 elements"):
        native.accumulate_(
            call.buffer, tensors[2], tensors[:2], [0, 1], [False] * 2, call.layout, call.layout, sq_norm=tensors[3]
        )
    tensors.clear()
    assert [reference() for reference in references] == [None] * 4


def test_messages_hold_no_paths_of_the_build():
    """An error is one sentence: no source file, no line, no C++ stack."""
    call = Accumulate([torch.ones(3)])
    with pytest.raises(RuntimeError) as error:
        native.accumulate_(call.buffer, torch.zeros(4), call.grads, [0], [False], call.layout, call.layout)
    assert str(error.value) == "accumulate_: state is torch.float32, expected torch.float64"


def test_dense_layouts_in_memory_order():
    """Channels-last and transposed gradients are taken as they lie in memory."""
    channels_last = random((2, 3, 4, 5), torch.bfloat16).contiguous(memory_format=torch.channels_last)
    transposed = random((7, 33), torch.float16).t()
    ones = torch.ones(3, 1, 5).transpose(0, 2)  # strides of dimensions of size 1 do not matter
    Accumulate([channels_last, transposed, ones], kwargs={"weight": 2.0}).check(NATIVE)


def test_description():
    """The library says what it is; other devices are refused by name."""
    info = native.build_info()
    assert {"version", "cuda", "archs"} <= set(info)
    assert native.cpu_instruction_set() in INSTRUCTION_SETS
    assert native.unavailable(torch.device("cpu")) is None
    assert "'meta'" in native.unavailable(torch.device("meta"))


def test_native_kernels_are_what_the_op_runs():
    """torch.ops.accumkernels dispatches CPU tensors to the library: only it validates."""
    with pytest.raises(RuntimeError, match="ord is 3, expected 2 or inf"):
        torch.ops.accumkernels.norm_(scalar(0.0), [torch.ones(3)], ord=3.0)
    reference.norm_(scalar(0.0), [torch.ones(3)], ord=3.0)
