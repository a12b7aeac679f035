"""What tests of several trainers share."""

from __future__ import annotations

import pytest


@pytest.fixture
def fresh_state():
    """accelerate keeps its settings in singletons."""
    yield
    from tests.support.accelerators import reset

    reset()
