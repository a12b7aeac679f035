"""What these tests share. They install from the package index, so they have targets of their own in the Makefile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import build_wheel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder start processes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.starts)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One wheel of this checkout, for every environment the same."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))
