"""Errors that several modules raise, with the same words everywhere, whose warning a warning is, and out of memory."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class _Logger(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"accumkernels: {msg}", kwargs


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return the logger of a module. Its messages begin with "accumkernels:", since few programs show loggers' names.

    Args:
        name: The module's `__name__`.
    """
    return _Logger(logging.getLogger(name), {})


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Make the error for an argument of the wrong type: "bucket_bytes must be an int, got '1MB'".

    Args:
        name: What the caller calls the argument.
        expected: What it should be, with its article: "an int".
        value: What was given; see `short`.
    """
    return TypeError(f"{name} must be {expected}, got {short(value)}")


def short(value: object) -> str:
    """Return a value's repr, cut to one short line; one that fails is replaced by the class's name."""
    return " ".join(_SHORT.repr(value).split())


def expect(value: Any, kind: Any, name: str, expected: str, but: Any = ()) -> Any:
    """Check that `value` is an instance of `kind`, but not of `but`, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    if not isinstance(value, kind) or isinstance(value, but):
        raise wrong_type(name, expected, value)
    return value


def expect_iterable(value: Any, name: str, expected: str = "an iterable") -> Any:
    """Check that `value` can be iterated over, as sequences without `__iter__` can too, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    if not isinstance(value, Iterable) and not hasattr(type(value), "__getitem__"):
        raise wrong_type(name, expected, value)
    return value


def one_of(value: Any, name: str, accepted: tuple[Any, ...]) -> None:
    """Check that `value` is one of `accepted`.

    Raises:
        ValueError: names the argument, its value and the accepted ones.
    """
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")


@contextlib.contextmanager
def needs(package: str, oldest: str) -> Iterator[None]:
    """Around the imports of an adapter: refuse a package that is not installed, or too old.

    Args:
        package: The name of the package and of the adapter, and of the extra that installs it.
        oldest: The oldest release that works, as in pyproject.toml.

    Raises:
        ImportError: says what is needed and what is installed.
    """
    try:
        version = importlib.import_module(package).__version__
        from packaging.version import Version  # the trainers require it, and we do not

        if Version(version) >= Version(oldest):
            yield
            return
    except ImportError as error:
        raise ImportError(
            f"accumkernels.integrations.{package} needs {error.name or package}: pip install 'accumkernels[{package}]'",
            name=error.name or package,
        ) from error
    raise ImportError(
        f"accumkernels.integrations.{package} needs {package} >= {oldest}, and {version} is installed: "
        f"pip install 'accumkernels[{package}]'",
        name=package,
    )


# ---- Tells out of memory from every other failure

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
    seen: set[int] = set()
    link: BaseException | None = expect(exception, BaseException, "exception", "an exception")
    while link is not None and id(link) not in seen:
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, RuntimeError) and _MESSAGES.search(str(link)):
            return True
        seen.add(id(link))
        link = link.__cause__
    return False
