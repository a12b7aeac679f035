"""Errors that several modules raise, with the same words everywhere."""

from __future__ import annotations

import contextlib
import importlib
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Make the error for an argument of the wrong type: "bucket_bytes must be an int, got '1MB'".

    Args:
        name: What the caller calls the argument.
        expected: What it should be, with its article: "an int".
        value: What was given. Its repr is cut to one short line; one that fails is replaced by the class's name.
    """
    return TypeError(f"{name} must be {expected}, got {' '.join(_SHORT.repr(value).split())}")


def expect(value: Any, kind: Any, name: str, expected: str) -> Any:
    """Check that `value` is an instance of `kind`, and return it.

    Raises:
        TypeError: names the argument and its value.
    """
    if not isinstance(value, kind):
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
            f"accumkernels.integrations.{package} needs {package}: pip install 'accumkernels[{package}]'", name=package
        ) from error
    raise ImportError(
        f"accumkernels.integrations.{package} needs {package} >= {oldest}, and {version} is installed: "
        f"pip install 'accumkernels[{package}]'",
        name=package,
    )
