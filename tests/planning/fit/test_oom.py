"""is_oom_error: by class, by message, through causes; nothing else."""

import pytest
import torch

import accumkernels as ak

MESSAGES = [
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "MPS backend out of memory (MPS allocated: 18.13 GB, other allocations: 1.48 MB, max allowed: 18.13 GB)",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version "
    "2.27.7\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "Last error:\nCuda failure 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "40000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "unable to mmap 8192 bytes from file </torch_1_2>: Cannot allocate memory (12)",
    "std::bad_alloc",
]

OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "NCCL error: unhandled system error",
    "trying to backward through the graph a second time to save memory",
    "the cache is out of memory slots",
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda text: text[:40])
def test_messages(message):
    """What allocators and libraries say in a RuntimeError; the same words in another exception mean nothing."""
    assert ak.is_oom_error(RuntimeError(message))
    assert not ak.is_oom_error(ValueError(message))


@pytest.mark.parametrize("message", OTHERS, ids=lambda text: text[:40])
def test_other_runtime_errors(message):
    """RuntimeErrors that a smaller batch would not mend, some about memory."""
    assert not ak.is_oom_error(RuntimeError(message))


def test_classes():
    """torch's and Python's own, and what derives from them, whatever they say."""

    class ArrayMemoryError(MemoryError):
        pass

    for error in (torch.OutOfMemoryError("x"), torch.cuda.OutOfMemoryError(), MemoryError(), ArrayMemoryError("8 GiB")):
        assert ak.is_oom_error(error)


def test_real_host_allocation():
    """What this torch raises when the host cannot give 2**60 bytes."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ak.is_oom_error(caught.value)


def _raised(function):
    try:
        function()
    except Exception as error:
        return error


def test_chains():
    """A cause counts at any depth; a context does not, and neither does a cycle hang."""

    def from_cause():
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except RuntimeError as error:
                raise ValueError("while compiling") from error
        except ValueError as error:
            raise KeyError("worker") from error

    def in_context():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError:
            raise ValueError("a bug in the handler")  # noqa: B904

    assert ak.is_oom_error(_raised(from_cause))
    assert not ak.is_oom_error(_raised(in_context))
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not ak.is_oom_error(first)


def test_triton_shared_memory():
    """A kernel that wants more shared memory than there is does so at every batch size."""
    errors = pytest.importorskip("triton.runtime.errors")
    assert not ak.is_oom_error(errors.OutOfResources(300_000, 232_448, "shared memory"))


def test_no_exception():
    """Named by its type."""
    with pytest.raises(TypeError, match="exception must be an exception, got 'CUDA out of memory'"):
        ak.is_oom_error("CUDA out of memory")
