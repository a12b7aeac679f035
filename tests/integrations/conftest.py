"""What tests inside trainers share."""

import pytest


@pytest.fixture
def fresh_state():
    """accelerate keeps its settings in singletons."""
    from tests.support.trainers import reset

    yield
    reset()
