"""Tells out of memory from every other failure, and frees what such an error holds."""

from __future__ import annotations

import re
import traceback

import torch

from ..errors import wrong_type

# Messages of plain RuntimeErrors from allocators and libraries. Only texts that always mean memory are here; others
# that sometimes accompany it (CUBLAS_STATUS_NOT_INITIALIZED, CUDNN_STATUS_NOT_SUPPORTED) can also mean a bug, which a
# smaller batch would hide.
_MESSAGES = re.compile(
    "|".join(
        (
            r"\b(CUDA|HIP|XPU|MPS backend) out of memory",  # torch's caching allocators
            r"\b(CUDA|HIP) (driver )?error: out of memory",  # cudaMalloc and cuMem* outside of them, pinned memory
            r"\bcudaErrorMemoryAllocation\b|\bhipErrorOutOfMemory\b|\bCUDA_ERROR_OUT_OF_MEMORY\b",
            r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN|HIPBLAS|ROCBLAS)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED\b",  # cuDNN 9
            r"\bmiopenStatusAllocFailed\b|\brocblas_status_memory_error\b",
            r"(Cuda|HIP) failure( \d+)? '?out of memory",  # NCCL and RCCL, in the last error they append
            r"\bTriton Error \[\w+\]: (?:\w+: )?out of memory",
            r"\bUR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b",  # SYCL
            r"\bDefaultCPUAllocator: (can't allocate|not enough) memory",
            r"\bCannot allocate memory \(12\)",  # shared memory: mmap
            r"\bstd::bad_alloc\b",
        )
    )
)


def _is_oom(exception: BaseException) -> bool:
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and _MESSAGES.search(str(exception)) is not None


def is_oom_error(exception: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the device or on the host.

    It does for `torch.OutOfMemoryError`, `MemoryError`, and every RuntimeError with a text of the caching allocators,
    the CUDA and HIP runtimes, cuBLAS, cuDNN, NCCL, Triton, MPS or the host's allocator, also if one of these is the
    exception's `__cause__`, at any depth. The exception's `__context__`, which was merely being handled when it was
    raised, does not count. Neither does Triton's OutOfResources, because a kernel's shared memory does not depend on
    the batch.

    Raises:
        TypeError: `exception` is not an exception.
    """
    if not isinstance(exception, BaseException):
        raise wrong_type("exception", "an exception", exception)
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        if _is_oom(link):
            return True
        seen.add(id(link))
        link = link.__cause__
    return False


def clear_frames(error: BaseException, outer: BaseException | None = None) -> None:
    """Clear the local variables of every frame of an exception, and of the exceptions that it is chained to.

    Args:
        error: The exception.
        outer: One that was being handled before: its frames are its owner's.
    """
    for link in _chain(error, outer):
        traceback.clear_frames(link.__traceback__)


def let_go(error: BaseException, outer: BaseException | None) -> str:
    """Free what an error's frames hold, and those of the errors behind it; return its message.

    Args:
        error: Nobody will see its traceback.
        outer: See `clear_frames`.
    """
    clear_frames(error, outer)
    for link in _chain(error, outer):
        link.__traceback__ = None
    return str(error)


def _chain(error: BaseException, outer: BaseException | None) -> list[BaseException]:
    """The error and those that it is chained to, up to `outer`."""
    seen: set[int] = {id(outer)}
    found: list[BaseException] = []
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            found.append(link)
            links += [link.__cause__, link.__context__]
    return found
